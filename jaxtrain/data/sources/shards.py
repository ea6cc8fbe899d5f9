"""Token shards on disk, which `jaxtrain data prepare` writes once and every later run maps into memory.

A folder holds shard-00000.bin, ... (token ids, little-endian uint16 or uint32, nothing else), metadata.json
(`ShardMetadata`) and tokenizer.json. What is unfinished lies in `.NAME.PROCESS.partial` beside it.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from jaxtrain.config.arguments import local_path
from jaxtrain.config.base import Group
from jaxtrain.config.data import TokenData, added_tokens
from jaxtrain.data.batches import check_tokens
from jaxtrain.data.files import (
    choose_files,
    file_digests,
    files_below,
    reading,
    require_file,
    require_folder,
    with_local_paths,
)
from jaxtrain.data.sources.tokens import (
    TextSource,
    TokenSource,
    divided,
    documents_of,
    encode_stream,
    token_dtype,
)
from jaxtrain.data.tokenizer import build_tokenizer, load_tokenizer
from jaxtrain.errors import DataError

METADATA = "metadata.json"
TOKENIZER = "tokenizer.json"


class Shard(Group):
    """One file of tokens, with the hash of its content."""

    file: str
    num_tokens: int
    sha256: str


class ShardMetadata(Group):
    """The content of metadata.json, which describes a folder of shards: all ids are below `vocab_size`."""

    format_version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    end_of_text: int | None
    """Id that follows each document; null: a newline does."""
    num_tokens: int
    num_documents: int
    tokenizer_sha256: str
    shards: tuple[Shard, ...]
    """The files, in the order of the stream."""


def shard_source(config: TokenData) -> TokenSource:
    """Maps the shards of a folder into memory and checks every id."""
    folder = require_folder(config.path, what="data.path")
    path = folder / METADATA
    if not path.exists():
        raise DataError(f"data.path {folder} has no {METADATA}; make the folder with: jaxtrain data prepare")
    with reading(path):
        metadata = ShardMetadata.model_validate_json(path.read_bytes())
    shards = [folder / shard.file for shard in metadata.shards]
    described = {path, folder / TOKENIZER, *shards}
    choose_files(folder, files_below(folder), lambda file: file in described, what="data.path")
    segments = []
    dtype = np.dtype(metadata.dtype).newbyteorder("<")
    for shard, path in zip(metadata.shards, shards, strict=True):
        require_file(path, what="token shard")
        size, wanted = path.stat().st_size, shard.num_tokens * dtype.itemsize
        if size != wanted:
            raise DataError(f"token shard {path} has {size} bytes, {METADATA} says {wanted}; copy it again")
        segments.append(np.memmap(path, dtype=dtype, mode="r"))
        if metadata.vocab_size <= np.iinfo(dtype).max:
            check_tokens(segments[-1], metadata.vocab_size, str(path))
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None
    if tokenizer is not None:
        tokenizer.end_of_text = metadata.end_of_text
    return TokenSource(
        segments=tuple(segments),
        vocab_size=metadata.vocab_size,
        tokenizer=tokenizer,
        label=str(folder),
        num_documents=metadata.num_documents,
        identity={
            "kind": "tokens",
            "shards": file_digests(shards),
            "tokenizer_sha256": metadata.tokenizer_sha256,
        },
    )


def prepare_tokens(
    config: TextSource,
    output: Path,
    *,
    tokens_per_shard: int = 2**27,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Encodes a text source into shards; the folder gets its name only when it is complete.

    Args:
        config: Which text, and its tokenizer, which encodes on all cores.
        output: Folder to make.
        tokens_per_shard: Number of tokens in each file but the last.
        progress: Called with the documents and tokens that are done, after every few MiB of text.

    Returns:
        The keys of `ShardMetadata` as JSON values, and under "output" the folder.

    Raises:
        DataError: The text cannot be read or is empty, or the folder exists.
    """
    output = local_path(output, what="output", error=DataError).expanduser()
    if output.exists():
        raise DataError(f"output {output} exists; give another folder, or remove it")
    config = with_local_paths(config)
    documents = documents_of(config)
    made = build_tokenizer(config.tokenizer, documents.read(), special=added_tokens(config))
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        made.save(partial / TOKENIZER)
        tokenizer = load_tokenizer(partial / TOKENIZER)
        dtype, num_documents = token_dtype(tokenizer.vocab_size), 0
        with contextlib.closing(_ShardWriter(partial, tokens_per_shard)) as writer:
            for encoded in encode_stream(divided(config, documents.read(), tokenizer), tokenizer):
                writer.append(np.concatenate(encoded))
                num_documents += len(encoded)
                if progress is not None:
                    progress(num_documents, writer.num_tokens)
            writer.finish()
        metadata = ShardMetadata(
            dtype="uint16" if dtype.itemsize == 2 else "uint32",
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            num_tokens=writer.num_tokens,
            num_documents=num_documents,
            tokenizer_sha256=hashlib.sha256((partial / TOKENIZER).read_bytes()).hexdigest(),
            shards=tuple(writer.shards),
        )
        (partial / METADATA).write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {**metadata.model_dump(mode="json"), "output": str(output)}


class _ShardWriter:
    """Writes a stream of tokens into files, `size` tokens to each but the last."""

    def __init__(self, folder: Path, size: int):
        self._folder, self._size = folder, size
        self._file: BinaryIO | None = None
        self.num_tokens = 0
        self.shards: list[Shard] = []

    def append(self, tokens: np.ndarray) -> None:
        """Writes tokens after those that are there."""
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / f"shard-{len(self.shards):05d}.bin").open("wb")
                self._digest, self._count = hashlib.sha256(), 0
            part = tokens[: self._size - self._count]
            self._file.write(part.data)
            self._digest.update(part.data)
            self._count += len(part)
            self.num_tokens += len(part)
            tokens = tokens[len(part) :]
            if self._count == self._size:
                self.finish()

    def finish(self) -> None:
        """Ends the file that is being written, if there is one, and brings it to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            name = Path(self._file.name).name
            self.shards.append(Shard(file=name, num_tokens=self._count, sha256=self._digest.hexdigest()))
            self.close()

    def close(self) -> None:
        """Closes the file that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None
