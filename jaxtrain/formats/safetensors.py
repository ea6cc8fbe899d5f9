"""Published folders: safetensors files, read by memory mapping and written in one pass, and what lies beside them.
No jax here.

A file is eight bytes (the length of the header, little endian), the header (JSON: name -> dtype, shape and the offsets
of its bytes in what follows), and the bytes.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.errors import CheckpointError, reading_published
from jaxtrain.formats.chat_template import read_template
from jaxtrain.formats.hub import (
    INDEX,
    SINGLE,
    fetch_weights,
    read_json,
    read_published_config,
)
from jaxtrain.formats.rows import Kind, Shape

# Name in the header -> dtype.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (64, 32, 16, 8)},
    "BOOL": np.dtype("bool"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# What a published folder holds beside config and tensors, and an exported one takes along.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt",
    "added_tokens.json", "preprocessor_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: the file, its dtype and shape, and the offset of its first byte."""

    file: Path
    dtype: np.dtype
    shape: Shape
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Returns name -> tensor of a safetensors file; no tensor is read.

    Raises:
        CheckpointError: The file is missing, cut off or damaged, or has a dtype that is not known.
    """
    with reading_published(file):
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            # A header of thousands of tensors is far below a megabyte.
            if length > min(size - 8, 100_000_000):
                raise ValueError(f"its header claims {length} of {size} bytes")
            # Sizes and offsets are whole numbers, and 8.0 is refused.
            header = json.loads(stream.read(length), parse_float=int)
        found, at = {}, 0
        entries = [(entry["data_offsets"], name, entry) for name, entry in header.items() if name != "__metadata__"]
        for (begin, end), name, entry in sorted(entries, key=lambda one: one[:2]):
            one = StoredTensor(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + begin)
            if begin != at or end - begin != one.num_bytes or min(one.shape, default=0) < 0:
                raise ValueError(f"{name} {one.dtype}{list(one.shape)} does not match bytes {begin} to {end}")
            found[name], at = one, end
        if at != size - 8 - length:
            raise ValueError(f"its tensors end at byte {at + 8 + length} of {size}")
        return {name: found[name] for name in header if name in found}


def map_tensor(tensor: StoredTensor) -> np.ndarray:
    """Returns a read-only array over the bytes of the file; what is not touched is not read."""
    if not tensor.num_bytes:
        return np.zeros(tensor.shape, tensor.dtype)
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.start, (tensor.num_bytes,))
    return np.asarray(raw).view(tensor.dtype).reshape(tensor.shape)


def write_safetensors(file: Path, shapes: Mapping[str, Kind], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes a safetensors file, one tensor in memory at a time; it appears when it is whole.

    Args:
        file: The file to write.
        shapes: Name -> shape and dtype, in the order of the file.
        tensors: Name and array, in any order.

    Raises:
        CheckpointError: The file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for name, (shape, dtype) in shapes.items():
        starts[name], end = at, at + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Other readers map the file and want the tensors at multiples of 8.
    text += b" " * (-len(text) % 8)
    written = set()
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name, array in tensors:
                stream.seek(8 + len(text) + starts[name])
                stream.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data if array.size else b"")
                written.add(name)
            assert written == shapes.keys(), file
        partial.replace(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written ({error.strerror or error})") from None
    finally:
        partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class FolderSource:
    """A published folder, made by `open_folder`; a GGUF file that stands for one has the same attributes.

    Attributes:
        config: What the config.json says.
        stored: Name -> where the tensor lies.
    """

    folder: Path
    config: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]

    @property
    def tensors(self) -> dict[str, Kind]:
        """Name -> shape and dtype of what `read` returns."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.stored.items()}

    @property
    def files(self) -> dict[str, bytes]:
        """Name -> bytes of the files beside config and tensors that are there."""
        files = {name: (self.folder / name).read_bytes() for name in COMPANIONS if (self.folder / name).is_file()}
        if "chat_template.jinja" in files:
            files["chat_template.jinja"] = read_template(self.folder).encode()
        return files

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as a read-only view of the file."""
        return map_tensor(self.stored[name])


def open_folder(path: str | Path) -> FolderSource:
    """Opens a published folder; headers are read and checked, tensors are not.

    Raises:
        ConfigError: No such folder, or no config.json in it.
        CheckpointError: No safetensors files, a shard that is missing, or a file that is damaged.
    """
    folder = Path(path)
    config = read_published_config(folder)
    with reading_published(folder / INDEX):
        fetch_weights(folder)
        if (folder / INDEX).is_file():
            return FolderSource(folder, config, _sharded(folder))
    single = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if len(single) == 1:
        return FolderSource(folder, config, read_header(single[0]))
    pickle = next((file.name for file in sorted(folder.iterdir()) if file.suffix in (".bin", ".pth", ".pt")), None)
    said = f"{len(single)} safetensors files; it needs {SINGLE}, or shards with {INDEX}"
    if pickle and not single:
        said = f"its weights as {pickle}, a pickle, which can run code when read; convert it once with transformers: "
        said += "AutoModel.from_pretrained(folder).save_pretrained(other, safe_serialization=True)"
    raise CheckpointError(f"{folder} holds {said}")


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all shards, as the index says."""
    names = read_json(folder / INDEX).get("weight_map") or {}
    # Whoever published the index named the files: they may not lead out of the folder.
    files = [file for file in sorted(set(map(str, names.values()))) if Path(file).name == file]
    found = {name: (file, tensor) for file in files for name, tensor in read_header(folder / file).items()}
    if not names or {name: file for name, (file, _) in found.items()} != names:
        raise CheckpointError(f"{folder / INDEX} does not match the files; download all of them again")
    return {name: found[name][1] for name in names}
