"""How a model is sharded over a mesh besides the degrees: options, the layout they give, and what cannot be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optax
from jax.sharding import Mesh

from jaxtrain.config.arguments import check_kind
from jaxtrain.config.schema import ParallelConfig
from jaxtrain.data.dataset import Data
from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.rules import DEFAULT_RULES, stage_over_data, zero_axes
from jaxtrain.layout.sharding import Layout
from jaxtrain.models.model import Model
from jaxtrain.models.sharded import ShardedModel, place_model
from jaxtrain.models.task import Task
from jaxtrain.parallel.division import (
    check_model_axes,
    check_task_stages,
    check_zero,
    microbatches_by_name,
    pipeline_schedule,
    sequence_axes,
)
from jaxtrain.parallel.stage import Pipeline
from jaxtrain.precision.policy import Policy, get_policy

_PARTS = {
    "model": (Model, "a jaxtrain.Model", "jaxtrain.from_nnx(Net), from_linen, from_functions or build_model"),
    "task": (Task, "a jaxtrain.Task", "jaxtrain.classification() or jaxtrain.Task('name', loss)"),
    "optimizer": (
        optax.GradientTransformation,
        "an optax transformation",
        "optax.adamw(1e-3), and accumulation_steps in place of optax.MultiSteps",
    ),
    "data": (Data, "a jaxtrain.Data", "jaxtrain.open_data({'kind': ...})"),
}


def check_parts(**parts: Any) -> None:
    """Raise a `ConfigError` where a model, task, optimizer or data is something else; None: that of a config."""
    for name, value in parts.items():
        kind, takes, write = _PARTS[name]
        if value is not None:
            check_kind(value, kind, what=name, takes=takes, write=write)


@dataclass(frozen=True)
class Parallelism:
    """Options of the mesh axes; the fields are the keys of the config group `parallel`.

    Attributes:
        zero: ZeRO stage over `data`: 1 shards the optimizer state and the stored parameters, of which a step gathers a
            copy in the compute dtype; 2 the accumulated gradients too; 3, also the copy, is the `fsdp` axis.
        sequence_parallel: between blocks, the sequence is sharded over `tensor`.
        context_attention: ring, all_to_all, gather, or auto.
        schedule: gpipe, 1f1b or interleaved_1f1b.
        microbatches: of a pipeline; None: the accumulation steps, or two per stage where that is 1.
        chunks: of layers per stage, under interleaved_1f1b; None: 2.
        max_replicated_fraction: share of parameter bytes that may be replicated although `fsdp` > 1.

    Example:
        >>> step = jt.make_train_step(
        ...     model, jt.classification(), optax.adamw(1e-3), parallelism=jt.Parallelism(zero=1)
        ... )
    """

    zero: int = 0
    sequence_parallel: bool = False
    context_attention: str = "auto"
    schedule: str = "1f1b"
    microbatches: int | None = None
    chunks: int | None = None
    max_replicated_fraction: float = 0.02

    def __post_init__(self) -> None:
        ParallelConfig(**vars(self))


def make_layout(
    model: Model, task: Task | None, mesh: Mesh, parallelism: Parallelism, rules: Mapping[str, tuple[str, ...]] | None
) -> Layout:
    """The layout of a model on a mesh, with `rules` added to `DEFAULT_RULES`.

    Raises a `ConfigError` at an axis or option that this model or task (None: not checked) cannot use.
    """
    check_zero(mesh.shape, parallelism.zero)
    check_model_axes(
        mesh.shape,
        model=model.name,
        task="" if task is None else task.name,
        has_parts=model.parts is not None,
        has_sequence=task is None or any("sequence" in row for row in task.batch_axes.values()),
        has_experts=model.has_experts and any("experts" in row for row in model.axes.values()),
    )
    if task is not None:
        check_task_stages(mesh.shape, task=task.name, calls_model=task.calls_model, rows=task.rows)
    chosen = {**DEFAULT_RULES, **(rules or {})}
    for name, axes in chosen.items():
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown:
            raise ConfigError(f"rules: {name!r} goes to mesh axis {unknown[0]!r}; the axes are {', '.join(mesh.shape)}")
    if parallelism.sequence_parallel:
        chosen["residual_sequence"] = sequence_axes(sequence_parallel=True)
    stack = None if model.parts is None else model.parts.stack
    return Layout(
        mesh,
        model.axes,
        chosen,
        stack=stack,
        context_attention=parallelism.context_attention,
        state_axes=zero_axes(parallelism.zero),
    )


def shard_model(
    model: Model,
    *,
    mesh: Mesh | None = None,
    policy: str | Policy = "fp32",
    rules: Mapping[str, tuple[str, ...]] | None = None,
    parallelism: Parallelism | None = None,
    trainable: Callable[[str], bool] | None = None,
    task: Task | None = None,
) -> ShardedModel:
    """A model on a mesh, for evaluation and generation without a train step; nothing is allocated.

    Args:
        model: from `from_nnx`, `from_linen`, `from_stages`, `from_functions`, or a shipped one.
        mesh: from `make_mesh`; None: all devices on the `data` axis.
        policy: number formats: fp32, tf32, bf16, bf16_pure, fp16 or fp8.
        rules: logical axes -> mesh axes, in place of those of `DEFAULT_RULES` or added to them.
        parallelism: as for `make_train_step`; None: the defaults.
        trainable: parameter path -> whether it was trained; others keep the dtype of `model.init`. None: all were.
        task: whose rows need a sequence where `context` > 1; None: not checked.

    Raises:
        ConfigError: sizes that do not divide, too many replicated bytes, or an axis that the model cannot use.

    Example:
        >>> sharded = jt.shard_model(model, policy="bf16")
        >>> sharded.abstract_params["kernel"].shape
        (4, 3)
    """
    check_parts(model=model, task=task)
    parallelism = parallelism or Parallelism()
    layout = make_layout(model, task, make_mesh() if mesh is None else mesh, parallelism, rules)
    make_pipeline(model, layout, parallelism, 1)  # refuses what the stages could not run
    fraction = parallelism.max_replicated_fraction
    return place_model(model, layout, get_policy(policy), trainable=trainable, max_replicated_fraction=fraction)


def make_pipeline(model: Model, layout: Layout, parallelism: Parallelism, accumulation_steps: int) -> Pipeline | None:
    """The pipeline of a model, or None where the mesh has one stage; a `ConfigError` where layers do not fit."""
    num_layers = None if model.parts is None else model.parts.num_layers
    schedule = pipeline_schedule(parallelism, layout.mesh.shape["pipe"], num_layers, accumulation_steps)
    if schedule is None or model.parts is None:
        return None
    stage = stage_over_data(parallelism.zero)
    return Pipeline(schedule, layout, model.parts.stack, model.parts.num_layers, stage)


def microbatches(pipeline: Pipeline | None, accumulation_steps: int) -> dict[str, int]:
    """The number of microbatches by which rows divide, under the name that people know it by."""
    return microbatches_by_name(None if pipeline is None else pipeline.schedule, accumulation_steps)
