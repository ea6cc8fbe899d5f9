"""Our parameters as a published folder: shards with an index, config.json, tokenizer files."""

import contextlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.errors import CheckpointError, ConfigError, UserError
from jaxtrain.interop.folders import check_empty
from jaxtrain.interop.gather import on_main_host
from jaxtrain.interop.load import by_path
from jaxtrain.interop.settings import family_for
from jaxtrain.interop.weights import PublishedModel
from jaxtrain.published.entries import Constant, Entry, Row, names_of, positions
from jaxtrain.published.family import Family
from jaxtrain.published.folder import INDEX, SINGLE
from jaxtrain.published.safetensors import DTYPES, write_safetensors
from jaxtrain.published.transforms import Shape
from jaxtrain.runtime.distributed import is_main_process, on_main_process
from jaxtrain.runtime.files import write_json_atomic

# What may be written, by the name that a config.json has for it.
SAVED_DTYPES = {"float32": DTYPES["F32"], "float16": DTYPES["F16"], "bfloat16": DTYPES["BF16"]}
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


@dataclass(frozen=True)
class _Written:
    """One tensor to write: what it is made of."""

    shape: Shape
    dtype: np.dtype
    parts: tuple[tuple[Entry | Constant, tuple[int, ...]], ...]


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
    with on_main_process(_partial_folder(folder), does="make the folder"):
        rows = family.tensors(settings)
        tensors = _plan(rows, {**dtypes, "": name})
        held = {False: by_path(params), True: by_path(model_state)}
        _check_held(rows, held)
        shards = _shards(tensors, most)
        config = _config(theirs, family, settings) | {"torch_dtype": name, "dtype": name}
        partial, failure = _partial(folder), None
        for file, names in shards.items():
            shapes = {one: (tensors[one].shape, tensors[one].dtype) for one in names}
            gathered = _gathered({one: tensors[one] for one in names}, held)
            if main and failure is None:
                try:
                    write_safetensors(partial / file, shapes, (_assembled(*one) for one in gathered))
                except UserError as error:
                    failure = error
            # Every process takes part in gathering what is sharded over processes, also for one that cannot write.
            for _ in gathered:
                pass
        files = {} if origin is None else origin.files
        finished = _finished(folder, config, shards, tensors, files=files, tokenizer=tokenizer, failure=failure)
        with on_main_process(finished, does="write the folder"):
            pass
    return folder


def _partial(folder: Path) -> Path:
    """Where a folder is written until it is whole: beside it, so that it is renamed in one move."""
    place = folder.resolve()
    return place.with_name(f".{place.name}.partial")


@contextlib.contextmanager
def _partial_folder(folder: Path) -> Iterator[None]:
    """Makes the folder that is written into, and removes it where it was not renamed."""
    check_empty(folder)
    partial = _partial(folder)
    try:
        # What an export that was killed has left.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror or error}); name another folder") from None
    try:
        yield
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _finished(
    folder: Path,
    config: Mapping[str, Any],
    shards: Mapping[str, list[str]],
    tensors: Mapping[str, _Written],
    *,
    files: Mapping[str, str | bytes],
    tokenizer: str | None,
    failure: UserError | None,
) -> Iterator[None]:
    """Writes what stands beside the tensors and gives the folder its name; or raises why tensors were not written."""
    if failure is not None:
        raise failure
    partial, place = _partial(folder), folder.resolve()
    try:
        _write_files(partial, config, shards, tensors, files, tokenizer)
        if place.exists():
            # An empty folder stays the one that it is (somebody may be in it); its config.json comes last.
            for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
                file.replace(place / file.name)
        else:
            partial.rename(place)
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


def _plan(rows: tuple[Row, ...], dtypes: Mapping[str, str]) -> dict[str, _Written]:
    """Name -> tensor to write, in the order of the layers; `dtypes` as those of `Origin`."""
    found: dict[str, _Written] = {}
    placed: list[tuple[tuple[int, ...], str]] = []
    for row in rows:
        if isinstance(row, Constant):
            for position in positions(row):
                name = names_of(row, position)[0]
                placed.append((position, name))
                found[name] = _Written(row.shape, np.dtype(row.dtype), ((row, position),))
        elif isinstance(row, Entry):
            for position in positions(row):
                name = names_of(row, position)[0]
                if name not in found:
                    placed.append((position, name))
                before = found[name].parts if name in found else ()
                dtype = SAVED_DTYPES[dtypes.get(name, dtypes[""])]
                found[name] = _Written(row.transform.theirs, dtype, (*before, (row, position)))
    # Stable: within a layer, in the order of the rows.
    return {name: found[name] for _, name in sorted(placed, key=lambda one: one[0])}


def _check_held(rows: tuple[Row, ...], held: Mapping[bool, Mapping[str, Any]]) -> None:
    """Raises where the arrays are not those of the model."""
    for row in rows:
        if isinstance(row, Entry):
            tree, array = "model_state" if row.state else "params", held[row.state].get(row.path)
            if array is None:
                raise ConfigError(f"{tree} lacks {row.path}, which the model has; give the {tree} of that model")
            if tuple(array.shape) != row.shape:
                shapes = f"{list(array.shape)}, but the model has {list(row.shape)}"
                raise ConfigError(f"{tree} holds {row.path} {shapes}; give the {tree} of that model")


def assemble_tensor(rows: tuple[Row, ...], name: str, held: Mapping[bool, Mapping[str, Any]]) -> np.ndarray:
    """Returns one tensor of a published file in float32, made of our arrays.

    Args:
        rows: The family's name table.
        name: Name of the tensor, as it is written.
        held: Path -> array, for params (False) and model_state (True).
    """
    tensors = {name: _plan(rows, {"": "float32"})[name]}
    return next(_assembled(*one)[1] for one in _gathered(tensors, held))


def _shards(tensors: Mapping[str, _Written], most: int) -> dict[str, list[str]]:
    """File name -> tensors; one file where they fit, else numbered shards."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        size = int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _gathered(
    tensors: Mapping[str, _Written], held: Mapping[bool, Mapping[str, Any]]
) -> Iterator[tuple[str, _Written, list[np.ndarray | None]]]:
    """Each tensor with what it is made of, on the main process; None per part on the others, and for constants."""
    for name, tensor in tensors.items():
        parts = [
            None if isinstance(row, Constant) else on_main_host(held[row.state][row.path], position)
            for row, position in tensor.parts
        ]
        yield name, tensor, parts


def _assembled(name: str, tensor: _Written, parts: list[np.ndarray | None]) -> tuple[str, np.ndarray]:
    out = np.empty(tensor.shape, tensor.dtype)
    for (row, _), part in zip(tensor.parts, parts, strict=True):
        if isinstance(row, Constant):
            out[...] = row.value
            continue
        assert part is not None, "only the main process writes"
        with np.errstate(over="raise"):
            try:
                row.transform.write(out, part)
            except FloatingPointError:
                most = ml_dtypes.finfo(tensor.dtype).max
                raise ConfigError(
                    f"{row.path} holds numbers beyond {float(most):g}, the largest of {tensor.dtype}; write float32 "
                    "or bfloat16"
                ) from None
    return name, out


def _write_files(
    folder: Path,
    config: Mapping[str, Any],
    shards: Mapping[str, list[str]],
    tensors: Mapping[str, _Written],
    files: Mapping[str, str | bytes],
    tokenizer: str | None,
) -> None:
    if len(shards) > 1:
        total = sum(int(np.prod(one.shape, dtype=np.int64)) * one.dtype.itemsize for one in tensors.values())
        names = {name: file for file, group in shards.items() for name in group}
        write_json_atomic(
            folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        )
    for name, text in _companions(config, files, tokenizer):
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    # Last: a folder with a config.json is whole.
    write_json_atomic(folder / "config.json", dict(config))


def _companions(
    config: Mapping[str, Any], files: Mapping[str, str | bytes], tokenizer: str | None
) -> Iterator[tuple[str, str | bytes]]:
    yield from files.items()
    if tokenizer is not None and "tokenizer.json" not in files:
        yield "tokenizer.json", tokenizer
        if "tokenizer_config.json" not in files:
            yield "tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n"
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    known = {key: config[key] for key in ids if config.get(key) is not None}
    if "generation_config.json" not in files and known:
        yield "generation_config.json", json.dumps(known, indent=2) + "\n"


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
