"""The config.json of a published model, or what stands for it. No jax here, nor numpy: `jaxtrain config` reads it."""

from pathlib import Path
from typing import Any

from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.published.json_text import parse_json
from jaxtrain.published.quantization import without_quantization
from jaxtrain.published.torchvision import torchvision_config

_MOST_JSON_BYTES = 100_000_000


def is_published_folder(path: str | Path) -> bool:
    """Whether a path is a published folder by its config.json."""
    try:
        return "model_type" in parse_json((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def config_origin(path: Path) -> Path:
    """Returns the file that says what a published model is: config.json of a folder, or the GGUF file itself."""
    return path if path.suffix == ".gguf" else path / "config.json"


def tokenizer_origin(path: Path) -> Path | None:
    """Returns the file that holds the tokenizer of a published model, or None where there is none that is read."""
    file = path if path.suffix == ".gguf" else path / "tokenizer.json"
    return file if file.is_file() else None


def read_published_config(path: Path) -> dict[str, Any]:
    """Returns the object in the config.json of a folder, or what that of a GGUF file would be.

    Raises:
        ConfigError: There is none, or it is no JSON object, or names no model_type.
        CheckpointError: The GGUF file is damaged.
    """
    if path.suffix == ".gguf":
        from jaxtrain.published.gguf import read_gguf
        from jaxtrain.published.gguf_config import published_config

        return dict(published_config(read_gguf(path)))
    file = path / "config.json"
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; name one that holds config.json and model.safetensors")
    if not file.is_file():
        named = _torchvision(path)
        if named is not None:
            return named
        raise ConfigError(f"{path} holds no config.json; name a folder that holds config.json and model.safetensors")
    found = read_json(file, ConfigError)
    if "model_type" not in found:
        raise ConfigError(f"{file} names no model_type; it is not the config.json of a published model")
    return without_quantization(found, where=file)


def _torchvision(folder: Path) -> dict[str, Any] | None:
    """What the config.json of a ResNet with torchvision's names would be, which has none; None for another folder."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        return None
    with files[0].open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        text = opened.read(size) if size <= _MOST_JSON_BYTES else b""
    try:
        header = parse_json(text)
        shapes = {name: tuple(one["shape"]) for name, one in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # the reader of tensors says what is wrong with the file
    return torchvision_config(shapes)


def read_json(file: Path, error: type[ConfigError] | type[CheckpointError]) -> dict[str, Any]:
    """Returns the object in a JSON file of a published folder; anything else is raised as `error`."""
    try:
        if file.stat().st_size > _MOST_JSON_BYTES:
            raise error(f"{file} has more than {_MOST_JSON_BYTES} bytes, which no such file needs")
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise error(f"{file} cannot be read as JSON ({problem})") from None
    if not isinstance(found, dict):
        raise error(f"{file} holds no JSON object")
    return found
