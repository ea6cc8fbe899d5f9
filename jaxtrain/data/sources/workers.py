"""Encodes blocks of documents in this process, or in several, in the order of the blocks."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path

from jaxtrain.data.sources.blocks import Block, Encoded, encode_block
from jaxtrain.data.sources.shards import TOKENIZER
from jaxtrain.data.sources.texts import TextSource
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.runtime.devices import usable_cores

# Blocks that wait or are encoded, for each process: as few as keep all busy, because each holds 16 MiB of text.
_WAITING = 2

# What a process of the pool encodes with; set once in each.
_MINE: list[tuple[TextSource, Tokenizer]] = []


def encoded_blocks(
    blocks: Iterator[Block], config: TextSource, tokenizer: Tokenizer, *, first: int, workers: int, folder: Path
) -> Iterator[tuple[int, Encoded]]:
    """Encodes blocks.

    Args:
        blocks: All blocks of a source.
        config: The source.
        tokenizer: Makes the ids.
        first: Number of the first block that is encoded; those before it are passed over.
        workers: Processes; 1: this one.
        folder: Holds the tokenizer.json that processes read.

    Yields:
        The position of each block in the files, and its tokens.

    Raises:
        DataError: A record is bad, or a file damaged.
        OSError: A process of the pool was ended.
    """
    for _ in range(first):
        next(blocks, None)
    if workers == 1:
        for block in blocks:
            yield block.position, encode_block(block, config, tokenizer)
        return
    # Started afresh: a copy of a process with threads (jax, tokenizers) may hang.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(config, str(folder / TOKENIZER), max(1, usable_cores() // workers)),
    )
    waiting: deque[tuple[int, Future[Encoded]]] = deque()
    try:
        for block in blocks:
            waiting.append((block.position, pool.submit(_encode, block)))
            if len(waiting) >= _WAITING * workers:
                position, future = waiting.popleft()
                yield position, future.result()
        while waiting:
            position, future = waiting.popleft()
            yield position, future.result()
    except BrokenProcessPool:
        raise OSError(
            "a process that encodes was ended (was there too little memory?); run the same command again with fewer "
            "--workers, which goes on where this one was"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


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


def _encode(block: Block) -> Encoded:
    config, tokenizer = _MINE[0]
    return encode_block(block, config, tokenizer)
