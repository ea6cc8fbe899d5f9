"""How a model is sharded on a mesh: the mesh, layout and pipeline that options give, and what cannot be."""

from collections.abc import Mapping

from jax.sharding import Mesh

from jaxtrain.config.schema import AXES, Parallelism
from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.rules import DEFAULT_RULES, config_degrees, stage_over_data, zero_axes
from jaxtrain.layout.sharding import Layout
from jaxtrain.models.model import Model
from jaxtrain.models.task import Task
from jaxtrain.parallel.division import (
    check_model_axes,
    check_task_stages,
    check_zero,
    pipeline_schedule,
    sequence_axes,
)
from jaxtrain.parallel.stage import Pipeline


def mesh_for(parallelism: Parallelism, mesh: Mesh | None) -> Mesh:
    """Return the mesh of a step: the one that is given, or one of the degrees.

    Raises:
        ConfigError: degrees that are set differ from those of the mesh, or are left to the planner.
    """
    if parallelism.auto:
        raise ConfigError("parallel.auto lets the planner choose degrees for a config; set them, or give mesh=")
    degrees = config_degrees(parallelism)
    if mesh is None:
        return make_mesh(**degrees, devices=None)
    for axis in AXES:
        if axis in parallelism.model_fields_set and degrees[axis] not in ("auto", mesh.shape[axis]):
            raise ConfigError(
                f"parallel.{axis}={degrees[axis]}, but the mesh has {axis}={mesh.shape[axis]}; leave {axis} out of "
                "parallelism, or make the mesh with it"
            )
    return mesh


def make_layout(
    model: Model, task: Task | None, mesh: Mesh, parallelism: Parallelism, rules: Mapping[str, tuple[str, ...]] | None
) -> Layout:
    """Return the layout of a model on a mesh, with `rules` added to `DEFAULT_RULES`.

    Raises:
        ConfigError: an axis or option that this model or task (None: not checked) cannot use.
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
        for axis in axes:
            if axis not in mesh.shape:
                raise ConfigError(f"rules: {name!r} goes to mesh axis {axis!r}; the axes are {', '.join(mesh.shape)}")
    if parallelism.sequence_parallel:
        chosen["residual_sequence"] = sequence_axes(sequence_parallel=True)
    return Layout(
        mesh,
        model.axes,
        chosen,
        stack=None if model.parts is None else model.parts.stack,
        context_attention=parallelism.context_attention,
        state_axes=zero_axes(parallelism.zero),
    )


def make_pipeline(model: Model, layout: Layout, parallelism: Parallelism, microbatches: int) -> Pipeline | None:
    """Return the pipeline of a model that accumulates so many microbatches, or None where the mesh has one stage.

    Raises:
        ConfigError: layers that do not divide over the stages, or two numbers of microbatches.
    """
    num_layers = None if model.parts is None else model.parts.num_layers
    schedule = pipeline_schedule(parallelism, layout.mesh.shape["pipe"], num_layers, microbatches)
    if schedule is None or model.parts is None:
        return None
    return Pipeline(schedule, layout, model.parts.stack, model.parts.num_layers, zero=stage_over_data(parallelism.zero))
