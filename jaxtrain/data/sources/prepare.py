"""Writes token shards, on several processes, so that a run that was ended at any moment goes on where it was.

What is unfinished lies in `.NAME.partial` beside the folder: shards, tokenizer.json, and progress.json, which says how
many blocks are in them. A shard may hold more than that after a kill; what is too much is cut off.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.arguments import local_path
from jaxtrain.config.data import added_tokens
from jaxtrain.data.formats.opened import DataFile
from jaxtrain.data.remote import with_local_paths
from jaxtrain.data.skipped import NAMED, skipped_records
from jaxtrain.data.sources.blocks import BLOCK_BYTES, Encoded, blocks_of, source_files
from jaxtrain.data.sources.shards import METADATA, TOKENIZER, Shard, ShardMetadata
from jaxtrain.data.sources.texts import TextSource, documents_of
from jaxtrain.data.sources.workers import encoded_blocks
from jaxtrain.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from jaxtrain.data.tokens import token_dtype
from jaxtrain.errors import DataError, UserError
from jaxtrain.runtime.devices import usable_cores
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.terminal import print_remark

_PROGRESS = "progress.json"
# Of the blocks and of progress.json; what another version left unfinished is begun again.
_VERSION = 1
# More processes than this wait for the one that reads and decompresses.
_MOST_WORKERS = 32


@dataclass(frozen=True)
class Prepared:
    """How far the writing of shards is.

    Attributes:
        position: Bytes of the files that are in the shards.
        total: Bytes of all files; 0: not known.
        documents: Documents in the shards.
        tokens: Tokens in the shards.
    """

    position: int
    total: int
    documents: int
    tokens: int


def prepare_tokens(
    config: TextSource,
    output: Path,
    *,
    tokens_per_shard: int = 2**27,
    workers: int | None = 1,
    progress: Callable[[Prepared], None] | None = None,
) -> dict[str, Any]:
    """Encodes a text source into shards; the folder gets its name only when it is complete.

    A call that was ended (kill -9, Ctrl+C, a full disk, a file that could not be read) goes on where it was when it is
    made again. The shards are the same, bit for bit, whatever the number of processes and of such ends.

    Args:
        config: Which text, and its tokenizer.
        output: Folder to make.
        tokens_per_shard: Number of tokens in each file but the last.
        workers: Processes that encode; 1: this one; None: the cores of this process where there is enough text. More
            than one takes a program that Python can import again (`if __name__ == "__main__":` around the call).
        progress: Called after each block of about 16 MiB.

    Returns:
        The keys of `ShardMetadata` as JSON values, and under "output" the folder.

    Raises:
        DataError: The text cannot be read or is empty, the folder exists or is being written, or a number is below 1.
    """
    output = local_path(output, what="output", error=DataError).expanduser()
    if output.exists():
        raise DataError(f"output {output} exists; give another folder, or remove it")
    for name, value in (("tokens_per_shard", tokens_per_shard), ("workers", 1 if workers is None else workers)):
        if value < 1:
            raise DataError(f"{name} is {value}; give at least 1")
    config = with_local_paths(config)
    files = source_files(config)
    if workers is None:
        workers = min(usable_cores(), 1 + sum(file.state.num_bytes for file in files) // BLOCK_BYTES)
    partial = output.with_name(f".{output.name}.partial")
    with _own(partial, output):
        state = None
        try:
            identity = _identity(config, files, tokens_per_shard)
            state = _resumed(partial, identity)
            tokenizer = _tokenizer(config, partial, is_resumed=state is not None)
            state = state or _State(identity)
            write_json_atomic(partial / _PROGRESS, state.to_json())
            shards = _Shards(partial, tokenizer, tokens_per_shard, state)
            with contextlib.closing(shards):
                _write(config, files, tokenizer, state, shards, workers=workers, partial=partial, progress=progress)
            metadata = _metadata(partial, tokenizer, state)
            (partial / METADATA).write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")
            (partial / _PROGRESS).unlink()
            partial.rename(output)
        except UserError:
            if state is None or not state.tokens:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                # A disk or a store may have failed for a moment; of files that are mended since, it begins again.
                print_remark(
                    f"{state.documents:,} documents are encoded in {partial}; once the rest can be read, the same call "
                    "goes on from there; else remove the folder"
                )
            raise
    return {**metadata.model_dump(mode="json"), "output": str(output)}


def _write(
    config: TextSource,
    files: tuple[DataFile, ...],
    tokenizer: Tokenizer,
    state: "_State",
    shards: "_Shards",
    *,
    workers: int,
    partial: Path,
    progress: Callable[[Prepared], None] | None,
) -> None:
    """Encodes the blocks that are not in the shards."""
    total = sum(file.state.num_bytes for file in files)

    def report() -> None:
        if progress is not None:
            progress(Prepared(state.position, total, state.documents, state.tokens))

    report()
    blocks, workers = blocks_of(config, files), min(workers, _MOST_WORKERS)
    for position, block in encoded_blocks(
        blocks, config, tokenizer, first=state.blocks, workers=workers, folder=partial
    ):
        shards.append(block.tokens)
        state.add(position, block)
        shards.sync()
        write_json_atomic(partial / _PROGRESS, state.to_json())
        report()
    _check(config, state)
    shards.finish()


class _State:
    """What progress.json holds; it is written after each block."""

    def __init__(self, identity: dict[str, Any], saved: dict[str, Any] | None = None):
        saved = saved or {}
        self.identity = identity
        self.blocks: int = saved.get("blocks", 0)
        self.position: int = saved.get("position", 0)
        self.documents: int = saved.get("documents", 0)
        self.tokens: int = saved.get("tokens", 0)
        self.bad: int = saved.get("bad", 0)
        self.named: list[str] = saved.get("named", [])
        # Of the shards that are full.
        self.shards: list[dict[str, Any]] = saved.get("shards", [])

    def add(self, position: int, block: Encoded) -> None:
        self.blocks += 1
        self.position = position
        self.documents += block.num_documents
        self.tokens += len(block.tokens)
        self.bad += block.num_bad
        self.named = [*self.named, *block.named][:NAMED]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


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


def _identity(config: TextSource, files: tuple[DataFile, ...], tokens_per_shard: int) -> dict[str, Any]:
    """Returns what must be equal for an unfinished folder to be gone on with."""
    chosen = config.tokenizer
    file = Path(chosen.path).expanduser() if chosen.kind == "file" and chosen.path is not None else None
    return {
        "version": [_VERSION, BLOCK_BYTES],
        "config": config.model_dump(mode="json", exclude={"path", "cache", "sequence_length", "validation_fraction"}),
        "files": [[one.name, one.state.num_bytes, one.state.modified_ns] for one in files],
        "tokens_per_shard": tokens_per_shard,
        "tokenizer": hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else None,
    }


def _resumed(partial: Path, identity: dict[str, Any]) -> _State | None:
    """Returns how far an earlier call came; None: there was none, or none of this data, whose files are removed."""
    try:
        saved = json.loads((partial / _PROGRESS).read_text(encoding="utf-8"))
        # As JSON has it: tuples are lists there.
        is_same = saved["identity"] == json.loads(json.dumps(identity))
        state = _State(identity, saved)
        is_same = is_same and _are_there(partial, state)
    except (OSError, ValueError, KeyError, TypeError):
        is_same, state = False, None
    if is_same and state is not None:
        print_remark(f"going on with {partial}: {state.documents:,} documents, {state.tokens:,} tokens are there")
        return state
    if any(partial.iterdir()):
        print_remark(f"{partial} was left by another call (other text or settings); beginning again")
        for path in partial.iterdir():
            path.unlink()
    return None


def _are_there(partial: Path, state: _State) -> bool:
    """Returns whether the shards that progress.json speaks of have as many tokens, of 2 or 4 bytes."""
    for shard in state.shards:
        if (partial / shard["file"]).stat().st_size not in (2 * shard["num_tokens"], 4 * shard["num_tokens"]):
            return False
    rest = state.tokens - sum(shard["num_tokens"] for shard in state.shards)
    return rest == 0 or (partial / f"shard-{len(state.shards):05d}.bin").stat().st_size >= 2 * rest


def _tokenizer(config: TextSource, partial: Path, *, is_resumed: bool) -> Tokenizer:
    """Returns the tokenizer of an unfinished folder, which is trained or read and saved where there is none."""
    path = partial / TOKENIZER
    if not (is_resumed and path.is_file()):
        texts = documents_of(config).read()
        build_tokenizer(config.tokenizer, texts, special=added_tokens(config)).save(path)
    # Every process reads the same file.
    return load_tokenizer(path)


class _Shards:
    """Appends tokens to the files of a folder.

    Args:
        folder: The unfinished folder.
        tokenizer: Its ids decide the dtype.
        size: Tokens of each file but the last.
        state: How far an earlier call came; lists the full shards.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, size: int, state: _State):
        self._folder, self._size, self._state = folder, size, state
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._digest = hashlib.sha256()
        self._filled = state.tokens - sum(shard["num_tokens"] for shard in state.shards)
        self._file = None
        names = {shard["file"] for shard in state.shards}
        for path in folder.glob("shard-*.bin"):
            if path.name not in names and not (self._filled and path.name == self._name):
                path.unlink()
        if self._filled:
            self._go_on()

    @property
    def _name(self) -> str:
        return f"shard-{len(self._state.shards):05d}.bin"

    def _go_on(self) -> None:
        """Opens the shard that is not full, without what an earlier call wrote after its last block."""
        path = self._folder / self._name
        self._file = path.open("r+b")
        self._file.truncate(self._filled * self._dtype.itemsize)
        while part := self._file.read(2**24):
            self._digest.update(part)

    def append(self, tokens: np.ndarray) -> None:
        """Writes tokens after those that are there."""
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / self._name).open("wb")
            part = tokens[: self._size - self._filled]
            self._file.write(part.data)
            self._digest.update(part.data)
            self._filled += len(part)
            tokens = tokens[len(part) :]
            if self._filled == self._size:
                self.finish()

    def sync(self) -> None:
        """Brings what was written to the disk, before progress.json says that it is there."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file that is being written, where an error ended the writing."""
        if self._file is not None:
            self._file.close()

    def finish(self) -> None:
        """Ends the shard that is being written."""
        if self._file is None:
            return
        self.sync()
        self._file.close()
        shard = {"file": self._name, "num_tokens": self._filled, "sha256": self._digest.hexdigest()}
        self._state.shards.append(shard)
        self._file, self._filled, self._digest = None, 0, hashlib.sha256()


def _check(config: TextSource, state: _State) -> None:
    """Raises a DataError where too many records are bad, or there is no document; names the bad ones."""
    label = documents_of(config).label
    bad = getattr(config, "on_bad_record", "error")
    if bad == "skip":
        fraction = config.max_bad_fraction  # pyright: ignore[reportAttributeAccessIssue] it is there with on_bad_record
        skipped = skipped_records(label, on_bad_record=bad, max_bad_fraction=fraction)
        assert skipped is not None
        skipped.set(state.named, state.bad, of=state.documents + state.bad)
        skipped.tell()
    if not state.tokens:
        raise DataError(f"{label} holds no document; give a file with text")


def _metadata(partial: Path, tokenizer: Tokenizer, state: _State) -> ShardMetadata:
    return ShardMetadata(
        dtype="uint16" if token_dtype(tokenizer.vocab_size).itemsize == 2 else "uint32",
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        num_tokens=state.tokens,
        num_documents=state.documents,
        tokenizer_sha256=hashlib.sha256((partial / TOKENIZER).read_bytes()).hexdigest(),
        shards=tuple(Shard(**shard) for shard in state.shards),
    )
