"""Token shards on disk, which `jaxtrain data prepare` writes once and every later run maps into memory.

A folder holds shard-00000.bin, ... (token ids, little-endian uint16 or uint32, nothing else), metadata.json
(`ShardMetadata`) and tokenizer.json.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from jaxtrain.config.base import Group
from jaxtrain.config.data import JsonlData, TextData, TokenData
from jaxtrain.config.local_path import local_path
from jaxtrain.config.special_tokens import added_tokens
from jaxtrain.data.documents import open_documents
from jaxtrain.data.files import file_state, require_file, require_folder
from jaxtrain.data.tokenizer import build_tokenizer, load_tokenizer, tokenizer_sha256
from jaxtrain.data.tokens import TokenSource, check_tokens, encode_stream, token_dtype
from jaxtrain.errors import DataError

METADATA = "metadata.json"
TOKENIZER = "tokenizer.json"

# Blocks of each shard that are hashed: enough to tell data sets apart without reading terabytes at every start.
_SAMPLED_BLOCKS = 16
_BLOCK_BYTES = 4096


class Shard(Group):
    """One file of tokens."""

    file: str
    """Name of the file in the folder."""
    num_tokens: int
    """Number of tokens in the file."""
    sha256: str
    """Hash of the file's content."""


class ShardMetadata(Group):
    """The content of metadata.json, which describes a folder of shards."""

    format_version: Literal[1] = 1
    """Version of this layout."""
    dtype: Literal["uint16", "uint32"]
    """Dtype of a token, little-endian."""
    vocab_size: int
    """All ids are below this."""
    end_of_text: int | None
    """Id that follows each document; null: a newline does."""
    num_tokens: int
    """Number of tokens in all shards."""
    num_documents: int
    """Number of documents in all shards."""
    tokenizer_sha256: str
    """Hash of the tokenizer that made the ids."""
    shards: tuple[Shard, ...]
    """The files, in the order of the stream."""


def prepare_tokens(config: TextData | JsonlData, output: Path, *, tokens_per_shard: int = 2**27) -> dict[str, Any]:
    """Encodes a text source into shards; the folder gets its name only when it is complete.

    Args:
        config: Which text, and its tokenizer.
        output: Folder to make.
        tokens_per_shard: Number of tokens in each file but the last.

    Returns:
        The keys of `ShardMetadata` as JSON values, and under "output" the folder.

    Raises:
        DataError: The text cannot be read or is empty, the folder exists, or `tokens_per_shard` is below 1.
    """
    output = local_path(output, what="output", error=DataError).expanduser()
    if output.exists():
        raise DataError(f"output {output} exists; give another folder, or remove it")
    if tokens_per_shard < 1:
        raise DataError(f"tokens_per_shard is {tokens_per_shard}; give at least 1")
    documents = open_documents(config)
    tokenizer = build_tokenizer(config.tokenizer, documents.read(), special=added_tokens(config))
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        counted = _Counted(encode_stream(documents.read(), tokenizer))
        shards = _write_shards(counted, partial, tokens_per_shard=tokens_per_shard)
        if documents.skipped is not None:
            documents.skipped.tell()
        if not shards:
            raise DataError(f"{documents.label} holds no document; give a file with text")
        tokenizer.save(partial / TOKENIZER)
        metadata = ShardMetadata(
            dtype="uint16" if token_dtype(tokenizer.vocab_size).itemsize == 2 else "uint32",
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            num_tokens=sum(shard.num_tokens for shard in shards),
            num_documents=counted.num_documents,
            tokenizer_sha256=tokenizer_sha256(tokenizer),
            shards=tuple(shards),
        )
        (partial / METADATA).write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {**metadata.model_dump(mode="json"), "output": str(output)}


class _Counted:
    """Joins the documents of each chunk into one array of tokens, and counts the documents."""

    def __init__(self, chunks: Iterable[list[np.ndarray]]):
        self._chunks = chunks
        self.num_documents = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        for chunk in self._chunks:
            self.num_documents += len(chunk)
            yield np.concatenate(chunk)


def _write_shards(arrays: Iterable[np.ndarray], folder: Path, *, tokens_per_shard: int) -> list[Shard]:
    shards: list[Shard] = []
    pending: list[np.ndarray] = []
    room = tokens_per_shard

    def flush() -> None:
        nonlocal room
        name = f"shard-{len(shards):05d}.bin"
        digest = hashlib.sha256()
        with (folder / name).open("wb") as file:
            for part in pending:
                file.write(part.data)
                digest.update(part.data)
            # On disk before the rename makes the folder visible, so that a loss of power leaves no incomplete shard.
            file.flush()
            os.fsync(file.fileno())
        shards.append(Shard(file=name, num_tokens=tokens_per_shard - room, sha256=digest.hexdigest()))
        pending.clear()
        room = tokens_per_shard

    for array in arrays:
        while len(array):
            pending.append(array[:room])
            array = array[len(pending[-1]) :]
            room -= len(pending[-1])
            if room == 0:
                flush()
    if pending:
        flush()
    return shards


def shard_source(config: TokenData) -> TokenSource:
    """Maps the shards of a folder into memory and checks every id.

    Args:
        config: Which folder.

    Raises:
        DataError: A file is missing, has another size than metadata.json says, or holds an id outside the vocabulary.
    """
    folder = require_folder(config.path, what="data.path")
    metadata = _read_metadata(folder)
    segments = []
    identity = []
    files = []
    dtype = np.dtype(metadata.dtype).newbyteorder("<")
    for shard in metadata.shards:
        path = require_file(folder / shard.file, what="token shard")
        files.append(file_state(path))
        size = files[-1].num_bytes
        if size != shard.num_tokens * dtype.itemsize:
            raise DataError(
                f"token shard {path} has {size} bytes, {METADATA} says {shard.num_tokens * dtype.itemsize}; "
                "copy it again, or write the folder again with: jaxtrain data prepare"
            )
        segment = np.memmap(path, dtype=dtype, mode="r")
        if metadata.vocab_size <= np.iinfo(dtype).max:
            check_tokens(segment, metadata.vocab_size, str(path))
        segments.append(segment)
        identity.append([shard.file, size, shard.sha256, _sampled_sha256(path, size)])
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None
    return TokenSource(
        segments=tuple(segments),
        vocab_size=metadata.vocab_size,
        tokenizer=tokenizer,
        label=str(folder),
        num_documents=metadata.num_documents,
        identity={"kind": "tokens", "shards": identity, "tokenizer_sha256": metadata.tokenizer_sha256},
        files=tuple(files),
    )


def _read_metadata(folder: Path) -> ShardMetadata:
    path = folder / METADATA
    if not path.exists():
        raise DataError(f"data.path {folder} has no {METADATA}; make the folder with: jaxtrain data prepare")
    try:
        metadata = ShardMetadata.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path} is not what jaxtrain data prepare writes: {where + ': ' if where else ''}{first['msg']}; "
            "write the folder again"
        ) from None
    if not metadata.shards:
        raise DataError(f"{path} lists no shards; write the folder again with: jaxtrain data prepare")
    return metadata


def _sampled_sha256(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset in np.linspace(0, max(0, size - _BLOCK_BYTES), _SAMPLED_BLOCKS).astype(int).tolist():
            file.seek(offset)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
