"""Our parameters as a published folder: shards with an index, config.json, tokenizer files."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtrain.errors import CheckpointError, ConfigError, UserError
from jaxtrain.interop.companions import Texts, companions, without_ids
from jaxtrain.interop.folders import name_folder, partial_folder, partial_of
from jaxtrain.interop.load import by_path
from jaxtrain.interop.packing import KEPT, Packing, config_of
from jaxtrain.interop.settings import family_for
from jaxtrain.interop.weights import PublishedModel
from jaxtrain.interop.written import (
    SAVED_DTYPES,
    WrittenTensor,
    assembled,
    check_floats,
    check_held,
    gathered,
    in_files,
    kinds_of,
    packed_tensors,
    parameters_by_path,
    plan_tensors,
)
from jaxtrain.published.family import Family
from jaxtrain.published.folder import INDEX
from jaxtrain.published.safetensors import read_header, write_safetensors
from jaxtrain.runtime.distributed import is_main_process, on_main_process
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.terminal import print_remark

_TEXTS_OF_THE_ORIGIN = Texts()
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Origin:
    """The published model that another came from: what is taken over from it.

    Attributes:
        config: Its config.json.
        files: Name -> text or bytes of its tokenizer files and the like.
        dtypes: Name of a tensor -> its dtype; "" -> that of most of them (see `saved_dtypes`).
    """

    config: Mapping[str, Any]
    files: Mapping[str, str | bytes]
    dtypes: Mapping[str, str]


def saved_dtypes(published: PublishedModel) -> dict[str, str]:
    """Returns the dtypes in which the tensors of a published model come back as they were; what most have is at "".

    A config.json may lack its dtype, or say another than its tensors have.
    """
    sizes: Counter[str] = Counter()
    for shape, dtype in published.source.tensors.values():
        if dtype.name in SAVED_DTYPES:
            sizes[dtype.name] += math.prod(shape)
    if not sizes:
        return {}
    most = sizes.most_common(1)[0][0]
    names = {name: dtype.name for name, (_, dtype) in published.source.tensors.items()}
    others = {name: dtype for name, dtype in names.items() if dtype != most and dtype in SAVED_DTYPES}
    return {"": most, **others}


def write_published(
    folder: str | Path,
    settings: Mapping[str, Any],
    params: Any,
    model_state: Any,
    *,
    origin: Origin | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    tokenizer: str | None = None,
    texts: Texts = _TEXTS_OF_THE_ORIGIN,
    packing: Packing | None = None,
    classes: Sequence[str] | None = None,
) -> Path:
    """Writes a published folder. Every process calls it, the main one writes.

    Tensors are gathered one at a time, into a folder beside the one that is asked for, which gets its name when it is
    whole: an export that fails or is killed leaves nothing that looks like a model, and may be tried again.

    Args:
        folder: The folder to make; it may exist if it is empty.
        settings: Our model group, from `settings_of`.
        params, model_state: The model's arrays, sharded in any way.
        origin: The published model that this one came from, whose family and further keys it takes over.
        dtype: float32, float16 or bfloat16; None: for each tensor that of the origin's, else float32.
        max_shard_size: Most bytes per file, as in "5GB" or "500MB".
        tokenizer: Text of a tokenizer.json, where the origin has none.
        texts: The chat template and the special tokens that the model was trained with; those of the origin otherwise.
        packing: Which kernels are written in nf4; None: all that is written is in floats.
        classes: Names of the first outputs, each row of one of them; None: those of the origin, where it has as many.

    Returns:
        The folder.

    Raises:
        ConfigError: The folder is not empty, no family can say the model, or an argument is out of range.
        CheckpointError: The folder cannot be written.
    """
    folder = Path(folder)
    most = _num_bytes(max_shard_size)
    theirs: Mapping[str, Any] = {} if origin is None else origin.config
    family = family_for(settings, model_type=theirs.get("model_type"))
    name, dtypes = _dtype_name(dtype, origin), {} if dtype or origin is None else origin.dtypes
    main = is_main_process()
    # Only the main process looks: when another one comes here, it may have written the folder already.
    with on_main_process(partial_folder(folder), does="make the folder"):
        rows = family.tensors(settings)
        tensors = plan_tensors(rows, {**dtypes, "": name})
        held = {False: parameters_by_path(params), True: by_path(model_state)}
        check_held(rows, held)
        config = _named_classes(_config(theirs, family, settings), classes) | {"torch_dtype": name, "dtype": name}
        config = {**(without_ids(settings) if origin is None else {}), **config, **texts.ids}
        if packing is not None:
            packing = replace(packing, kept=KEPT.get(family.model_type, ()))
            has_head = "vocab_size" in settings and settings.get("head") is None
            config["quantization_config"] = config_of(packing, rows, dtype=name, has_head=has_head)
            tensors = packed_tensors(tensors, held[False], packing)
        check_floats(tensors, held[False])
        shards = in_files(tensors, most)
        partial, failure = partial_of(folder), None
        for file, names in shards.items():
            here = {one: tensors[one] for one in names}
            parts = gathered(here, held)
            if main and failure is None:
                try:
                    write_safetensors(partial / file, kinds_of(here), assembled(parts, packing))
                except UserError as error:
                    failure = error
            # Every process takes part in gathering what is sharded over processes, also for one that cannot write.
            for _ in parts:
                pass
        files = companions(config, {} if origin is None else origin.files, tokenizer, texts)
        finished = _finished(folder, config, shards, tensors, files=files, failure=failure)
        with on_main_process(finished, does="write the folder"):
            pass
    if main and origin is None and family.name == "roberta":
        print_remark(
            f"the model is written as a roberta: id {config['pad_token_id']} is padding there and takes no position, "
            "so rows that hold it as a token give other outputs in transformers"
        )
    return folder


@contextlib.contextmanager
def _finished(
    folder: Path,
    config: Mapping[str, Any],
    shards: Mapping[str, list[str]],
    tensors: Mapping[str, WrittenTensor],
    *,
    files: Mapping[str, str | bytes],
    failure: UserError | None,
) -> Iterator[None]:
    """Writes what stands beside the tensors and gives the folder its name; or raises why tensors were not written."""
    if failure is not None:
        raise failure
    try:
        _write_files(partial_of(folder), config, shards, tensors, files)
        name_folder(folder, last="config.json")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error.strerror or error})") from None
    yield


def _config(theirs: Mapping[str, Any], family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json: what the family says of the model, and what only the origin said."""
    written = {**family.to_published(settings), "model_type": family.model_type}
    if theirs.get("model_type") != family.model_type:
        return written
    if family.from_published(theirs) == family.from_published(written):
        # The same model: its own words stay, and the forms that it lacks are added.
        return {**written, **theirs}
    labels = written.get("id2label")
    if isinstance(labels, Mapping) and len(labels) == len(theirs.get("id2label") or ()):
        # The family numbers the labels; the origin names them.
        written = {key: value for key, value in written.items() if key not in ("id2label", "label2id")}
    merged = {**theirs, **written}
    # Another form of a key that only the origin has (rope_scaling beside rope_parameters) may contradict ours.
    return merged if family.from_published(merged) == family.from_published(written) else written


def _named_classes(config: dict[str, Any], classes: Sequence[str] | None) -> dict[str, Any]:
    """The config.json with the classes that the model was trained on, which need not be those of its origin."""
    labels = config.get("id2label")
    if classes is None or not isinstance(labels, Mapping) or len(labels) < len(classes):
        return config
    names = [*classes, *(f"LABEL_{number}" for number in range(len(classes), len(labels)))]
    said = {key: value for key, value in config.items() if key != "problem_type"}
    numbered = {str(number): name for number, name in enumerate(names)}
    return said | {"id2label": numbered, "label2id": {name: number for number, name in enumerate(names)}}


def _write_files(
    folder: Path,
    config: Mapping[str, Any],
    shards: Mapping[str, list[str]],
    tensors: Mapping[str, WrittenTensor],
    files: Mapping[str, str | bytes],
) -> None:
    if len(shards) > 1:
        headers = {file: read_header(folder / file) for file in shards}
        total = sum(tensor.num_bytes for header in headers.values() for tensor in header.values())
        names = {name: file for file, header in headers.items() for name in header}
        write_json_atomic(
            folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        )
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    # Last: a folder with a config.json is whole.
    write_json_atomic(folder / "config.json", dict(config))


def _dtype_name(dtype: str | None, origin: Origin | None) -> str:
    name = dtype or ("float32" if origin is None else origin.dtypes.get("", "float32"))
    if not isinstance(name, str) or name not in SAVED_DTYPES:
        raise ConfigError(f"dtype={name!r} cannot be written; use one of {', '.join(SAVED_DTYPES)}")
    return name


def _num_bytes(text: str) -> int:
    number, unit = (text[:-2], text[-2:].upper()) if isinstance(text, str) else ("", "")
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"max_shard_size={text!r} is no size; write a number with KB, MB or GB, as in 5GB")
    return size
