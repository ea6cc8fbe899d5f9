"""What a run says of itself before it starts: model, data, devices and what was chosen for it."""

import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtrain.config import Loaded
from jaxtrain.config.data import CalledData
from jaxtrain.config.schema import Config
from jaxtrain.layout.mesh import mesh_notes
from jaxtrain.layout.rules import table_row
from jaxtrain.layout.sharding import path_name
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.run.base import trained_leaves
from jaxtrain.run.compared import limit_note, most_evaluated
from jaxtrain.run.own_parts import OwnParts
from jaxtrain.runtime.compiler import cache_folder, option_notes
from jaxtrain.runtime.devices import describe_devices, unused_accelerator
from jaxtrain.train.assemble import Run
from jaxtrain.train.base import without_base
from jaxtrain.train.parallelism import pipeline_notes


def banner_lines(
    loaded: Loaded, run: Run, run_dir: Path, notes: Sequence[str], *, own: OwnParts, units_per_step: float
) -> list[str]:
    """The lines that are shown before a run compiles.

    Args:
        loaded: the config.
        run: assembled from it.
        run_dir: where it writes.
        notes: what else there is to say.
        own: the parts that came from Python, of which the config says nothing.
        units_per_step: tokens or examples of a step, as they are counted.
    """
    config, mesh = loaded.config, run.step.mesh
    units, most = f"{units_per_step:,.0f} {run.data.unit}", run.data.units_per_row * config.train.global_batch_size
    if units_per_step != most:
        units += f" ({most:,} with padding)"
    places = zip(jax.tree.leaves(run.step.abstract_state), jax.tree.leaves(run.step.state_on_host), strict=True)
    state, on_host = 0, 0
    for leaf, is_there in places:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            state, on_host = (state, on_host + size) if is_there else (state + size, on_host)
    degrees = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    accumulation = config.train.accumulation_steps
    trains = trained_leaves(run.step)
    trained = sum(leaf.size for leaf in jax.tree.leaves(without_base(run.step.abstract_state, trains).params))
    lines = [
        f"{run.name}: {run.step.model.name}, {format_count(run.num_parameters)} parameters, "
        f"{config.train.steps:,} steps of {units}" + (f" in {accumulation} microbatches" if accumulation > 1 else ""),
        *([f"adapters: {trained:,} parameters are trained; checkpoints hold them alone"] if trains is not None else []),
        *(f"data: {line}" for line in run.data.description),
        f"devices: {describe_devices()} ({degrees}), {config.precision.policy}, "
        f"state {format_bytes(state)} per device" + (f", {format_bytes(on_host)} on the host" if on_host else ""),
        f"compiled programs: {cache_folder(config.compilation_cache) or 'not kept'}",
        f"run directory: {run_dir}",
        *mesh_notes(mesh),
        *pipeline_notes(run.step.pipeline),
        *_muon_notes(run),
        *_evaluation_notes(loaded, run, own_data=own["data"] is not None),
        *option_notes(run.step.compiler_options, asked=config.compiler_options),
        *notes,
    ]
    unused = unused_accelerator(jax.devices()[0].platform)
    return [*lines, *([unused] if unused else [])]


def _muon_notes(run: Run) -> list[str]:
    """Which parameters have Muon's state, where names and shapes decide it because the axes table has no row."""
    leaves = jax.tree_util.tree_leaves_with_path(run.step.abstract_state.optimizer_state)
    muon, adamw = (
        [name for path, _ in leaves if (name := path_name(path).partition(f"inner_states/{state}/")[2])]
        for state in ("muon/inner_state/0/trace", "adamw/inner_state/nu")
    )
    if not (muon or adamw) or (muon and all(table_row(path, run.step.model.axes) for path in muon)):
        return []
    some = ", ".join(muon[:6]) + (", ..." if len(muon) > 6 else "") or "none"
    return [f"Muon updates {len(muon)} of {len(muon + adamw)} parameters: {some}; AdamW the rest"]


def _evaluation_notes(loaded: Loaded, run: Run, *, own_data: bool) -> list[str]:
    """A note where evaluations leave held-out rows out, or are asked for and the data has no rows for them."""
    every, most = run.config.evaluation.every, run.config.evaluation.max_batches
    if run.data.validation is not None:
        held_out, count = len(run.data.validation), most_evaluated(run.config)
        if most is None or count is None or held_out <= count:
            return []
        return [limit_note(count, held_out, most)]
    if every is None:
        return []
    where = loaded.origins.get("evaluation.every", "")
    return [
        f"evaluation.every={every}{f' ({where})' if where else ''} has no effect: the data has no held-out rows; "
        f"{to_hold_out(run.config, own_data=own_data)}"
    ]


def to_hold_out(config: Config, *, own_data: bool) -> str:
    """What gives a run rows for evaluation.

    Args:
        config: of the run.
        own_data: whether the data came from Python.
    """
    if own_data:
        return "give fit validation=0.1, or other rows as validation"
    if isinstance(config.data, CalledData):
        return f"let the function of data.call={config.data.call} return {{'train': {{...}}, 'validation': {{...}}}}"
    return "set data.validation_fraction=0.1"
