"""Checks that layers, rows and sequences divide over a mesh. No jax here: the planner makes the same checks."""

import math
from collections.abc import Mapping, Sequence

from jaxtrain.config.schema import Config, Parallelism
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import DEFAULT_RULES, nearest_multiples
from jaxtrain.parallel.schedules import Schedule, make_schedule


def check_model_axes(
    degrees: Mapping[str, int], *, model: str, task: str, has_parts: bool, has_sequence: bool, has_experts: bool
) -> None:
    """Raise a `ConfigError` where a model or its rows have nothing to shard over an axis of the mesh."""
    reasons = {}
    if not has_experts:
        reasons["expert"] = f"the model {model} has no experts"
    if not has_sequence:
        reasons["context"] = f"the rows of task {task} have no sequence"
    if not has_parts:
        reasons["pipe"] = f"the model {model} does not declare its embedding, stack and head"
    for axis, reason in reasons.items():
        if degrees[axis] > 1:
            raise ConfigError(f"parallel.{axis}={degrees[axis]}, but {reason}; use parallel.{axis}=1")


def check_zero(degrees: Mapping[str, int], zero: int) -> None:
    """Raise a `ConfigError` where ZeRO 3, which is the axis `fsdp`, has none beside several devices on `data`."""
    if zero == 3 and degrees["fsdp"] == 1 and degrees["data"] > 1:
        raise ConfigError(
            f"parallel.zero=3 shards parameters over fsdp, but the mesh has data={degrees['data']} and fsdp=1; "
            f"use fsdp={degrees['data']}"
        )


def check_task_stages(degrees: Mapping[str, int], *, task: str, calls_model: bool, rows: str = "separate") -> None:
    """Raise a `ConfigError` where the stages of a pipeline cannot compute a task.

    Its loss calls the model itself, or depends (`rows`, as in `Task`) on rows of other microbatches.
    """
    if calls_model:
        why = f"the loss of task {task!r} calls the model itself"
    elif rows == "global":
        why = f"task {task!r} has rows='global', and the last stage sees one microbatch at a time"
    else:
        return
    if degrees["pipe"] > 1:
        raise ConfigError(f"parallel.pipe={degrees['pipe']}, but {why}; use parallel.pipe=1, with fsdp in its place")


def check_whole_batch(accumulation_steps: int, *, task: str) -> None:
    """Raise a `ConfigError` where microbatches cannot compute a task whose loss depends on all rows of the batch."""
    if accumulation_steps > 1:
        raise ConfigError(
            f"task {task!r} has rows='global', and accumulation_steps={accumulation_steps} sees one microbatch at a "
            "time; use accumulation_steps=1"
        )


def _check_layers(num_layers: int, num_stages: int, num_chunks: int) -> None:
    parts = num_stages * num_chunks
    if num_layers % parts == 0:
        return
    shown = f"parallel.pipe={num_stages}" + (f" x parallel.chunks={num_chunks}" if num_chunks > 1 else "")
    stages = [p for p in range(2, num_layers + 1) if num_layers % (p * num_chunks) == 0]
    near = sorted(sorted(stages, key=lambda p: abs(p - num_stages))[:2])
    other = f", or parallel.pipe={' or '.join(map(str, near))}" if near else ""
    raise ConfigError(
        f"{num_layers} layers do not divide by {shown}; use {nearest_multiples(num_layers, parts)} layers{other}"
    )


def step_microbatches(options: Parallelism, num_stages: int, accumulation_steps: int) -> int:
    """Return the microbatches of a step: those of accumulation, or of a pipeline, by default two per stage."""
    if num_stages == 1 or (options.microbatches is None and accumulation_steps > 1):
        return accumulation_steps
    return options.microbatches or 2 * num_stages


def pipeline_schedule(
    options: Parallelism, num_stages: int, num_layers: int | None, accumulation_steps: int
) -> Schedule | None:
    """Return the schedule of a pipeline, or None where the mesh has one stage.

    Args:
        options: microbatches, chunks and the kind of schedule.
        num_stages: degree of `pipe`.
        num_layers: of the model's stack; None: it has none, which only one stage allows.
        accumulation_steps: of the config group `train`.

    Raises:
        ConfigError: microbatches without stages, two numbers of them, or layers that do not divide.
    """
    microbatches = options.microbatches
    if microbatches is not None and (num_stages == 1 or accumulation_steps not in (1, microbatches)):
        remedy = "use train.accumulation_steps" if num_stages == 1 else "set one of them"
        raise ConfigError(
            f"parallel.microbatches={microbatches} with parallel.pipe={num_stages} and train.accumulation_steps="
            f"{accumulation_steps}: the microbatches of a pipeline replace accumulation steps; {remedy}"
        )
    if num_stages == 1:
        return None
    assert num_layers is not None, "check_model_axes refuses a model without a stack"
    chunks = options.chunks or (2 if options.schedule == "interleaved_1f1b" else 1)
    _check_layers(num_layers, num_stages, chunks)
    count = step_microbatches(options, num_stages, accumulation_steps)
    if options.schedule == "interleaved_1f1b" and count % num_stages:
        key = "train.accumulation_steps" if microbatches is None else "parallel.microbatches"
        raise ConfigError(
            f"{key}={count} is not a multiple of parallel.pipe={num_stages}, as interleaved_1f1b needs; "
            f"use {key}={nearest_multiples(count, num_stages)}, or parallel.schedule=1f1b"
        )
    return make_schedule(options.schedule, num_stages, count, chunks)


def batch_shards(degrees: Mapping[str, int], axes: Sequence[str] = DEFAULT_RULES["batch"]) -> int:
    """Return the number of shards of the rows of a batch: the product of the degrees of the axes that shard it."""
    return math.prod(degrees[axis] for axis in axes)


def check_rows(
    rows: int,
    degrees: Mapping[str, int],
    microbatches: Mapping[str, int],
    axes: Sequence[str] = DEFAULT_RULES["batch"],
) -> None:
    """Raise a `ConfigError` where a batch has no rows, or rows that do not divide by shards and microbatches.

    Args:
        rows: of the global batch.
        degrees: of the mesh.
        microbatches: name of a setting -> number of microbatches.
        axes: mesh axes that shard the rows.
    """
    shards = batch_shards(degrees, axes)
    multiple = shards * math.prod(microbatches.values())
    if rows and rows % multiple == 0:
        return
    divisors = {axis: degrees[axis] for axis in axes if axis in ("data", "fsdp") or degrees[axis] > 1}
    divisors |= microbatches
    remedy = f"use {nearest_multiples(rows, multiple)}"
    if rows and rows % shards == 0:
        name, count = next(iter(microbatches.items()))
        remedy = f"use {name}={math.gcd(rows // shards, count)}, or a batch of {nearest_multiples(rows, multiple)}"
    raise ConfigError(
        f"train.global_batch_size={rows} does not divide by {' x '.join(divisors)} = "
        f"{' x '.join(map(str, divisors.values()))}; {remedy}"
    )


def microbatches_of(config: Config) -> int:
    """Return the microbatches of a step of a config whose degrees are numbers: of accumulation or of a pipeline."""
    return step_microbatches(config.parallel, int(config.parallel.pipe), config.train.accumulation_steps)


def check_batch(config: Config, degrees: Mapping[str, int]) -> None:
    """Raise a `ConfigError` if the batch of a config does not divide by shards and microbatches."""
    microbatches = step_microbatches(config.parallel, degrees["pipe"], config.train.accumulation_steps)
    name = "accumulation_steps" if degrees["pipe"] == 1 else "microbatches"
    check_rows(config.train.global_batch_size, degrees, {name: microbatches})


def microbatches_by_name(schedule: Schedule | None, accumulation_steps: int) -> dict[str, int]:
    """Return the name of the setting that gives the number of microbatches -> that number, for `check_rows`."""
    if schedule is None:
        return {"accumulation_steps": accumulation_steps}
    return {"microbatches": schedule.num_microbatches}


def sequence_axes(*, sequence_parallel: bool) -> tuple[str, ...]:
    """Return the mesh axes that shard the sequence of the residual stream."""
    return ("context", "tensor") if sequence_parallel else DEFAULT_RULES["residual_sequence"]


def check_sequence(length: int, degrees: Mapping[str, int], axes: Sequence[str]) -> None:
    """Raise a `ConfigError` where a sequence of `length` tokens does not divide by the mesh axes that shard it."""
    parts = {axis: degrees[axis] for axis in axes}
    multiple = math.prod(parts.values())
    if length % multiple:
        shown = " x ".join(f"parallel.{axis}={size}" for axis, size in parts.items() if size > 1)
        raise ConfigError(
            f"data.sequence_length={length} does not divide by {shown}; use {nearest_multiples(length, multiple)}"
        )
