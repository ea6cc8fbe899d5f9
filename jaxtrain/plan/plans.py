"""A plan: the estimate, the word of a compiler beside it, and the smallest change that makes it fit. No jax here."""

import dataclasses
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from jaxtrain.config.schema import AXES, Config
from jaxtrain.errors import ConfigError
from jaxtrain.models.shipped.shapes import OF_BLOCKS
from jaxtrain.plan.compile import ExactMemory, ask
from jaxtrain.plan.estimate import Estimate, analyse, own_functions
from jaxtrain.plan.search import describe_layout, fitted
from jaxtrain.plan.targets import Target, check_compiler, target_of
from jaxtrain.plan.topology import CompilerMissingError

_SHOWN = 4
# Besides the degrees, what a search may set.
_OF_LAYOUT = (
    *("parallel.zero", "parallel.schedule", "parallel.microbatches", "remat.policy"),
    *("train.accumulation_steps", "train.global_batch_size"),
)


def analytic_plan(config: Config, target: Target) -> Estimate:
    """The analytic estimate, with advice where it does not fit.

    Raises:
        ConfigError: a layout that the config cannot take.
    """
    return _advised(analyse(config, target))


def fitted_plan(config: Config, target: Target) -> Estimate:
    """The analytic plan; where the config's layout is for other devices, with the best one of a search.

    A batch that no layout takes grows to a row for each device, at the same tokens of the whole run.

    Raises:
        ConfigError: what a layout cannot mend, or a layout of functions of the user's own.
    """
    try:
        return analytic_plan(config, target)
    except ConfigError as error:
        best = None if own_functions(config) else fitted(config, target)
        if best is None:
            raise
        reason = str(error).split("; ")[0]
    rows = best.train.global_batch_size
    larger = "" if rows == config.train.global_batch_size else f", batch {rows}"
    line = f"planned for {target.name} with {describe_layout(best)}{larger}, because {reason}"
    return dataclasses.replace(analytic_plan(best, target), fitted=line)


def with_compiler(estimate: Estimate, report: Callable[[str], None]) -> Estimate:
    """The estimate with the memory that the target's own compiler gives, in `exact`, or why not, in `exact_missing`.

    `report` receives a line when a compile starts.
    """
    target = estimate.target
    if target.hardware.kind == "gpu" and estimate.config.optimizer.offload:
        # jax drops from a sharding that an argument lies on the host (0.10.2, compile-only GPUs).
        return dataclasses.replace(
            estimate, exact_missing="no compiler counts offloaded state of a GPU that is not here"
        )
    try:
        check_compiler(target)
    except CompilerMissingError as error:
        return dataclasses.replace(estimate, exact_missing=str(error))
    report(f"compiling the step for {target.name}")
    answer = ask("memory", estimate.config, target)
    if "error" in answer:
        return dataclasses.replace(estimate, exact_missing=answer["error"])
    exact = ExactMemory(**answer)
    return _advised(dataclasses.replace(estimate, exact=exact, advice=()))


def _advised(estimate: Estimate) -> Estimate:
    if estimate.fits is not False or estimate.unknown is not None:
        return estimate
    return dataclasses.replace(estimate, advice=advise(estimate))


def advise(estimate: Estimate) -> tuple[str, ...]:
    """Lines that say what makes it fit, each with the memory and time that the model predicts for it.

    Single changes first, those that leave the numbers of a run alone before those that do not; where none is enough,
    two together; where none of these is, more devices.
    """
    config, target = estimate.config, estimate.target
    for changes in (_changes(config, target), _pairs(config, target)):
        tried = (_try(name, changed, target, estimate) for name, changed in changes)
        if works := [line for line in tried if line]:
            return tuple(works[:_SHOWN])
    for factor in (2, 4, 8):
        if line := _grown(estimate, target_of(target.hardware, target.num_devices * factor)):
            return (line,)
    return ("no single change, pair of changes or eight times the devices makes it fit; jaxtrain plan --search",)


def _try(name: str, config: Config, target: Target, before: Estimate) -> str | None:
    """The line of a change that fits; where a compiler asked for more than the model said, by so much more."""
    try:
        after = analyse(config, target)
    except ConfigError:
        return None
    exact, usable, needed = before.exact, after.memory.usable_bytes, after.memory.total_bytes
    if exact is not None and usable is not None:
        more = max(1.0, exact.peak_bytes / before.memory.total_bytes)
        fits = needed * more <= (exact.capacity_bytes or usable)
    else:
        fits = after.memory.fits
    if not fits:
        return None
    slower = ""
    if before.time is not None and after.time is not None:
        slower = f", step {after.time.seconds / before.time.seconds:.2f} x as long"
    return f"{name}: {needed / 2**30:.1f} GiB{slower}"


def _with(config: Config, group: str, **update: Any) -> Config:
    return config.model_copy(update={group: getattr(config, group).model_copy(update=update)})


def _changes(config: Config, target: Target) -> Iterator[tuple[str, Config]]:
    """Single changes, the cheapest first."""
    parallel, optimizer, policy = config.parallel, config.optimizer, config.precision.policy
    order = ("none", "dots", "full", "sqrt") if isinstance(config.model, OF_BLOCKS) else ("none", "full")
    if config.remat.policy in order:
        for other in order[order.index(config.remat.policy) + 1 :]:
            # Only full (and names, which are the user's) take tensors that are offloaded.
            offload = config.remat.offload if other == "full" else ()
            yield f"remat.policy={other}", _with(config, "remat", policy=other, offload=offload)
    if parallel.data != 1 and isinstance(parallel.data, int):
        if parallel.zero == 0:
            yield "parallel.zero=1", _with(config, "parallel", zero=1)
        shards = parallel.data * int(parallel.fsdp)
        yield f"parallel.fsdp={shards}", _with(config, "parallel", zero=0, data=1, fsdp=shards)
    if parallel.pipe == 1:
        for factor in (2, 4, 8, 16):
            steps = config.train.accumulation_steps * factor
            yield f"train.accumulation_steps={steps}", _with(config, "train", accumulation_steps=steps)
    if config.finetune.lora is not None:
        formats = (None, "int8", "nf4")
        for base in formats[formats.index(config.finetune.base) + 1 :]:
            yield f"finetune.base={base}", _with(config, "finetune", base=base)
    if not optimizer.offload and target.hardware.kind != "cpu":
        yield "optimizer.offload=true", _with(config, "optimizer", offload=True)
    if policy == "fp32":
        yield "precision.policy=bf16", _with(config, "precision", policy="bf16")
    if optimizer.kind == "adamw" and optimizer.moments != "int8":
        yield "optimizer.moments=int8", _with(config, "optimizer", moments="int8")
    if policy == "bf16":
        pure = _with(config, "precision", policy="bf16_pure")
        yield "precision.policy=bf16_pure (no fp32 master parameters)", pure


def _pairs(config: Config, target: Target) -> Iterator[tuple[str, Config]]:
    """Two changes of different keys, each two once."""
    seen: set[frozenset[str]] = set()
    for first, changed in list(_changes(config, target)):
        for second, both in _changes(changed, target):
            names = frozenset((first, second))
            if first.partition("=")[0] != second.partition("=")[0] and names not in seen:
                seen.add(names)
                yield f"{first} and {second}", both


def _grown(estimate: Estimate, target: Target) -> str | None:
    """The same run on other devices, with the layout of a search."""
    config = fitted(estimate.config, target)
    if config is None:
        return None
    words = []
    for key in (*(f"parallel.{axis}" for axis in AXES), *_OF_LAYOUT):
        before, after = (attrgetter(key)(one) for one in (estimate.config, config))
        words += [f"{key}={'null' if after is None else after}"] if after != before else []
    return _try(f"{target.name} with {' and '.join(words)}", config, target, estimate)
