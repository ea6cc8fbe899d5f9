"""How a model is spread over a mesh besides the degrees: options, the layout they give, and what cannot be."""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import Mesh

from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import DEFAULT_RULES
from jaxtrain.layout.sharding import Layout
from jaxtrain.layout.zero import STAGES, zero_axes
from jaxtrain.models.model import Model
from jaxtrain.models.tasks import Task
from jaxtrain.parallel.division import check_model_axes, pipeline_schedule, sequence_axes
from jaxtrain.parallel.stage import Pipeline


@dataclass(frozen=True)
class Parallelism:
    """Options of the mesh axes; the fields are the keys of the config group `parallel`.

    Attributes:
        zero: ZeRO stage over `data`: 1 spreads the optimizer state, 2 the accumulated gradients too; 3, the parameters
            too, is the `fsdp` axis.
        sequence_parallel: between blocks, the sequence is spread over `tensor`.
        context_attention: ring, all_to_all, gather, or auto.
        schedule: gpipe, 1f1b or interleaved_1f1b.
        microbatches: of a pipeline; None: the accumulation steps, or two a stage where that is 1.
        chunks: of layers a stage, under interleaved_1f1b; None: 2.
        max_replicated_fraction: share of parameter bytes that may stay whole although `fsdp` > 1.
    """

    zero: int = 0
    sequence_parallel: bool = False
    context_attention: str = "auto"
    schedule: str = "1f1b"
    microbatches: int | None = None
    chunks: int | None = None
    max_replicated_fraction: float = 0.02


def make_layout(
    model: Model, task: Task, mesh: Mesh, parallelism: Parallelism, rules: Mapping[str, tuple[str, ...]] | None
) -> Layout:
    """The layout of a model on a mesh.

    Raises:
        ConfigError: an axis or option that this model or task cannot use.
    """
    if parallelism.zero not in STAGES:
        raise ConfigError(f"parallel.zero={parallelism.zero}; use 0, 1, 2 or 3")
    if parallelism.zero == 3 and mesh.shape["fsdp"] == 1 and mesh.shape["data"] > 1:
        raise ConfigError(
            f"parallel.zero=3 spreads parameters over fsdp, but the mesh has data={mesh.shape['data']} and fsdp=1; "
            f"use fsdp={mesh.shape['data']}"
        )
    check_model_axes(
        mesh.shape,
        model=model.name,
        task=task.name,
        has_parts=model.parts is not None,
        has_sequence=any("sequence" in row for row in task.batch_axes.values()),
        has_experts=model.has_experts and any("experts" in row for row in model.axes.values()),
    )
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


def make_pipeline(model: Model, layout: Layout, parallelism: Parallelism, accumulation_steps: int) -> Pipeline | None:
    """The pipeline of a model, or None where the mesh has one stage.

    Raises:
        ConfigError: layers or microbatches that do not fit.
    """
    num_layers = None if model.parts is None else model.parts.num_layers
    schedule = pipeline_schedule(parallelism, layout.mesh.shape["pipe"], num_layers, accumulation_steps)
    if schedule is None or model.parts is None:
        return None
    return Pipeline(schedule, layout, model.parts.stack, model.parts.num_layers)


def pipeline_notes(pipeline: Pipeline | None) -> list[str]:
    """What the banner says of a pipeline, with a warning where stages outnumber microbatches."""
    if pipeline is None:
        return []
    schedule = pipeline.schedule
    text = (
        f"pipeline: {schedule.name}, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, "
        f"idle {schedule.bubble_fraction():.0%} of the step"
    )
    if schedule.num_microbatches < schedule.num_stages:
        text += f"; fewer microbatches than stages: parallel.microbatches={4 * schedule.num_stages} would idle less"
    return [text]
