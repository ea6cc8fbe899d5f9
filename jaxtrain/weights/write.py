"""The writer: our parameters as a published folder: shards with an index, config.json, tokenizer files.

Tensors are gathered one at a time, and written in floats.
"""

import contextlib
import functools
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.arguments import check_choice
from jaxtrain.config.fits import family_for
from jaxtrain.errors import CheckpointError, ConfigError, UserError
from jaxtrain.families.family import Family
from jaxtrain.families.table import family_of
from jaxtrain.formats.hub import INDEX, SINGLE
from jaxtrain.formats.rows import Constant, Entry, Position, Row, Shape, names_of, positions
from jaxtrain.formats.safetensors import DTYPES, read_header, write_safetensors
from jaxtrain.precision.kernels import is_kernel
from jaxtrain.precision.policy import KEPT
from jaxtrain.runtime.distributed import is_main_process, on_main_process
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.weights.read import PublishedModel, StoredParameter, by_path

# What may be written, by the name that a config.json has for it.
SAVED_DTYPES = {"float32": DTYPES["F32"], "float16": DTYPES["F16"], "bfloat16": DTYPES["BF16"]}
TEMPLATE, SETTINGS, GENERATION = "chat_template.jinja", "tokenizer_config.json", "generation_config.json"
TEXT_FILES = (TEMPLATE, SETTINGS, "special_tokens_map.json", GENERATION)
"""What says how a model chats, and which tokens are special."""
# Of a tokenizer.json that no published model came with. The text of ids is what the tokenizer says, spaces included.
_OWN_SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# A file without these keys stands for ids of the family's published tokenizers, which are other tokens elsewhere.
_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
# Arrays that are written: path -> array, of params (False) and of model_state (True).
_Held = Mapping[bool, Mapping[str, Any]]


@dataclass(frozen=True)
class Origin:
    """The published model that another came from: what is taken over from it.

    Attributes:
        config: Its config.json.
        files: Name -> text or bytes of its tokenizer files and the like.
        dtypes: Name of a tensor -> its dtype; "" -> that of most of them (see `saved_dtypes`).
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Texts:
    """What a model was trained to read and write, as far as the published model that it came from does not say it.

    Attributes:
        template: Chat template in the language of jinja2; None: that of the origin, if any.
        tokens: Name of a special token (eos_token) -> its text.
        ids: Key of config.json and generation_config.json (eos_token_id) -> an id, a list of ids, or null.
        tokenizer: Text of a tokenizer.json; None: that of the origin, if any.
        classes: Names of the first outputs, each row of one of them; None: those of the origin, where it has as many.
    """

    template: str | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    ids: Mapping[str, int | list[int] | None] = field(default_factory=dict)
    tokenizer: str | None = None
    classes: Sequence[str] | None = None


@dataclass(frozen=True)
class Form:
    """The form in which weights are written.

    Attributes:
        dtype: float32, float16 or bfloat16; None: for each tensor that of the origin's, else float32.
        max_shard_size: Most bytes per file, as in "5GB" or "500MB".
    """

    dtype: str | None = None
    max_shard_size: str = "5GB"


_TEXTS, _FORM = Texts(), Form()


def saved_dtypes(published: PublishedModel) -> dict[str, str]:
    """Returns the dtypes in which the tensors of a published model come back as they were; what most have is at "".

    A config.json may lack its dtype, or say another than its tensors have.
    """
    sizes: Counter[str] = Counter()
    names = {name: dtype.name for name, (_, dtype) in published.source.tensors.items() if dtype.name in SAVED_DTYPES}
    for name, dtype in names.items():
        sizes[dtype] += math.prod(published.source.tensors[name][0])
    most = sizes.most_common(1)[0][0] if sizes else "float32"
    return {"": most} | {name: dtype for name, dtype in names.items() if dtype != most}


def write_published(
    folder: str | Path,
    settings: Mapping[str, Any],
    params: Any,
    model_state: Any,
    *,
    origin: Origin | None = None,
    texts: Texts = _TEXTS,
    form: Form = _FORM,
) -> Path:
    """Writes a published folder. Every process calls it, the main one writes.

    Tensors are gathered one at a time, into a folder beside the one that is asked for, which gets its name when it is
    whole: an export that fails or is killed leaves nothing that looks like a model, and may be tried again.

    Args:
        folder: The folder to make; it may exist if it is empty.
        settings: Our model group, from `settings_of`.
        params, model_state: The model's arrays, sharded in any way.
        origin: The published model that this one came from, whose family and further keys it takes over.
        texts, form: What it was trained to read and write, and how the weights are written.

    Raises:
        ConfigError: The folder is not empty, no family can say the model, or an argument is out of range.
        CheckpointError: The folder cannot be written.
    """
    folder, theirs = Path(folder), origin or Origin()
    most = _num_bytes(form.max_shard_size)
    model_type = theirs.config.get("model_type")
    text = None if model_type is None else family_of(model_type).text
    family = family_for(settings, model_type=model_type if text is None else text.name)
    name = form.dtype or theirs.dtypes.get("", "float32")
    check_choice(name, tuple(SAVED_DTYPES), what="dtype", write="float32, float16 or bfloat16")
    # Only the main process looks: when another one comes here, it may have written the folder already.
    with on_main_process(partial_folder(folder), does="make the folder"):
        rows = family.tensors(settings)
        tensors = plan_tensors(rows, {**({} if form.dtype else theirs.dtypes), "": name})
        held = {False: by_path(params, is_leaf=is_kernel), True: by_path(model_state)}
        config = _named_classes(_config(theirs.config, family, settings), texts.classes)
        config |= dict(torch_dtype=name, dtype=name)
        has_vocabulary = "vocab_size" in settings and settings.get("head") is None
        # Of the special tokens of a model that came from no published one, and that writes text, nothing is known.
        unknown = _NO_IDS if origin is None and has_vocabulary and settings.get("causal", True) else {}
        config = {**unknown, **config, **texts.ids}
        _check_held(tensors, held)
        shards, failure = _in_files(tensors, most), None
        for file, names in shards.items():
            here = {one: tensors[one] for one in names}
            kinds = {one: (tensor.shape, tensor.dtype) for one, tensor in here.items()}
            parts = ((one, tensor, [gathered(*part, held) for part in tensor.parts]) for one, tensor in here.items())
            arrays = ((one, floats_of(tensor, found)) for one, tensor, found in parts)
            if is_main_process() and failure is None:
                try:
                    write_safetensors(partial_of(folder) / file, kinds, arrays)
                except UserError as error:
                    failure = error
            # Every process takes part in gathering what is sharded over processes, also for one that cannot write.
            for _ in parts:
                pass

        def finish() -> None:
            if failure is not None:
                raise failure
            _write_small(folder, config, list(shards), companions(config, theirs.files, texts))

        with on_main_process(doing(finish), does="write the folder"):
            pass
    return folder


@contextlib.contextmanager
def doing(write: Callable[[], None]) -> Iterator[None]:
    """A context that calls a function on entering, for `on_main_process`."""
    write()
    yield


def _write_small(folder: Path, config: Mapping[str, Any], shards: list[str], files: Mapping[str, str | bytes]) -> None:
    """Writes what stands beside the tensors, and gives the folder its name."""
    partial = partial_of(folder)
    try:
        if len(shards) > 1:
            headers = {file: read_header(partial / file) for file in shards}
            total = sum(tensor.num_bytes for header in headers.values() for tensor in header.values())
            names = {name: file for file, header in headers.items() for name in header}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
            write_json_atomic(partial / INDEX, index)
        write_files(partial, files)
        # Last: a folder with a config.json is whole.
        write_json_atomic(partial / "config.json", dict(config))
        name_folder(folder, last="config.json")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error.strerror or error})") from None


def _config(theirs: Mapping[str, Any], family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json: what the family says of the model, and what only the origin said."""
    written = {**family.to_published(settings), "model_type": family.name}
    if theirs.get("model_type") != family.name:
        return written
    model = family.from_published(written)
    if family.from_published(theirs) == model:
        # The same model: its own words stay, and the forms that it lacks are added.
        return {**written, **theirs}
    merged = {**theirs, **written}
    if len(written.get("id2label") or ()) == len(theirs.get("id2label") or ()):
        # The family numbers the labels; the origin names them.
        merged |= {key: theirs[key] for key in ("id2label", "label2id") if key in theirs}
    # Another form of a key that only the origin has (rope_scaling beside rope_parameters) may contradict ours.
    return merged if family.from_published(merged) == model else written


def _named_classes(config: dict[str, Any], classes: Sequence[str] | None) -> dict[str, Any]:
    """The config.json with the classes that the model was trained on, which need not be those of its origin."""
    labels = config.get("id2label")
    if classes is None or not isinstance(labels, Mapping) or len(labels) < len(classes):
        return config
    names = [*classes, *(f"LABEL_{number}" for number in range(len(classes), len(labels)))]
    said = {key: value for key, value in config.items() if key != "problem_type"}
    said["id2label"] = {str(number): name for number, name in enumerate(names)}
    return said | {"label2id": {name: number for number, name in enumerate(names)}}


def _num_bytes(text: str) -> int:
    try:
        size = int(float(text[:-2]) * _UNITS[text[-2:].upper()])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"max_shard_size={text!r} is not a size; write a number with KB, MB or GB, as in 5GB")
    return size


def companions(config: Mapping[str, Any], files: Mapping[str, str | bytes], texts: Texts) -> dict[str, str | bytes]:
    """Returns name -> contents of the small files of a folder: those of the origin, where `texts` says nothing else.

    `config` is the config.json, or the keys of it that say special tokens.
    """
    found = dict(files)
    if texts.tokenizer is not None:
        found["tokenizer.json"] = texts.tokenizer
    said: dict[str, Any] = dict(texts.tokens)
    if texts.template is not None:
        if TEMPLATE in files:
            found[TEMPLATE] = texts.template
        if TEMPLATE not in files or "chat_template" in _object(files, SETTINGS):
            said["chat_template"] = texts.template
    if said or (texts.tokenizer is not None and SETTINGS not in files):
        found[SETTINGS] = _text((_object(files, SETTINGS) or _OWN_SETTINGS) | said)
    if texts.tokens:
        # An older form of tokenizer_config.json, which would contradict it.
        found.pop("special_tokens_map.json", None)
    if GENERATION not in files:
        ids = (*_NO_IDS, "decoder_start_token_id")
        if known := {key: config[key] for key in ids if config.get(key) is not None}:
            found[GENERATION] = _text(known)
    elif texts.ids:
        known = {key: value for key, value in texts.ids.items() if value is not None}
        others = {key: value for key, value in _object(files, GENERATION).items() if key not in texts.ids}
        found[GENERATION] = _text(others | known)
    return found


def _object(files: Mapping[str, str | bytes], name: str) -> dict[str, Any]:
    return dict(json.loads(files.get(name, "{}")))


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Writes name -> contents into a folder."""
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def partial_of(folder: Path) -> Path:
    """Returns where a folder is written until it is whole: beside it, so that it is renamed in one move."""
    place = folder.resolve()
    return place.with_name(f".{place.name}.partial")


@contextlib.contextmanager
def partial_folder(folder: Path) -> Iterator[None]:
    """Makes the folder that is written into, and removes it where `name_folder` did not rename it.

    Raises:
        ConfigError: The folder that is asked for is not empty, or the file system refuses.
    """
    partial, problem = partial_of(folder), "exists and is not empty"
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        try:
            # What an export that was killed has left.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            problem = None
        except OSError as error:
            problem = f"cannot be made ({error.strerror or error})"
    if problem:
        raise ConfigError(f"{folder} {problem}; name a new folder")
    try:
        yield
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def name_folder(folder: Path, *, last: str) -> None:
    """Gives what was written beside a folder its name; `last` is the file that says that a folder is whole."""
    partial, place = partial_of(folder), folder.resolve()
    if place.exists():
        # An empty folder stays the one that it is (somebody may be in it).
        for file in sorted(partial.iterdir(), key=lambda file: file.name == last):
            file.replace(place / file.name)
    else:
        partial.rename(place)


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor to write: its shape, dtype, and the rows and positions that it is made of."""

    shape: Shape
    dtype: np.dtype
    parts: tuple[tuple[Entry | Constant, Position], ...]


def plan_tensors(rows: tuple[Row, ...], dtypes: Mapping[str, str]) -> dict[str, WrittenTensor]:
    """Returns name -> tensor to write, in the order of the layers; `dtypes` as those of `Origin`."""
    found: dict[str, WrittenTensor] = {}
    placed: list[tuple[Position, str]] = []
    for row in rows:
        if isinstance(row, Constant):
            placed.append(((), row.names))
            found[row.names] = WrittenTensor(row.shape, np.dtype(row.dtype), ((row, ()),))
        if not isinstance(row, Entry):
            continue
        for position in positions(row):
            name = names_of(row, position)[0]
            if name not in found:
                placed.append((position, name))
                usual = "float32" if row.path.rsplit("/", 1)[-1] in KEPT else dtypes[""]
                found[name] = WrittenTensor(row.transform.theirs, SAVED_DTYPES[dtypes.get(name, usual)], ())
            found[name] = replace(found[name], parts=(*found[name].parts, (row, position)))
    # Stable: within a layer, in the order of the rows.
    return {name: found[name] for _, name in sorted(placed, key=lambda one: one[0])}


def _check_held(tensors: Mapping[str, WrittenTensor], held: _Held) -> None:
    """Raises a ConfigError that names an array that is not the model's, or no floats where floats are written."""
    for tensor in tensors.values():
        for row in (row for row, _ in tensor.parts if isinstance(row, Entry)):
            array, tree = held[row.state].get(row.path), "model_state" if row.state else "params"
            if array is None or tuple(array.shape) != row.shape or is_kernel(array):
                found = None if array is None else f"{type(array).__name__}{list(array.shape)}"
                raise ConfigError(
                    f"{tree} holds {found} at {row.path}, where the model has floats{list(row.shape)}; give its "
                    f"{tree} (jt.merge_adapters makes floats of kernels)"
                )


def _in_files(tensors: Mapping[str, WrittenTensor], most: int) -> dict[str, list[str]]:
    """File name -> tensors; one file where they fit, else numbered shards of at most `most` bytes."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def gathered(row: Entry | Constant, position: Position, held: _Held) -> Any:
    """Returns what a tensor is made of, on the main process; None on the others, and for a constant."""
    if isinstance(row, Constant):
        return None
    array = held[row.state][row.path]
    if isinstance(array, StoredParameter):
        return array.read(position) if is_main_process() else None
    return on_main_host(array, position)


def floats_of(tensor: WrittenTensor, parts: Sequence[Any]) -> np.ndarray:
    """Returns a tensor that is written in floats; a ConfigError where a number is beyond the largest of its dtype."""
    out = np.empty(tensor.shape, tensor.dtype)
    for (row, _), part in zip(tensor.parts, parts, strict=True):
        if isinstance(row, Constant):
            out[...] = row.value
            continue
        with np.errstate(over="raise"):
            try:
                row.transform.write(out, part)
            except FloatingPointError:
                most = ml_dtypes.finfo(tensor.dtype).max
                raise ConfigError(
                    f"{row.path} holds numbers beyond {float(most):g}, the largest of {tensor.dtype}; write float32 "
                    "or bfloat16"
                ) from None
    return out


def on_main_host(array: Any, position: Position) -> np.ndarray | None:
    """Returns what stands at a position (layer, expert; (): all) of an array of NumPy or jax, sharded in any way.

    Every process calls it, in the same order where an array is sharded over processes; others than the main one get
    None.
    """
    main = is_main_process()
    if not isinstance(array, jax.Array):
        return np.asarray(array)[position] if main else None
    sharding = array.sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    # Waited for on every process, so that no more than one part is on the devices.
    part = jax.block_until_ready(_gather(whole)(array, *position))
    # Copied from the first device alone; the others' copies go with `part`.
    return np.asarray(part.addressable_data(0)) if main else None


@functools.lru_cache(maxsize=8)
def _gather(sharding: NamedSharding | None) -> Any:
    def pick(array: jax.Array, *position: jax.Array) -> jax.Array:
        for at in position:
            array = jax.lax.dynamic_index_in_dim(array, at, keepdims=False)
        return array

    return jax.jit(pick, out_shardings=sharding)
