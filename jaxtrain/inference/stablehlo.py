"""Portable programs: a model's forward pass as StableHLO for CPU, GPU and TPU, in a folder with its weights."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from jaxtrain import __version__
from jaxtrain.errors import ConfigError, first_line
from jaxtrain.formats.safetensors import write_safetensors
from jaxtrain.inference.predict import model_outputs
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.tree import path_name, paths_of
from jaxtrain.weights.write import name_folder, partial_folder, partial_of

FILES = ("forward.bin", "weights.safetensors", "program.json", "read.py")
PLATFORMS = ("cpu", "cuda", "tpu")
BATCH = "batch"
# What StableHLO promises: openxla/stablehlo, docs/compatibility.md.
_WINDOW = "jax reads the program for 6 months after it was made; keep the run, from which it can be made again"


@dataclass(frozen=True)
class Program:
    """A program (weights and inputs by name -> outputs by name) and its weights, `params/...` and `model_state/...`.

    `batch` is the number of rows of a call; None: any.
    """

    exported: export.Exported
    weights: dict[str, np.ndarray]
    batch: int | None


def check_flatbuffers() -> None:
    """Raise a ConfigError where the package is missing with which jax writes programs."""
    if find_spec("flatbuffers") is None:
        raise ConfigError("--to stablehlo needs flatbuffers; run pip install '.[export]'")


def make_program(
    sharded_model: ShardedModel,
    params: Params,
    model_state: ModelState,
    rows: Mapping[str, jax.ShapeDtypeStruct],
    *,
    batch: int | None,
) -> Program:
    """Export the forward pass in evaluation mode.

    Args:
        sharded_model: on a mesh of one CPU device, whose kernels every platform has.
        params, model_state: of this model.
        rows: name -> shape and dtype of one row of the inputs. The one name `inputs` stands for an array alone, and
            other names for the entries of a dict.
        batch: rows of a call; None: any number.

    Raises:
        ConfigError: the model cannot be exported: jax's own reason is in the message.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path({"params": params, "model_state": model_state})
    weights = {path_name(path): np.asarray(leaf) for path, leaf in leaves}

    def forward(weights: Mapping[str, jax.Array], inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        tree = jax.tree.unflatten(structure, [weights[path_name(path)] for path, _ in leaves])
        rows = inputs["inputs"] if list(inputs) == ["inputs"] else dict(inputs)
        outputs = model_outputs(sharded_model, tree["params"], tree["model_state"], rows)
        return paths_of(outputs if isinstance(outputs, Mapping) else {"outputs": outputs})

    size = batch or export.symbolic_shape(BATCH)[0]
    inputs = {name: jax.ShapeDtypeStruct((size, *row.shape), row.dtype) for name, row in rows.items()}
    try:
        exported = export.export(jax.jit(forward), platforms=PLATFORMS)(jax.tree.map(jax.typeof, weights), inputs)
    except Exception as error:  # jax refuses what it does not keep stable in several types
        raise ConfigError(
            f"{sharded_model.model.name} has no portable program for {batch or 'any number of'} rows: "
            f"{first_line(error)}; a mixture of experts needs --batch N"
        ) from error
    return Program(exported, weights, batch)


def write_program(folder: Path, program: Program, *, about: Mapping[str, Any]) -> None:
    """Write a program; the folder appears when it is complete.

    Args:
        folder: which does not exist, or is empty.
        program: what to write.
        about: further entries of program.json: what the outputs mean, and how inputs are made.

    Raises:
        ConfigError: the folder is not empty, or cannot be made.
    """
    partial = partial_of(folder)
    with partial_folder(folder):
        (partial / "forward.bin").write_bytes(program.exported.serialize(vjp_order=0))
        shapes = {name: (array.shape, array.dtype) for name, array in program.weights.items()}
        write_safetensors(partial / "weights.safetensors", shapes, program.weights.items())
        write_json_atomic(partial / "program.json", {**_described(program), **about})
        shutil.copyfile(Path(__file__).with_name("read_program.py"), partial / "read.py")
        name_folder(folder, last="program.json")


def _described(program: Program) -> dict[str, Any]:
    """Return what program.json says of any program."""
    exported = program.exported
    (_, inputs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    return {
        "inputs": _specs(inputs),
        "outputs": _specs(jax.tree.unflatten(exported.out_tree, exported.out_avals)),
        "rows_per_call": program.batch or BATCH,
        "platforms": list(PLATFORMS),
        "made_with": {"jaxtrain": __version__, "jax": jax.__version__, "jaxlib": version("jaxlib")},
        "compatibility": _WINDOW,
    }


def _specs(avals: Mapping[str, Any]) -> dict[str, Any]:
    """Return shapes, in which the number of rows may be a name, and dtypes."""
    specs = {}
    for name, aval in avals.items():
        shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
        specs[name] = {"shape": shape, "dtype": aval.dtype.name}
    return specs
