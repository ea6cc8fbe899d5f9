"""Writes token shards, on several processes, so that a run that was ended at any moment goes on where it was.

What is unfinished lies in `.NAME.partial` beside the folder: shards, tokenizer.json, and progress.json, which says how
many blocks of documents are in them. A shard may hold more than that after a kill; what is too much is cut off.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.arguments import local_path
from jaxtrain.config.data import added_tokens
from jaxtrain.data.remote import with_local_paths
from jaxtrain.data.sources.shards import METADATA, TOKENIZER, Shard, ShardMetadata
from jaxtrain.data.sources.texts import TextSource, documents_of
from jaxtrain.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from jaxtrain.data.tokens import Documents, chunks, divided, encode_stream, token_dtype
from jaxtrain.errors import DataError
from jaxtrain.runtime.devices import usable_cores
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.terminal import print_remark

# Characters of a block: enough to use a process for a second, and little enough that several wait in memory.
BLOCK_CHARACTERS = 2**24
_PROGRESS = "progress.json"
# Blocks that wait or are encoded, for each process: as few as keep all busy, because each holds 16 MiB of text.
_WAITING = 2
# More processes than this wait for the one that reads and decompresses.
_MOST_WORKERS = 32
# What a process of the pool encodes with; set once in each.
_MINE: list[tuple[TextSource, Tokenizer]] = []


@dataclass
class Prepared:
    """How far the writing of shards is, as progress.json holds it.

    Attributes:
        identity: What must be equal for an unfinished folder to be gone on with.
        blocks: Blocks of documents in the shards.
        documents: Documents in the shards.
        tokens: Tokens in the shards.
        shards: Those that are full: file, num_tokens, sha256.
    """

    identity: dict[str, Any]
    blocks: int = 0
    documents: int = 0
    tokens: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)


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
    if tokens_per_shard < 1 or (workers or 1) < 1:
        raise DataError(f"tokens_per_shard is {tokens_per_shard} and workers is {workers}; give at least 1")
    config = with_local_paths(config)
    documents = documents_of(config)
    if workers is None:
        workers = min(usable_cores(), 1 + sum(size for _, size in documents.files) // BLOCK_CHARACTERS)
    partial = output.with_name(f".{output.name}.partial")
    with _own(partial, output):
        identity = _identity(config, documents, tokens_per_shard)
        state = _resumed(partial, identity)
        if not (state.blocks and (partial / TOKENIZER).is_file()):
            build_tokenizer(config.tokenizer, documents.read(), special=added_tokens(config)).save(partial / TOKENIZER)
        tokenizer = load_tokenizer(partial / TOKENIZER)  # every process reads the same file
        shards = _Shards(partial, token_dtype(tokenizer.vocab_size), tokens_per_shard, state)
        with contextlib.closing(shards):
            for count, tokens in _encoded(config, documents, tokenizer, partial, state.blocks, workers):
                shards.append(tokens)
                shards.sync()
                state.blocks += 1
                state.documents += count
                state.tokens += len(tokens)
                write_json_atomic(partial / _PROGRESS, asdict(state))
                if progress is not None:
                    progress(state)
            shards.finish()
        if documents.skipped is not None:
            documents.skipped.tell()
        if not state.tokens:
            shutil.rmtree(partial)
            raise DataError(f"{documents.label} holds no document; give a file with text")
        metadata = _metadata(partial, tokenizer, state)
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
        names = [shard["file"] for shard in state.shards]
        if state.tokens > sum(shard["num_tokens"] for shard in state.shards):
            names.append(f"shard-{len(names):05d}.bin")
        if state.identity == identity and all((partial / name).is_file() for name in names):
            print_remark(f"going on with {partial}: {state.documents:,} documents, {state.tokens:,} tokens are there")
            return state
    if any(partial.iterdir()):
        print_remark(f"{partial} was left by another call (other text or settings); beginning again")
        for path in partial.iterdir():
            path.unlink()
    return Prepared(identity)


def _encoded(
    config: TextSource, documents: Documents, tokenizer: Tokenizer, folder: Path, first: int, workers: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the number of documents and the tokens of each block, in order, from block `first` on."""
    blocks = itertools.islice(chunks(documents.read(), len, most=BLOCK_CHARACTERS), first, None)
    if workers == 1:
        for texts in blocks:
            yield _encode_with(config, tokenizer, texts)
        return
    workers = min(workers, _MOST_WORKERS)
    # Started afresh: a copy of a process with threads (jax, tokenizers) may hang.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(config, str(folder / TOKENIZER), max(1, usable_cores() // workers)),
    )
    waiting: deque[Future[tuple[int, np.ndarray]]] = deque()
    try:
        for texts in blocks:
            waiting.append(pool.submit(_encode, texts))
            if len(waiting) >= _WAITING * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise OSError(
            "a process that encodes was ended (was there too little memory?); run the same command again with fewer "
            "--workers, which goes on where this one was"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_with(config: TextSource, tokenizer: Tokenizer, texts: list[str]) -> tuple[int, np.ndarray]:
    found = [ids for chunk in encode_stream(divided(config, texts, tokenizer), tokenizer) for ids in chunk]
    dtype = token_dtype(tokenizer.vocab_size)
    return len(found), np.concatenate(found).astype(dtype, copy=False) if found else np.zeros(0, dtype)


def _begin(config: TextSource, tokenizer: str, threads: int) -> None:
    """Prepares a process of the pool."""
    # Ctrl+C ends the process that hands out blocks, and this one with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Read when the tokenizer is first used: the processes share the cores.
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    _MINE[:] = [(config, load_tokenizer(tokenizer))]


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, which after kill -9 nobody else would tell it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _encode(texts: list[str]) -> tuple[int, np.ndarray]:
    return _encode_with(*_MINE[0], texts)


class _Shards:
    """Appends tokens of a dtype to the files of the unfinished folder, `size` to each but the last."""

    def __init__(self, folder: Path, dtype: np.dtype, size: int, state: Prepared):
        self._folder, self._size, self._state = folder, size, state
        self._digest = hashlib.sha256()
        self._filled = state.tokens - sum(shard["num_tokens"] for shard in state.shards)
        self._file = None
        if self._filled:
            # Without what an earlier call wrote after its last block.
            self._file = (folder / self._name).open("r+b")
            self._file.truncate(self._filled * dtype.itemsize)
            self._digest.update(self._file.read())
        for path in folder.glob("shard-*.bin"):
            if path.name > self._name or (path.name == self._name and not self._filled):
                path.unlink()

    @property
    def _name(self) -> str:
        return f"shard-{len(self._state.shards):05d}.bin"

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
        """Brings what was written to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file that is being written."""
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


def _metadata(partial: Path, tokenizer: Tokenizer, state: Prepared) -> ShardMetadata:
    return ShardMetadata(
        dtype="uint16" if token_dtype(tokenizer.vocab_size).itemsize == 2 else "uint32",
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        num_tokens=state.tokens,
        num_documents=state.documents,
        tokenizer_sha256=hashlib.sha256((partial / TOKENIZER).read_bytes()).hexdigest(),
        shards=tuple(Shard(**shard) for shard in state.shards),
    )
