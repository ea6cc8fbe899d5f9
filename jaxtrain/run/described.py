"""What run.json says of a run at its start: its config, data, model and parameters."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.config import Loaded
from jaxtrain.layout.rules import entry_axes
from jaxtrain.metrics.runinfo import EVALUATED_ROWS, run_info
from jaxtrain.models.tasks import is_shipped
from jaxtrain.run.roll_back import RECORD
from jaxtrain.runtime.tree import path_name
from jaxtrain.train.assemble import Run


def described(loaded: Loaded, run: Run, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of run.json at the start of a run.

    Args:
        loaded: the config.
        run: assembled from it.
        metadata: what a checkpoint of the run says of it.
    """
    data = run.data
    inputs = run.batches.spec().get("inputs")
    info = run_info(
        run.config,
        name=loaded.name,
        mesh_shape=dict(run.step.mesh.shape),
        model={
            "name": run.step.model.name,
            "num_parameters": run.num_parameters,
            # Of a task over classes or tokens; a model from Python has no config that says it.
            "num_outputs": run.step.feed.num_classes(run.batches.spec()),
        },
        data={
            "description": list(data.description),
            "fingerprint": data.fingerprint,
            "num_validation_rows": None if data.validation is None else len(data.validation),
            "reading": data.reading,
            # What the model is built from, so that it can be opened where the data is not.
            "input_shape": list(data.input_shape),
            "input_dtype": str(inputs.dtype) if isinstance(inputs, jax.ShapeDtypeStruct) else None,
            "vocab_size": data.vocab_size,
            "end_of_text": None if data.tokenizer is None else data.tokenizer.end_of_text,
            "num_outputs": data.num_outputs,
        },
    )
    info["task"] = run.step.task.name
    info["task_is_shipped"] = is_shipped(run.step.task)
    info["parameters"] = _parameters(run)
    for key in ("from_python", "called"):
        info[key] = metadata[key]
    info["base"] = metadata.get("base")
    for key in (RECORD, EVALUATED_ROWS):
        if key in metadata:
            info[key] = metadata[key]
    info["choices"] = list(run.step.choices)
    info["compiler_options"] = dict(run.step.compiled_with)
    return info


def _parameters(run: Run) -> dict[str, str]:
    """Parameter path -> `float32[160,448] fsdp,-`: dtype, shape, mesh axes of each dimension; `frozen` at the end."""
    trainable = run.step.program.settings.trainable
    sizes, found = run.step.mesh.shape, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.step.sharded_model.abstract_params):
        name = path_name(path)
        axes = ["+".join(axis for axis in entry_axes(entry) if sizes[axis] > 1) or "-" for entry in leaf.sharding.spec]
        sharding = ",".join(axes) if any(axis != "-" for axis in axes) else ""
        parts = [f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]", sharding]
        parts.append("" if trainable is None or trainable(name) else "frozen")
        found[name] = " ".join(part for part in parts if part)
    return found
