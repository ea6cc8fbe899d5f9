"""The folder of a portable program: `forward.bin`, `weights.safetensors`, `program.json` and `read.py`."""

import datetime
import json
import os
import shutil
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain import __version__
from jaxtrain.errors import ConfigError
from jaxtrain.inference.stablehlo.program import BATCH, PLATFORMS, Program
from jaxtrain.interop.formats.safetensors import DTYPES, write_safetensors
from jaxtrain.runtime.files import strict_json

FILES = ("forward.bin", "weights.safetensors", "program.json", "read.py")
# What StableHLO promises: openxla/stablehlo, docs/compatibility.md.
_WINDOW = (
    "jax reads the program for 6 months after the day on which it was made, and a jax that is up to 4 weeks older than "
    "the one that made it reads it too. Keep the run: it is what a program is made from again."
)


def check_flatbuffers() -> None:
    """Raise a ConfigError where the package is missing with which jax writes programs."""
    try:
        import_module("flatbuffers")
    except ImportError:
        raise ConfigError(
            "--to stablehlo needs flatbuffers, with which jax writes programs; run pip install 'jaxtrain[export]'"
        ) from None


def check_folder(folder: Path) -> None:
    """Raise a ConfigError where a folder for a program exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not empty; name a new folder")


def write_program(folder: Path, program: Program, *, about: Mapping[str, Any]) -> None:
    """Write a program; the folder appears when it is whole.

    Args:
        folder: which does not exist, or is empty.
        program: what to write.
        about: further entries of program.json: what the outputs mean, and how inputs are made.

    Raises:
        ConfigError: the folder is not empty or cannot be made, or a weight has a dtype that safetensors does not hold.
    """
    check_folder(folder)
    weights = {name: np.asarray(leaf) for name, leaf in program.weights.items()}
    for name, array in weights.items():
        if array.dtype not in DTYPES.values():
            raise ConfigError(
                f"the weight {name} is {array.dtype}, which safetensors does not hold; export it unquantized"
            )
    place = folder.resolve()  # the name of "." is that of the folder that it stands for
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror or error}); name another folder") from None
    try:
        (partial / "forward.bin").write_bytes(program.exported.serialize(vjp_order=0))
        shapes = {name: (array.shape, array.dtype) for name, array in weights.items()}
        write_safetensors(partial / "weights.safetensors", shapes, weights.items())
        described = {**_described(program), **about}
        text = json.dumps(strict_json(described), indent=2, ensure_ascii=False, allow_nan=False)
        (partial / "program.json").write_text(text + "\n", encoding="utf-8")
        shutil.copyfile(Path(__file__).with_name("read.py"), partial / "read.py")
        partial.rename(place)  # which may be an empty folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _described(program: Program) -> dict[str, Any]:
    exported = program.exported
    (weights, inputs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    rows = {"rows_per_call": BATCH if program.batch is None else program.batch}
    if program.reason is not None:
        rows["rows_are_fixed_because"] = program.reason
    return {
        "inputs": _specs(inputs),
        "outputs": _specs(outputs),
        **rows,
        "platforms": list(PLATFORMS),
        "weights": {"tensors": len(weights), "bytes": sum(leaf.nbytes for leaf in program.weights.values())},
        "made_with": {"jaxtrain": __version__, "jax": jax.__version__, "jaxlib": version("jaxlib")},
        "made_on": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "calling_convention_version": exported.calling_convention_version,
        "compatibility": _WINDOW,
        "read_by": "python read.py INPUTS.npz OUTPUTS.npz, with jax and flatbuffers",
    }


def _specs(avals: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes, in which the number of rows may be a name, and dtypes."""
    return {
        name: {"shape": [size if isinstance(size, int) else str(size) for size in aval.shape], "dtype": aval.dtype.name}
        for name, aval in avals.items()
    }
