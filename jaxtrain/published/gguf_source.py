"""A GGUF file seen as a published folder: config.json, tensors by their published names, tokenizer. No jax here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import CheckpointError
from jaxtrain.published.gguf import GgufFile, read_gguf, read_tensor
from jaxtrain.published.gguf_config import published_config, rotary_heads
from jaxtrain.published.gguf_names import Stored, published_names
from jaxtrain.published.gguf_tokenizer import tokenizer_files


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file in the place of a published folder; made by `open_gguf`.

    Attributes:
        file: The file.
        config: What its config.json would hold.
        stored: Published name -> how the tensor is stored.
        tensors: Published name -> shape and dtype of what `read` returns; quantized tensors are float32.
    """

    file: GgufFile
    config: Mapping[str, Any]
    stored: Mapping[str, Stored]
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]]

    @property
    def files(self) -> dict[str, str]:
        """The other files of a published folder that the file stands for: name -> text.

        Raises:
            CheckpointError: The tokenizer is of a kind that is not read.
        """
        return tokenizer_files(self.file.path, self.file.metadata)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Returns a part of a tensor; only the blocks that hold it are read.

        Args:
            name: Published name.
            index: One slice of step 1 per dimension; None: the whole tensor.
        """
        stored, (shape, _) = self.stored[name], self.tensors[name]
        index = tuple(slice(None) for _ in shape) if index is None else tuple(index)
        if stored.transposed:
            return read_tensor(self.file, stored.name, index[::-1]).T
        if stored.rotary_heads:
            rows = _paired_rows(shape[0], stored.rotary_heads)[index[0]]
            return read_tensor(self.file, stored.name, index, rows)
        if stored.expert is not None:
            return read_tensor(self.file, stored.name, (slice(stored.expert, stored.expert + 1), *index))[0]
        found = read_tensor(self.file, stored.name, index)
        return found - found.dtype.type(1) if stored.plus_one else found


def open_gguf(path: str | Path) -> GgufSource:
    """Opens a GGUF file as a published folder.

    Raises:
        CheckpointError: The file is missing, damaged, or holds a tensor that its architecture does not have.
        ConfigError: Its architecture, or a key or value of it, is not supported.
    """
    file = read_gguf(path)
    config = published_config(file)
    experts = config.get("num_local_experts", config.get("num_experts", 0))
    for name, tensor in file.tensors.items():
        if name.endswith("_exps.weight") and (len(tensor.shape) != 3 or tensor.shape[0] != experts):
            raise CheckpointError(f"{path}: {name} has the shape {list(tensor.shape)}, not {experts} experts first")
    stored, strange = published_names(
        config["model_type"], file.tensors, rotary_heads=rotary_heads(file, config), num_experts=experts
    )
    if strange:
        raise CheckpointError(
            f"{file.path} holds {len(strange)} tensors that {config['model_type']} does not have: "
            f"{', '.join(strange[:3])}"
        )
    tensors = {}
    for name, one in stored.items():
        tensor = file.tensors[one.name]
        shape = tensor.shape[::-1] if one.transposed else tensor.shape
        if one.rotary_heads and shape[0] % (2 * one.rotary_heads):
            raise CheckpointError(f"{file.path}: {one.name} has {shape[0]} rows, not pairs of {one.rotary_heads} heads")
        tensors[name] = (shape if one.expert is None else shape[1:], tensor.kind.dtype)
    return GgufSource(file, config, stored, tensors)


def _paired_rows(count: int, heads: int) -> np.ndarray:
    """Returns where each row of a projection is stored: row i of half s of a head is row 2 i + s of it, int [count]."""
    return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
