"""The forward pass of a run's model as a folder that runs where jaxtrain is not installed."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.config.encoder_decoder import EncoderDecoderConfig
from jaxtrain.config.local_path import local_path
from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.inference.stablehlo.folder import check_flatbuffers, check_folder, write_program
from jaxtrain.inference.stablehlo.program import make_program
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.run.open_run import open_run
from jaxtrain.run.saved_config import saved_config
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark

if TYPE_CHECKING:
    from jaxtrain.run.opened import OpenedRun

_MEANINGS = {
    "language_model": "logits of the next token",
    "masked_language_model": "logits of each token",
    "sequence": "logits of the classes",
    "token": "logits of the classes of each token",
    "regression": "numbers",
    "embedding": "an embedding",
    "reward": "the score of a text",
    "classification": "logits of the classes",
}


def export_program(
    run_dir: str | Path,
    folder: str | Path,
    *,
    batch: int | None = None,
    step: int | None = None,
) -> Path:
    """Write a checkpoint of a run as a portable program.

    Args:
        run_dir: directory of the run.
        folder: to make; it may exist if it is empty.
        batch: rows of a call; None: any number, or 1 where the model's program depends on it.
        step: step of the checkpoint; None: the newest intact one.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder is not empty, flatbuffers is missing, or the model cannot be exported.
        CheckpointError: there is no intact checkpoint.
    """
    check_flatbuffers()
    folder = local_path(folder, what="the folder of the program").expanduser()
    check_folder(folder)
    saved_config(run_dir)  # what is no run is said before jax starts
    distributed.start(compilation_cache=None)
    # On one device nothing is exchanged, and on a CPU every kernel is plain StableHLO.
    run = open_run(run_dir, step=step, mesh=make_mesh(devices=jax.devices("cpu")[:1]))
    rows = _rows(run)
    program = make_program(run.sharded_model, run.params, run.model_state, rows, batch=batch)
    if program.reason is not None:
        print_remark(f"the program takes {program.batch} row per call, not any number: {program.reason}")
    write_program(folder, program, about=_about(run))
    return folder


def _rows(run: "OpenedRun") -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of one row of each input of the model.

    Raises:
        ConfigError: the run does not say what its rows are.
    """
    config, data = run.config.model, run.info.get("data") or {}
    shape, dtype = data.get("input_shape"), data.get("input_dtype")
    if isinstance(config, TransformerConfig | EncoderDecoderConfig):
        length = shape[-1] if shape else config.max_sequence_length
        names = {"tokens": length}
        if isinstance(config, EncoderDecoderConfig):
            written = getattr(run.config.data, "target_length", None) or length
            names |= {"segments": length, "decoder_tokens": written}
        elif config.head_kind != "language_model":
            names |= {"segments": length} | ({"token_types": length} if config.token_types else {})
        return {name: jax.ShapeDtypeStruct((size,), np.int32) for name, size in names.items()}
    if not shape or dtype is None:
        raise ConfigError(
            f"{run.run_dir} does not say the shape of its rows, which hold several arrays; export from Python with "
            "jax.export and jaxtrain.open_run(...).sharded_model"
        )
    return {"inputs": jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))}


def _about(run: "OpenedRun") -> dict[str, Any]:
    """What program.json says besides the program: whose it is, what the outputs mean, how inputs are made."""
    config, data = run.config, run.info.get("data") or {}
    head = config.model.head_kind if isinstance(config.model, TransformerConfig) else str(config.task)
    head = "reward" if config.task == "reward" else head
    found: dict[str, Any] = {"run": run.run_dir.name, "step": run.step, "model": run.sharded_model.model.name}
    found["precision"] = run.sharded_model.policy.name
    found["outputs_are"] = _MEANINGS.get(head, "outputs of the model")
    if isinstance(config.model, EncoderDecoderConfig):
        found["outputs_are"] = f"logits of the next token; decoder_tokens begin with {config.model.start_token}"
    if run.classes is not None:
        found["classes"] = list(run.classes)
    if "segments" in _rows(run):
        found["segments"] = "1 for a token, 0 for what fills the row up"
    # Scales of columns, names of classes, the size of images: what is done to a row before the program.
    found["reading"] = data.get("reading")
    return found
