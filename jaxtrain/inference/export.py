"""A run written for other programs: a published folder, a folder of adapters, or a portable program."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config.model import EncoderDecoderConfig, TransformerConfig, published_from
from jaxtrain.config.published import settings_of
from jaxtrain.data.tokenizer import load_tokenizer, tokenizer_sha256
from jaxtrain.errors import ConfigError
from jaxtrain.inference.open import OpenedRun, open_model, open_run
from jaxtrain.inference.opened import OpenedModel
from jaxtrain.inference.published import FOLDER, TOKENIZER_FILE, exported_texts, kept_published
from jaxtrain.inference.stablehlo import check_flatbuffers, make_program, write_program
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.adapters import merge_adapters
from jaxtrain.models.model import Params
from jaxtrain.precision.policy import cast_floats
from jaxtrain.runtime.tree import merge_leaves
from jaxtrain.weights.base import base_of
from jaxtrain.weights.load import restore_base
from jaxtrain.weights.peft import write_adapter
from jaxtrain.weights.pretrained import load_pretrained
from jaxtrain.weights.read import StoredParameter
from jaxtrain.weights.write import Form, Origin, companions, saved_dtypes, write_published


def export_run(
    run_dir: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    step: int | None = None,
    merge: bool = False,
) -> Path:
    """Write a checkpoint of a run as a published folder; of a run with adapters, these alone, as PEFT has them.

    `dtype` is that of the published model which the run started from unless it is given, and `merge` adds adapters to
    their base as its folder stores it.
    """
    folder = Path(folder)
    run = open_run(run_dir, step=step, overrides={"precision.policy": "fp32"} if merge else {})
    model = run.sharded_model.model
    origin = kept_published(run.path)
    has_adapters = model.adapted is not None and model.adapted.lora is not None
    if merge and not has_adapters:
        raise ConfigError(f"{run_dir} has no adapters to merge; leave --merge out")
    texts = exported_texts(run.info, run.tokenizer, origin, model)
    texts = dataclasses.replace(texts, tokenizer=_own_tokenizer(run), classes=run.classes)
    if merge or not has_adapters:
        params = _merged(run) if merge else run.params
        form = Form(dtype, max_shard_size)
        return write_published(
            folder,
            _settings(run),
            params,
            run.model_state,
            origin=origin,
            texts=texts,
            form=form,
        )
    if dtype not in (None, "float32"):
        raise ConfigError("adapters are written in float32; leave --dtype out, or add --merge")
    base = origin or Origin()
    return write_adapter(
        folder,
        _settings(run),
        run.params,
        model=model,
        base=Origin(base.config, companions(texts.ids, base.files, texts)),
        base_name=(run.info.get("published") or {}).get("folder"),
    )


def _own_tokenizer(run: OpenedRun) -> str | None:
    """The tokenizer.json of a run; None: that of the published model that it started from stays as it is written."""
    if run.tokenizer is None:
        return None
    published = run.path / FOLDER / TOKENIZER_FILE
    if published.is_file() and tokenizer_sha256(load_tokenizer(published)) == tokenizer_sha256(run.tokenizer):
        return None
    return (run.path / TOKENIZER_FILE).read_text(encoding="utf-8")


def export_folder(
    path: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a published folder or .gguf file again, tensor by tensor; see `export_run`."""
    opened = load_pretrained(path)
    published = opened.published
    params = {name: StoredParameter(published, place) for name, place in opened.places.params.items()}
    model_state = {name: StoredParameter(published, place) for name, place in opened.places.model_state.items()}
    origin = Origin(published.source.config, published.source.files, saved_dtypes(published))
    form = Form(dtype, max_shard_size)
    return write_published(folder, settings_of(opened.config), params, model_state, origin=origin, form=form)


def _settings(run: OpenedRun) -> dict[str, Any]:
    """The model group with the sizes that its config left to the data."""
    data = run.trained_on
    settings = settings_of(run.config.model, vocab_size=data.get("vocab_size"))
    if "num_classes" in settings and settings["num_classes"] is None:
        settings["num_classes"] = data.get("num_outputs")
    head = settings.get("head")
    if head is not None and head.get("num_labels", 0) is None:
        settings["head"] = {**head, "num_labels": data.get("num_outputs")}
    return settings


def _merged(run: OpenedRun) -> Params:
    """Base and adapters of a run that was opened in float32, added up."""
    params = run.params
    record = base_of(run.info)
    if record is not None:
        # Frozen floats that the policy of the run rounded are read as they are stored: without their digests.
        rounded = [name for name, (dtype, *_) in record.digests.items() if dtype == "bfloat16"]
        stored = restore_base(
            run.sharded_model,
            dataclasses.replace(record, digests={}),
            run_dir=run.path,
            moved_to=published_from(run.config.model),
            only=lambda path: path in rounded,
        )
        params = merge_leaves(stored, params)
    return merge_adapters(cast_floats(params, "float32"), run.sharded_model.model)


def export_program(path: str | Path, folder: str | Path, *, batch: int | None = None, step: int | None = None) -> Path:
    """Write the forward pass of a model as a folder that runs where jaxtrain is not installed.

    `batch` is the number of rows of a call; None: any number.
    """
    folder = Path(folder).expanduser()
    check_flatbuffers()
    # On one device nothing is exchanged, and on a CPU every kernel is plain StableHLO.
    opened = open_model(path, step=step, mesh=make_mesh(devices=jax.devices("cpu")[:1]))
    rows = _program_rows(opened)
    config = opened.config.model
    model = opened.sharded_model
    program = make_program(model, opened.params, opened.model_state, rows, batch=batch)
    about = {
        "name": Path(path).name,
        "step": opened.step,
        "model": model.model.name,
        "precision": model.policy.name,
        "classes": opened.classes,
    }
    if isinstance(config, EncoderDecoderConfig):
        about["decoder_tokens_begin_with"] = config.start_token
    for key in ("columns", "mean", "deviation", "target_offset"):
        if key in opened.reading:
            # What is done to the columns of a table before the program, and to its numbers after it.
            about[key] = opened.reading[key]
    write_program(folder, program, about=about)
    if opened.tokenizer is not None:
        opened.tokenizer.save(folder / "tokenizer.json")
    return folder


def _program_rows(opened: OpenedModel) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of one row of each input of the model."""
    config = opened.config.model
    shape = opened.trained_on.get("input_shape")
    dtype = opened.trained_on.get("input_dtype")
    if not isinstance(config, TransformerConfig | EncoderDecoderConfig):
        if not shape or dtype is None:
            raise ConfigError(f"{opened.path} does not record the shape of its rows; use jax.export on its model")
        return {"inputs": jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))}
    length = shape[-1] if shape else config.max_sequence_length
    lengths = {"tokens": length}
    if isinstance(config, EncoderDecoderConfig):
        lengths["segments"] = length
        lengths["decoder_tokens"] = getattr(opened.config.data, "target_length", None) or length
    elif config.head_kind != "language_model":
        lengths["segments"] = length
        if config.token_types:
            lengths["token_types"] = length
    return {name: jax.ShapeDtypeStruct((size,), np.int32) for name, size in lengths.items()}
