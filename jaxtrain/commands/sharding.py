"""`jaxtrain config --sharding`: how each parameter is sharded, from shapes alone."""

from typing import Any

import jax

from jaxtrain.commands.output import print_table, print_text
from jaxtrain.config import Config
from jaxtrain.layout.rules import table_row
from jaxtrain.layout.sharding import path_name
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.runtime import distributed
from jaxtrain.train.assemble import build_sharded_model, open_run_data


def print_shardings(config: Config, *, only: str | None, emulate: int | None) -> None:
    """Print path, shape, logical axes and mesh axes of each parameter.

    Args:
        config: the run.
        only: prefix of the paths to print.
        emulate: CPU devices to shard them over; None: the real devices.
    """
    distributed.start(emulate=emulate, compilation_cache=None)
    model = config.model
    if model.kind == "transformer" and model.vocab_size is not None:
        sharded_model = build_sharded_model(config, input_shape=(model.max_sequence_length,), as_trained=True)
    else:
        data = open_run_data(config)
        sharded_model = build_sharded_model(
            config,
            input_shape=data.input_shape,
            vocab_size=data.vocab_size,
            num_outputs=data.num_outputs,
            as_trained=True,
        )
    mesh = " ".join(f"{axis}={size}" for axis, size in sharded_model.mesh.shape.items() if size > 1) or "one device"
    leaves = jax.tree_util.tree_leaves_with_path(sharded_model.abstract_params)
    rows = []
    for path, leaf in leaves:
        name = path_name(path)
        if only is None or name.startswith(only):
            rows.append(
                (name, _shape(leaf.shape), _logical(name, sharded_model.model.axes), _mesh_axes(leaf), _each(leaf))
            )
    print_table(("parameter", "shape", "logical axes", "mesh axes", "a device"), rows)
    total = sum(leaf.size for _, leaf in leaves)
    held = sum(leaf.dtype.itemsize * _local_size(leaf) for _, leaf in leaves)
    print_text(f"\n{format_count(total)} parameters ({total:,}) on {mesh}: {format_bytes(held)} a device")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _logical(name: str, axes: Any) -> str:
    row = table_row(name, axes)
    return "(not in the table)" if row is None else ", ".join(axis or "-" for axis in row)


def _mesh_axes(leaf: Any) -> str:
    entries = [
        "+".join((entry,) if isinstance(entry, str) else entry) if entry else "-" for entry in leaf.sharding.spec
    ]
    return ", ".join(entries) if any(entry != "-" for entry in entries) else "whole"


def _local_size(leaf: Any) -> int:
    size = 1
    for dim in leaf.sharding.shard_shape(leaf.shape):
        size *= dim
    return size


def _each(leaf: Any) -> str:
    return format_bytes(_local_size(leaf) * leaf.dtype.itemsize)
