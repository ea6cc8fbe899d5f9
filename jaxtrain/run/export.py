"""A run written for other programs: a published folder, a folder of adapters, or a portable program."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.files import read_run
from jaxtrain.config.model import EncoderDecoderConfig, TransformerConfig, published_from
from jaxtrain.config.published import settings_of
from jaxtrain.data import load_tokenizer
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.inference.stablehlo.folder import check_flatbuffers, check_folder, write_program
from jaxtrain.inference.stablehlo.program import make_program
from jaxtrain.interop.peft import write_adapter
from jaxtrain.interop.pretrained import load_pretrained
from jaxtrain.interop.save import (
    Origin,
    companions,
    name_folder,
    partial_folder,
    partial_of,
    saved_dtypes,
    write_published,
)
from jaxtrain.interop.weights import StoredParameter
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.merge import merge_adapters
from jaxtrain.models.model import Model, ModelState, Params, parameter_shapes
from jaxtrain.run.directory import tokenizer_file
from jaxtrain.run.open_run import OpenedRun, open_run
from jaxtrain.run.published import base_of_adapters, origin_of
from jaxtrain.run.texts import exported_texts
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.base import base_of
from jaxtrain.train.given_params import paths_of
from jaxtrain.train.start import restore_base
from jaxtrain.train.state import merge_leaves

# Rows on which merged weights are compared.
_ROWS, _TOKENS = 4, 32
# Sums of float32 in another order, as a share of the range of the logits: the tests of published models allow as much.
_SUMS = 1e-4
# How often the mean error of a sum of roundings may be exceeded by the largest of some thousand logits.
_LARGEST = 8
_OUTPUTS = {
    "language_model": "logits of the next token",
    "masked_language_model": "logits of each token",
    "sequence": "logits of the classes",
    "token": "logits of the classes of each token",
    "regression": "numbers",
    "embedding": "an embedding",
    "reward": "the score of a text",
    "classification": "logits of the classes",
}


def export_run(
    run_dir: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    step: int | None = None,
    merge: bool = False,
    base: str | None = None,
    emulate: int | None = None,
) -> Path:
    """Writes a checkpoint of a run as a published folder; of a run with adapters, these alone, as PEFT has them.

    Args:
        run_dir, step: The run, and which checkpoint; None: the newest intact one.
        folder: To make; it may exist if it is empty.
        dtype: float32, float16 or bfloat16; None: that of the published model that the run started from, else float32.
        max_shard_size: Most bytes per file, as in "5GB".
        merge: Whether adapters are added to their base as its folder stores it, and all weights are written.
        base: "nf4": linear layers are written in 4 bits, as bitsandbytes does; None: in floats.
        emulate: Number of CPU devices to emulate; None: the devices of the machine.

    Raises:
        ConfigError: The folder is not empty, no published family has the run's model, or there is nothing to merge.
        CheckpointError: There is no intact checkpoint, or what was merged is not what was trained.
    """
    run_dir, folder, info = Path(run_dir), Path(folder), read_run(run_dir)
    distributed.start(emulate=emulate, compilation_cache=None)
    run = open_run(run_dir, step=step, overrides={"precision.policy": "fp32"} if merge else {})
    model, file, origin = run.sharded_model.model, tokenizer_file(run_dir, info), origin_of(run_dir)
    settings, adapted = _settings(run), model.adapted
    has_adapters = adapted is not None and adapted.lora is not None
    if merge and not has_adapters:
        raise ConfigError(f"{run_dir} has no adapters to merge; leave --merge out")
    tokenizer = None if file is None else file.read_text(encoding="utf-8")
    texts = exported_texts(info, None if file is None else load_tokenizer(file), origin, model=model, config=run.config)
    if has_adapters and not merge:
        if base is not None or dtype not in (None, "float32"):
            raise ConfigError("adapters are written in float32; leave --base and --dtype out, or add --merge")
        return write_adapter(
            folder,
            settings,
            run.params,
            model=model,
            base=Origin(
                {} if origin is None else origin.config,
                companions(texts.ids, {} if origin is None else origin.files, tokenizer, texts),
            ),
            base_name=base_of_adapters(run_dir),
        )
    original = model if adapted is None else adapted.original
    how = {"origin": origin, "dtype": dtype, "max_shard_size": max_shard_size, "tokenizer": tokenizer, "texts": texts}
    how |= {"nf4_linears": None if base is None else original.linears, "classes": run.classes}
    if not merge:
        return write_published(folder, settings, run.params, run.model_state, **how)
    return _write_merged(folder, settings, run, **how)


def export_folder(
    path: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    base: str | None = None,
) -> Path:
    """Writes a published folder or .gguf file again, tensor by tensor; see `export_run`."""
    opened = load_pretrained(path)
    published = opened.published
    held = [
        {name: StoredParameter(published, place) for name, place in places.items()}
        for places in (opened.places.params, opened.places.model_state)
    ]
    return write_published(
        folder,
        settings_of(opened.config),
        *held,
        origin=Origin(published.source.config, published.source.files, saved_dtypes(published)),
        dtype=dtype,
        max_shard_size=max_shard_size,
        nf4_linears=None if base is None else opened.model.linears,
    )


def _settings(run: OpenedRun) -> dict[str, Any]:
    """The model group with the sizes that its config left to the data."""
    data = run.info.get("data") or {}
    settings = settings_of(run.config.model, vocab_size=data.get("vocab_size"))
    if "num_classes" in settings and settings["num_classes"] is None:
        settings["num_classes"] = data.get("num_outputs")
    head = settings.get("head")
    if head is not None and head.get("num_labels", 0) is None:
        settings["head"] = {**head, "num_labels": data.get("num_outputs")}
    return settings


def _write_merged(folder: Path, settings: Mapping[str, Any], run: OpenedRun, **how: Any) -> Path:
    """Writes base and adapters added up, if what is written gives their logits; else a CheckpointError."""
    if jax.process_count() > 1:
        raise ConfigError("--merge compares logits in one process, and there are several; run it in one")
    model = run.sharded_model.model
    assert model.adapted is not None
    inputs, params = _random_rows(settings), _as_float32(_with_stored_base(run))
    adapted, partial = _outputs(model, params, run.model_state, inputs), partial_of(folder)
    with partial_folder(folder):
        write_published(partial, settings, merge_adapters(params, model), run.model_state, **how)
        opened = load_pretrained(partial)  # what others will read
        found = _outputs(opened.model, _as_float32(opened.params), opened.model_state, inputs)
        difference = float(np.abs(adapted - found).max() / (np.ptp(adapted) or 1.0))
        written, bound = opened.published.source.config["dtype"], math.inf
        if how["packing"] is None:
            bound = _rounding(written, model.adapted.original)
        if not difference <= bound:
            raise CheckpointError(
                f"the merged model is not the base with its adapters: its logits differ by {difference:.1e} of their "
                f"range, and rounding to {written} explains {bound:.1e}; use --dtype float32, or leave --merge out"
            )
        name_folder(folder, last="config.json")
    explained = "" if bound == math.inf else f" (rounding to {written} explains {bound:.1e})"
    print_remark(f"merged: logits differ by {difference:.1e} of their range from base and adapters{explained}")
    return folder


def _with_stored_base(run: OpenedRun) -> Params:
    """The parameters of a run that was opened in float32, with the frozen floats that its policy rounded as stored."""
    record, dtypes = base_of(run.info), {name: str(leaf.dtype) for name, leaf in paths_of(run.params).items()}
    digests = {} if record is None else record.digests
    rounded = {name for name, (dtype, *_) in digests.items() if dtype != dtypes.get(name, dtype)}
    if record is None or not rounded:
        return run.params
    stored = restore_base(
        run.sharded_model,
        dataclasses.replace(record, digests={}),  # without the dtypes of digests it is read as it is stored
        run_dir=run.run_dir,
        only=lambda path: path in rounded,
        moved_to=published_from(run.config.model),
    )
    return merge_leaves(stored, run.params)


def _random_rows(settings: Mapping[str, Any]) -> Any:
    """Rows to compare logits on: what they are does not matter, and a run's data may be gone."""
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
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params
    )


def _rounding(written: str, model: Model) -> float:
    """What rounding explains of the largest difference of logits, as a share of their range.

    Each number that is written is off by up to half a unit in its last place, at random: a layer's outputs by a share
    `eps / sqrt(48)` of their size, and the outputs of N layers in a row by sqrt(N) times that.
    """
    shapes = parameter_shapes(model)
    stacks = (shapes[path].shape[: len(shapes[path].shape) - sum(dims)] for path, dims in model.linears.items())
    kernels = sum(math.prod(stack) for stack in stacks) or 1
    return _SUMS + _LARGEST * float(jnp.finfo(jnp.dtype(written)).eps) / math.sqrt(48) * math.sqrt(kernels)


def export_program(
    run_dir: str | Path, folder: str | Path, *, batch: int | None = None, step: int | None = None
) -> Path:
    """Write the forward pass of a checkpoint as a folder that runs where jaxtrain is not installed.

    `batch` is the number of rows of a call; None: any number, or 1 where the model's program depends on it.
    """
    folder = Path(folder).expanduser()
    check_flatbuffers()
    check_folder(folder)
    read_run(run_dir)  # what is no run is said before jax starts
    distributed.start(compilation_cache=None)
    # On one device nothing is exchanged, and on a CPU every kernel is plain StableHLO.
    run = open_run(run_dir, step=step, mesh=make_mesh(devices=jax.devices("cpu")[:1]))
    rows, config, task = _program_rows(run), run.config.model, str(run.config.task)
    program = make_program(run.sharded_model, run.params, run.model_state, rows, batch=batch)
    if program.reason is not None:
        print_remark(f"the program takes {program.batch} row per call, not any number: {program.reason}")
    head = config.head_kind if isinstance(config, TransformerConfig) and task != "reward" else task
    outputs = _OUTPUTS.get(head, "outputs of the model")
    if isinstance(config, EncoderDecoderConfig):
        outputs = f"logits of the next token; decoder_tokens begin with {config.start_token}"
    about = {"run": run.run_dir.name, "step": run.step, "model": run.sharded_model.model.name}
    about |= {"precision": run.sharded_model.policy.name, "outputs_are": outputs}
    about |= {} if run.classes is None else {"classes": list(run.classes)}
    about |= {"segments": "1 for a token, 0 for what fills the row up"} if "segments" in rows else {}
    # Scales of columns, names of classes, the size of images: what is done to a row before the program.
    write_program(folder, program, about={**about, "reading": (run.info.get("data") or {}).get("reading")})
    return folder


def _program_rows(run: OpenedRun) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of one row of each input of the model."""
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
        raise ConfigError(f"{run.run_dir} does not say the shape of its rows; use jax.export on run.sharded_model")
    return {"inputs": jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))}
