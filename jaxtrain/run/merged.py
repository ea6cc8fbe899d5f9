"""The adapters of a run merged into their base, and the folder opened again before it gets its name."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.published import published_from
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.interop.companions import Texts
from jaxtrain.interop.folders import empty_folder
from jaxtrain.interop.packing import Packing
from jaxtrain.interop.pretrained import load_pretrained
from jaxtrain.interop.save import Origin, write_published
from jaxtrain.models.merge import merge_adapters
from jaxtrain.models.model import Model, ModelState, Params, parameter_shapes
from jaxtrain.precision.kernels import is_kernel
from jaxtrain.precision.low_rank import LowRankKernel
from jaxtrain.run.opened import OpenedRun
from jaxtrain.runtime.files import move_folder
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.base import base_of
from jaxtrain.train.given_params import paths_of
from jaxtrain.train.start import restore_base
from jaxtrain.train.state import merge_leaves

_ROWS, _TOKENS = 4, 32
# Sums of float32 in another order, as a share of the range of the logits: the tests of published models allow as much.
_SUMS = 1e-4
# How often the mean error of a sum of roundings may be exceeded by the largest of some thousand logits.
_LARGEST = 8


def write_merged(
    folder: Path,
    settings: Mapping[str, Any],
    params: Params,
    model_state: ModelState,
    *,
    model: Model,
    origin: Origin | None,
    dtype: str | None,
    max_shard_size: str,
    tokenizer: str | None,
    texts: Texts,
    packing: Packing | None = None,
    classes: Sequence[str] | None = None,
) -> str:
    """Writes the merged model as a published folder, if it gives the logits of the base with its adapters.

    Args:
        folder: The folder to make.
        settings: Our model group, from `settings_of`.
        params, model_state: Of the adapted model.
        model: The adapted model.
        origin, dtype, max_shard_size, tokenizer, texts, packing, classes: See `write_published`.

    Returns:
        A line for people: by how much the logits differ, and what rounding explains.

    Raises:
        ConfigError: The folder is not empty, there are several processes, or no family can say the model.
        CheckpointError: The logits differ by more than rounding explains; nothing is written.
    """
    if jax.process_count() > 1:
        raise ConfigError("--merge compares logits in one process, and there are several; run it in one")
    with empty_folder(folder):
        pass
    assert model.adapted is not None
    if model.adapted.base is not None:
        print_remark(
            f"the base is in {model.adapted.base}: its kernels become floats as they are, and the adapters, which were "
            "trained on them, are added to those"
        )
    inputs, original = _rows(settings), model.adapted.original
    params = _as_float32(params)
    adapted = _outputs(model, params, model_state, inputs)
    without = _outputs(original, _base_params(params, model), model_state, inputs)
    merged = merge_adapters(params, model)
    _compare(adapted, _outputs(original, merged, model_state, inputs), written="float32", kernels=1)
    place = folder.resolve()  # the name of "." is that of the folder that it stands for
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_published(
            partial,
            settings,
            merged,
            model_state,
            origin=origin,
            dtype=dtype,
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
            texts=texts,
            packing=packing,
            classes=classes,
        )
        # What others will read: the files.
        opened = load_pretrained(partial)
        found = _outputs(opened.model, _as_float32(opened.params), opened.model_state, inputs)
        written = opened.published.source.config["dtype"]
        difference, bound = _difference(adapted, found), math.inf
        if packing is None:
            difference, bound = _compare(adapted, found, written=written, kernels=_num_kernels(model))
        move_folder(partial, place, last="config.json")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    moved = float(np.abs(adapted - without).max()) / _width(adapted)
    instead = "use --dtype float32" if packing is None else "leave --base out"
    lost = f"; most of what was learned is lost: {instead}" if difference > moved / 2 > 0 else ""
    if packing is not None:
        return f"merged: nf4 moves the logits by {difference:.1e} of their range, and the adapters by {moved:.1e}{lost}"
    return (
        f"merged: logits differ by {difference:.1e} of their range from base and adapters (rounding to {written} "
        f"explains {bound:.1e}), and the adapters move them by {moved:.1e}{lost}"
    )


def with_stored_base(run_dir: Path, run: OpenedRun) -> Params:
    """The parameters of a run with adapters, with frozen floats as its base stores them.

    Under bf16 and fp16 they are rounded when they are read, and the run was trained on those.

    Args:
        run_dir: directory of the run.
        run: the same, opened under fp32; its own digests of the base are compared as it is read.
    """
    record, params = base_of(run.info), run.params
    if record is None:
        return params
    wanted = {name: str(leaf.dtype) for name, leaf in paths_of(params).items()}
    rounded = {name for name, found in record.digests.items() if found[0] != wanted.get(name, found[0])}
    if not rounded:
        return params
    below = restore_base(
        run.sharded_model,
        replace(record, digests={}),  # without the dtypes of the digests it is read as it is stored
        run_dir=run_dir,
        only=lambda path: path in rounded,
        moved_to=published_from(run.config.model),
    )
    return merge_leaves(below, params)


def _base_params(params: Params, model: Model) -> Params:
    """Parameters of the model that an adapted one was made of, without the adapters."""

    def one(leaf: Any) -> Any:
        return replace(leaf, lora_b=jnp.zeros_like(leaf.lora_b)) if isinstance(leaf, LowRankKernel) else leaf

    return merge_adapters(jax.tree.map(one, params, is_leaf=is_kernel), model)


def _num_kernels(model: Model) -> int:
    """Number of kernels of linear layers, counted in every layer."""
    assert model.adapted is not None
    original = model.adapted.original
    shapes = parameter_shapes(original)
    stacks = (shapes[path].shape[: len(shapes[path].shape) - sum(dims)] for path, dims in original.linears.items())
    return sum(math.prod(stack) for stack in stacks) or 1


def _rows(settings: Mapping[str, Any]) -> Any:
    """Rows to compare logits on, random ones: what they are does not matter, and a run's data may be gone."""
    draw = np.random.default_rng(0)
    if "vocab_size" not in settings:
        size = settings.get("image_size") or 224
        return jnp.asarray(draw.normal(size=(_ROWS, size, size, settings.get("channels", 3))), jnp.float32)
    shape = (_ROWS, min(_TOKENS, settings["max_sequence_length"]))
    tokens = jnp.asarray(draw.integers(0, settings["vocab_size"], shape), jnp.int32)
    return {"tokens": tokens, "decoder_tokens": tokens} if settings["kind"] == "encoder_decoder" else tokens


def _outputs(model: Model, params: Params, model_state: ModelState, inputs: Any) -> np.ndarray:
    def apply(params: Params, model_state: ModelState, inputs: Any) -> Any:
        outputs, _ = model.apply(params, model_state, inputs, key=None, train=False)
        return outputs["logits"] if isinstance(outputs, Mapping) else outputs

    return np.asarray(jax.jit(apply)(params, model_state, inputs), np.float32)


def _as_float32(params: Params) -> Params:
    # Whatever the policy of the run stored: a model takes floats of one dtype.
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params
    )


def _width(outputs: np.ndarray) -> float:
    return float(np.ptp(outputs)) or 1.0


def _difference(expected: np.ndarray, found: np.ndarray) -> float:
    """The largest difference of two outputs as a share of the range of the first."""
    return float(np.abs(expected - found).max()) / _width(expected) if expected.shape == found.shape else math.inf


def _compare(expected: np.ndarray, found: np.ndarray, *, written: str, kernels: int) -> tuple[float, float]:
    """The largest difference of two outputs as a share of their range, and what rounding explains of it.

    Each number that is written is off by up to half a unit in its last place, at random: a layer's outputs by a share
    `eps / sqrt(48)` of their size, and the outputs of N layers in a row by sqrt(N) times that.

    Raises:
        CheckpointError: They differ by more than that, or are not finite.
    """
    eps = float(jnp.finfo(jnp.dtype(written)).eps)
    bound = _SUMS + _LARGEST * eps / math.sqrt(48) * math.sqrt(kernels)
    difference = _difference(expected, found)
    if not difference <= bound:
        raise CheckpointError(
            f"the merged model is not the base with its adapters: its logits differ by {difference:.1e} of their "
            f"range, and rounding to {written} in {kernels} kernels explains {bound:.1e}; nothing is written. Use "
            "--dtype float32, or leave --merge out to write the adapters alone"
        )
    return difference, bound
