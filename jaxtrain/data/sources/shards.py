"""Token shards on disk, which `jaxtrain data prepare` writes once and every later run maps into memory.

A folder holds shard-00000.bin, ... (token ids, little-endian uint16 or uint32, nothing else), metadata.json
(`ShardMetadata`) and tokenizer.json. What is unfinished lies in `.NAME.partial` beside it, with progress.json, which
says how many blocks of documents are in the shards: a call that was ended at any moment goes on where it was.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxtrain.config.arguments import local_path
from jaxtrain.config.base import Group
from jaxtrain.config.data import TokenData, added_tokens
from jaxtrain.data.batches import check_tokens
from jaxtrain.data.files import reading, require_file, require_folder, sampled_sha256, with_local_paths
from jaxtrain.data.sources.tokens import (
    Documents,
    TextSource,
    TokenSource,
    divided,
    documents_of,
    encode_stream,
    token_dtype,
)
from jaxtrain.data.tokenizer import build_tokenizer, chunks, load_tokenizer
from jaxtrain.errors import DataError
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.terminal import print_remark

METADATA = "metadata.json"
TOKENIZER = "tokenizer.json"
# Characters of a block, after which progress is noted: some seconds of encoding.
BLOCK_CHARACTERS = 2**24
_PROGRESS = "progress.json"


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
    segments, identity = [], []
    dtype = np.dtype(metadata.dtype).newbyteorder("<")
    for shard in metadata.shards:
        path = require_file(folder / shard.file, what="token shard")
        size, wanted = path.stat().st_size, shard.num_tokens * dtype.itemsize
        if size != wanted:
            raise DataError(f"token shard {path} has {size} bytes, {METADATA} says {wanted}; copy it again")
        segments.append(np.memmap(path, dtype=dtype, mode="r"))
        if metadata.vocab_size <= np.iinfo(dtype).max:
            check_tokens(segments[-1], metadata.vocab_size, str(path))
        identity.append([shard.file, size, shard.sha256, sampled_sha256(path)])
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None
    if tokenizer is not None:
        tokenizer.end_of_text = metadata.end_of_text
    return TokenSource(
        segments=tuple(segments),
        vocab_size=metadata.vocab_size,
        tokenizer=tokenizer,
        label=str(folder),
        num_documents=metadata.num_documents,
        identity={"kind": "tokens", "shards": identity, "tokenizer_sha256": metadata.tokenizer_sha256},
    )


@dataclass
class Prepared:
    """How far the writing of shards is, as progress.json holds it: full blocks of documents, and what they hold.

    `identity` must be equal for an unfinished folder to be gone on with; `shards` are those that are full.
    """

    identity: dict[str, Any]
    blocks: int = 0
    documents: int = 0
    tokens: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)

    @property
    def open_tokens(self) -> int:
        """Tokens in the shard that is not full."""
        return self.tokens - sum(shard["num_tokens"] for shard in self.shards)

    @property
    def open_shard(self) -> str:
        """Name of the shard that is not full."""
        return f"shard-{len(self.shards):05d}.bin"


def prepare_tokens(
    config: TextSource,
    output: Path,
    *,
    tokens_per_shard: int = 2**27,
    progress: Callable[[Prepared], None] | None = None,
) -> dict[str, Any]:
    """Encodes a text source into shards; the folder gets its name only when it is complete.

    A call that was ended (kill -9, Ctrl+C, a full disk, a file that could not be read) goes on where it was when it is
    made again. The shards are the same, bit for bit, whatever the number of such ends.

    Args:
        config: Which text, and its tokenizer, which encodes on all cores.
        output: Folder to make.
        tokens_per_shard: Number of tokens in each file but the last.
        progress: Called after each block of about 16 MiB.

    Returns:
        The keys of `ShardMetadata` as JSON values, and under "output" the folder.

    Raises:
        DataError: The text cannot be read or is empty, or the folder exists or is being written.
    """
    output = local_path(output, what="output", error=DataError).expanduser()
    if output.exists():
        raise DataError(f"output {output} exists; give another folder, or remove it")
    config = with_local_paths(config)
    documents = documents_of(config)
    partial = output.with_name(f".{output.name}.partial")
    with _own(partial, output):
        state = _resumed(partial, _identity(config, documents, tokens_per_shard))
        if not state.blocks:
            build_tokenizer(config.tokenizer, documents.read(), special=added_tokens(config)).save(partial / TOKENIZER)
        tokenizer = load_tokenizer(partial / TOKENIZER)
        dtype = token_dtype(tokenizer.vocab_size)
        blocks = itertools.islice(chunks(documents.read(), len, most=BLOCK_CHARACTERS), state.blocks, None)
        with contextlib.closing(_Shards(partial, dtype, tokens_per_shard, state)) as shards:
            for texts in blocks:
                encoded = encode_stream(divided(config, texts, tokenizer), tokenizer)
                shards.append([ids for chunk in encoded for ids in chunk])
                write_json_atomic(partial / _PROGRESS, asdict(state))
                if progress is not None:
                    progress(state)
            shards.finish()
        metadata = ShardMetadata(
            dtype="uint16" if dtype.itemsize == 2 else "uint32",
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            num_tokens=state.tokens,
            num_documents=state.documents,
            tokenizer_sha256=hashlib.sha256((partial / TOKENIZER).read_bytes()).hexdigest(),
            shards=tuple(Shard(**shard) for shard in state.shards),
        )
        (partial / METADATA).write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (partial / _PROGRESS).unlink()
        partial.rename(output)
    return {**metadata.model_dump(mode="json"), "output": str(output)}


@contextlib.contextmanager
def _own(partial: Path, output: Path) -> Iterator[None]:
    """Makes the unfinished folder, and keeps other processes out of it; the system frees it when this one ends."""
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"output {output} is being written by another process; wait, or give another") from None
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            partial.rmdir()  # where nothing was written


def _identity(config: TextSource, documents: Documents, tokens_per_shard: int) -> dict[str, Any]:
    path = config.tokenizer.path
    return {
        "config": config.model_dump(mode="json", exclude={"path", "cache", "sequence_length", "validation_fraction"}),
        "files": [list(file) for file in documents.files],
        "block_characters": BLOCK_CHARACTERS,
        "tokens_per_shard": tokens_per_shard,
        "tokenizer": None if path is None else hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest(),
    }


def _resumed(partial: Path, identity: dict[str, Any]) -> Prepared:
    """Returns how far an earlier call came; what is there of other data, or without its shards, is removed."""
    if (partial / _PROGRESS).is_file():
        state = Prepared(**json.loads((partial / _PROGRESS).read_text(encoding="utf-8")))
        names = [shard["file"] for shard in state.shards] + [state.open_shard] * bool(state.open_tokens)
        if state.identity == identity and all((partial / name).is_file() for name in names):
            print_remark(f"continuing {partial}: {state.documents:,} documents, {state.tokens:,} tokens are done")
            return state
    if any(partial.iterdir()):
        print_remark(f"{partial} was left by another call (other text or settings); starting over")
        for path in partial.iterdir():
            path.unlink()
    return Prepared(identity)


class _Shards:
    """Appends tokens of a dtype to the files of the unfinished folder, `size` to each but the last."""

    def __init__(self, folder: Path, dtype: np.dtype, size: int, state: Prepared):
        self._folder, self._dtype, self._size, self._state = folder, dtype, size, state
        self._digest = hashlib.sha256()
        self._file = None
        for path in folder.glob("shard-*.bin"):  # what an earlier call wrote after its last block
            if path.name > state.open_shard or (path.name == state.open_shard and not state.open_tokens):
                path.unlink()
        if state.open_tokens:
            self._file = (folder / state.open_shard).open("r+b")
            self._file.truncate(state.open_tokens * dtype.itemsize)
            self._digest.update(self._file.read())

    def append(self, documents: list[np.ndarray]) -> None:
        """Writes the tokens of a block after those that are there, and brings them to the disk."""
        tokens = np.concatenate([np.zeros(0, self._dtype), *documents]).astype(self._dtype, copy=False)
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / self._state.open_shard).open("wb")
            part = tokens[: self._size - self._state.open_tokens]
            self._file.write(part.data)
            self._digest.update(part.data)
            self._state.tokens += len(part)
            tokens = tokens[len(part) :]
            if self._state.open_tokens == self._size:
                self.finish()
        if self._file is not None:
            self._sync(self._file)
        self._state.blocks += 1
        self._state.documents += len(documents)

    def _sync(self, file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the file that is being written."""
        if self._file is not None:
            self._file.close()

    def finish(self) -> None:
        """Ends the shard that is being written."""
        if self._file is None:
            return
        self._sync(self._file)
        self._file.close()
        state = self._state
        shard = {"file": state.open_shard, "num_tokens": state.open_tokens, "sha256": self._digest.hexdigest()}
        state.shards.append(shard)
        self._file, self._digest = None, hashlib.sha256()
