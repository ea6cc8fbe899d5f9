"""A published folder: config.json, tensors in one safetensors file or in shards, tokenizer files. No jax here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.errors import CheckpointError
from jaxtrain.published.config_file import read_json, read_published_config
from jaxtrain.published.hub import fetch_weights
from jaxtrain.published.safetensors import StoredTensor, map_tensor, read_header
from jaxtrain.published.transforms import Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What a published folder holds beside config and tensors, and an exported one takes along.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt",
    "added_tokens.json", "preprocessor_config.json",
)  # fmt: skip
_PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")


class Source(Protocol):
    """What weights are read from: a folder, or a file that stands for one.

    Attributes:
        config: What the config.json says.
        tensors: Name -> shape and dtype of what `read` returns.
        files: Name -> text or bytes of the tokenizer's files and the like.
    """

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, tuple[Shape, np.dtype]]: ...

    @property
    def files(self) -> Mapping[str, str | bytes]: ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A tensor, or its part `index` (one slice of step 1 per dimension)."""
        ...


@dataclass(frozen=True)
class FolderSource:
    """A published folder, made by `open_folder`; its attributes are those of `Source`."""

    folder: Path
    config: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]

    @property
    def tensors(self) -> dict[str, tuple[Shape, np.dtype]]:
        """Name -> shape and dtype."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.stored.items()}

    @property
    def files(self) -> dict[str, bytes]:
        """Name -> bytes of the files beside config and tensors that are there."""
        return {name: (self.folder / name).read_bytes() for name in COMPANIONS if (self.folder / name).is_file()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Returns a tensor as a read-only view of the file; only what is touched is read."""
        array = map_tensor(self.stored[name])
        return array if index is None else array[index]


def open_folder(path: str | Path) -> FolderSource:
    """Opens a published folder; headers are read and checked, tensors are not.

    Raises:
        ConfigError: No such folder, or no config.json in it.
        CheckpointError: No safetensors files, a shard that is missing, or a file that is damaged.
    """
    folder = Path(path)
    config = read_published_config(folder)
    fetch_weights(folder)
    if (folder / INDEX).is_file():
        return FolderSource(folder, config, _sharded(folder))
    if (folder / SINGLE).is_file():
        return FolderSource(folder, config, read_header(folder / SINGLE))
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1:
        return FolderSource(folder, config, read_header(single[0]))
    if single:
        raise CheckpointError(f"{folder} holds {len(single)} safetensors files without {INDEX}; fetch that file too")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights as {pickles[0]}, a pickle, which can run code when read; convert it once with "
            "transformers: AutoModel.from_pretrained(folder).save_pretrained(other, safe_serialization=True)"
        )
    raise CheckpointError(f"{folder} holds no weights; it needs {SINGLE}, or shards with {INDEX}")


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all shards, as the index says."""
    index = read_json(folder / INDEX, CheckpointError)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map of tensor names to file names")
    headers: dict[str, dict[str, StoredTensor]] = {}
    found: dict[str, StoredTensor] = {}
    for name, file in names.items():
        if not name.isprintable():
            raise CheckpointError(f"{folder / INDEX} has the name {name!r}, which holds characters that are none")
        # The file is named by whoever published the index: it may not lead out of the folder.
        if file in ("", ".", "..") or any(mark in file for mark in ("/", "\\", "\0", ":")):
            raise CheckpointError(f"{folder / INDEX} names {file!r} for {name}; a shard must lie in the folder itself")
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX} names {file!r} for {name}, which is no safetensors file")
        if file not in headers:
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder} lacks {file}, which {INDEX} names; fetch the file")
            headers[file] = read_header(folder / file)
        if name not in headers[file]:
            raise CheckpointError(f"{folder / file} holds no {name}, although {INDEX} says so; fetch both again")
        found[name] = headers[file][name]
    for file, header in headers.items():
        for name in header:
            if names.get(name) != file:
                raise CheckpointError(
                    f"{folder / file} holds {name}, which {INDEX} does not place there; fetch both again"
                )
    return found
