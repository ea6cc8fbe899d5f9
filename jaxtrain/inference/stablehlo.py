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
from jaxtrain.errors import ConfigError, UserError, first_line
from jaxtrain.formats.safetensors import write_safetensors
from jaxtrain.inference.predict import model_outputs
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.tree import path_name, paths_of

FILES = ("forward.bin", "weights.safetensors", "program.json", "read.py")
PLATFORMS = ("cpu", "cuda", "tpu")
BATCH = "batch"
# What StableHLO promises: openxla/stablehlo, docs/compatibility.md.
_WINDOW = "jax reads the program for 6 months after it was made; keep the run, from which it can be made again"


@dataclass(frozen=True)
class Program:
    """A program (weights and inputs by name -> outputs by name) and its weights, `params/...` and `model_state/...`.

    `batch` is the number of rows of a call (None: any), and `reason` says why it is fixed although none was asked for.
    """

    exported: export.Exported
    weights: dict[str, np.ndarray]
    batch: int | None
    reason: str | None


def check_flatbuffers() -> None:
    """Raise a ConfigError where the package is missing with which jax writes programs."""
    if find_spec("flatbuffers") is None:
        raise ConfigError("--to stablehlo needs flatbuffers; run pip install '.[export]'")


def check_folder(folder: Path) -> None:
    """Raise a ConfigError where a folder for a program exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; use a new folder")


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
        batch: rows of a call; None: any number, or 1 where the model's program depends on it.

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

    def export_for(size: Any) -> export.Exported:
        inputs = {name: jax.ShapeDtypeStruct((size, *row.shape), row.dtype) for name, row in rows.items()}
        shapes = jax.tree.map(jax.typeof, weights)
        return export.export(jax.jit(forward), platforms=PLATFORMS)(shapes, inputs)

    reason = None
    if batch is None:
        try:
            return Program(export_for(export.symbolic_shape(BATCH)[0]), weights, None, None)
        except Exception as error:  # shapes without a number raise whatever code that asks for one raises
            cause = error.__cause__ if isinstance(error, UserError) else None
            reason = first_line(cause or error)
            batch = 1
    try:
        return Program(export_for(batch), weights, batch, reason)
    except Exception as error:  # jax refuses what it does not keep stable in several types
        raise ConfigError(f"{sharded_model.model.name} has no portable program: {first_line(error)}") from error


def write_program(folder: Path, program: Program, *, about: Mapping[str, Any]) -> None:
    """Write a program.

    Args:
        folder: which does not exist, or is empty; see `check_folder`.
        program: what to write.
        about: further entries of program.json: what the outputs mean, and how inputs are made.

    Raises:
        ConfigError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}); name another folder") from None
    (folder / "forward.bin").write_bytes(program.exported.serialize(vjp_order=0))
    shapes = {name: (array.shape, array.dtype) for name, array in program.weights.items()}
    write_safetensors(folder / "weights.safetensors", shapes, program.weights.items())
    write_json_atomic(folder / "program.json", {**_described(program), **about})
    shutil.copyfile(Path(__file__).with_name("read_program.py"), folder / "read.py")


def _described(program: Program) -> dict[str, Any]:
    """Return what program.json says of any program."""
    exported = program.exported
    (_, inputs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    description: dict[str, Any] = {
        "inputs": _specs(inputs),
        "outputs": _specs(jax.tree.unflatten(exported.out_tree, exported.out_avals)),
        "rows_per_call": program.batch or BATCH,
        "platforms": list(PLATFORMS),
        "made_with": {"jaxtrain": __version__, "jax": jax.__version__, "jaxlib": version("jaxlib")},
        "compatibility": _WINDOW,
        "read_by": "python read.py INPUTS.npz OUTPUTS.npz, with jax and flatbuffers",
    }
    if program.reason is not None:
        description["rows_are_fixed_because"] = program.reason
    return description


def _specs(avals: Mapping[str, Any]) -> dict[str, Any]:
    """Return shapes, in which the number of rows may be a name, and dtypes."""
    specs = {}
    for name, aval in avals.items():
        shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
        specs[name] = {"shape": shape, "dtype": aval.dtype.name}
    return specs
