"""Our parameters as a published folder: shards with an index, config.json, tokenizer files."""

import contextlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.errors import CheckpointError, ConfigError, UserError
from jaxtrain.interop.families.family import Family
from jaxtrain.interop.formats.hub import INDEX
from jaxtrain.interop.formats.safetensors import read_header, write_safetensors
from jaxtrain.interop.load import by_path
from jaxtrain.interop.settings import family_for
from jaxtrain.interop.tensors import (
    SAVED_DTYPES,
    assembled,
    check_held,
    gathered,
    in_files,
    kinds_of,
    packed_tensors,
    parameters_by_path,
    plan_tensors,
    quantization_of,
)
from jaxtrain.interop.weights import PublishedModel
from jaxtrain.runtime.distributed import is_main_process, on_main_process
from jaxtrain.runtime.files import write_json_atomic

TEMPLATE, SETTINGS, GENERATION = "chat_template.jinja", "tokenizer_config.json", "generation_config.json"
TEXT_FILES = (TEMPLATE, SETTINGS, "special_tokens_map.json", GENERATION)
"""What says how a model chats, and which tokens are special."""
# Of a tokenizer.json that no published model came with. The text of ids is what the tokenizer says, spaces included.
_OWN_SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# A file without these keys stands for ids of the family's published tokenizers, which are other tokens elsewhere.
_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Texts:
    """What a model was trained to read and write, as far as the published model that it came from does not say it.

    Attributes:
        template: Chat template in the language of jinja2; None: that of the origin, if any.
        tokens: Name of a special token (eos_token) -> its text.
        ids: Key of config.json and generation_config.json (eos_token_id) -> an id, a list of ids, or null.
    """

    template: str | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    ids: Mapping[str, int | list[int] | None] = field(default_factory=dict)


_TEXTS_OF_THE_ORIGIN = Texts()


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
    return {"": most} | {name: dtype for name, dtype in names.items() if dtype != most and dtype in SAVED_DTYPES}


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
    nf4_linears: Mapping[str, tuple[int, int]] | None = None,
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
        nf4_linears: `Model.linears`, whose kernels are written in nf4; None: all that is written is in floats.
        classes: Names of the first outputs, each row of one of them; None: those of the origin, where it has as many.

    Returns:
        The folder.

    Raises:
        ConfigError: The folder is not empty, no family can say the model, or an argument is out of range.
        CheckpointError: The folder cannot be written.
    """
    folder, theirs = Path(folder), origin or Origin()
    most = _num_bytes(max_shard_size)
    family = family_for(settings, model_type=theirs.config.get("model_type"))
    name = dtype or theirs.dtypes.get("", "float32")
    if name not in SAVED_DTYPES:
        raise ConfigError(f"dtype={name!r} cannot be written; use one of {', '.join(SAVED_DTYPES)}")
    # Only the main process looks: when another one comes here, it may have written the folder already.
    with on_main_process(partial_folder(folder), does="make the folder"):
        rows = family.tensors(settings)
        tensors = plan_tensors(rows, {**({} if dtype else theirs.dtypes), "": name})
        held = {False: parameters_by_path(params), True: by_path(model_state)}
        config = _named_classes(_config(theirs.config, family, settings), classes) | dict(torch_dtype=name, dtype=name)
        config = {**(_without_ids(settings) if origin is None else {}), **config, **texts.ids}
        if nf4_linears is not None:
            tensors = packed_tensors(tensors, held[False], nf4_linears, family.name)
            has_head = "vocab_size" in settings and settings.get("head") is None
            config["quantization_config"] = quantization_of(tensors, rows, dtype=name, has_head=has_head)
        check_held(tensors, held)
        shards, failure = in_files(tensors, most), None
        for file, names in shards.items():
            here = {one: tensors[one] for one in names}
            parts = gathered(here, held)
            if is_main_process() and failure is None:
                try:
                    write_safetensors(partial_of(folder) / file, kinds_of(here), assembled(parts, nf4_linears or {}))
                except UserError as error:
                    failure = error
            # Every process takes part in gathering what is sharded over processes, also for one that cannot write.
            for _ in parts:
                pass
        files = companions(config, theirs.files, tokenizer, texts)
        finished = _finished(folder, config, list(shards), files=files, failure=failure)
        with on_main_process(finished, does="write the folder"):
            pass
    return folder


@contextlib.contextmanager
def _finished(
    folder: Path,
    config: Mapping[str, Any],
    shards: list[str],
    *,
    files: Mapping[str, str | bytes],
    failure: UserError | None,
) -> Iterator[None]:
    """Writes what stands beside the tensors and gives the folder its name; or raises why tensors were not written."""
    if failure is not None:
        raise failure
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
    yield


def _config(theirs: Mapping[str, Any], family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json: what the family says of the model, and what only the origin said."""
    written = {**family.to_published(settings), "model_type": family.name}
    if theirs.get("model_type") != family.name:
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


def _num_bytes(text: str) -> int:
    try:
        size = int(float(text[:-2]) * _UNITS[text[-2:].upper()])
    except (ValueError, KeyError, TypeError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"max_shard_size={text!r} is no size; write a number with KB, MB or GB, as in 5GB")
    return size


def _without_ids(settings: Mapping[str, Any]) -> dict[str, None]:
    """Null for the special tokens of a model that came from no published one, and of which nothing is known."""
    writes_text = settings["kind"] == "encoder_decoder" or settings.get("causal", False)
    return dict(_NO_IDS) if writes_text and settings.get("head") is None else {}


def companions(
    config: Mapping[str, Any], files: Mapping[str, str | bytes], tokenizer: str | None, texts: Texts
) -> dict[str, str | bytes]:
    """Makes the small files of a folder.

    Args:
        config: The config.json, or the keys of it that say special tokens.
        files: Name -> contents of the origin's; they stay as they are where `texts` says nothing else.
        tokenizer: Text of a tokenizer.json, where the origin has none.
        texts: What takes the place of what the files say.

    Returns:
        Name -> contents.
    """
    found = dict(files)
    is_own = tokenizer is not None and "tokenizer.json" not in files
    if is_own:
        found["tokenizer.json"] = str(tokenizer)
    said: dict[str, Any] = dict(texts.tokens)
    if texts.template is not None:
        if TEMPLATE in files:
            found[TEMPLATE] = texts.template
        if TEMPLATE not in files or "chat_template" in _object(files, SETTINGS):
            said["chat_template"] = texts.template
    if said or (is_own and SETTINGS not in files):
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
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not empty; name a new folder")
    partial = partial_of(folder)
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


def name_folder(folder: Path, *, last: str) -> None:
    """Gives what was written beside a folder its name; `last` is the file that says that a folder is whole."""
    partial, place = partial_of(folder), folder.resolve()
    if place.exists():
        # An empty folder stays the one that it is (somebody may be in it).
        for file in sorted(partial.iterdir(), key=lambda file: file.name == last):
            file.replace(place / file.name)
    else:
        partial.rename(place)
