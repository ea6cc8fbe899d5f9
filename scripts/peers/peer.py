"""The protocol of every peer of bench_peers.py: a first step, then blocks of steps that the driver asks for.

A peer is a process. It prints a line of JSON after its first step, one after each block of steps that a line on
standard input asks for (a number), and one with its peak memory at the end of its input. All peers start
from the same values and step on the same batches at the same learning rates, which `given.py` wrote to the folder that
PEER_GIVEN names.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

# The transformer of every peer: the model of configs/bench_cpu.yaml.
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 6, 384, 6, 256, 256, 16
LEARNING_RATE, WEIGHT_DECAY, CLIP, B1, B2, EPSILON = 1e-3, 0.1, 1.0, 0.9, 0.95, 1e-8
NORM_EPSILON = 1e-5


@cache
def folder() -> Path:
    """Return the folder of `given.py`."""
    return Path(os.environ["PEER_GIVEN"])


def values() -> dict[str, np.ndarray]:
    """Read the initial values: path of the parameter in jaxtrain -> array, kernels as [*inputs, *outputs]."""
    with np.load(folder() / "values.npz") as file:
        return dict(file)


@cache
def rates() -> np.ndarray:
    """Read the learning rate of each step, float32."""
    with np.load(folder() / "batches.npz") as file:
        return file["rates"]


def steps() -> Iterator[tuple[dict[str, np.ndarray], float]]:
    """Yield the batch of each step, by the paths of its entries, and its learning rate."""
    with np.load(folder() / "batches.npz") as file:
        columns = {name: file[name] for name in file.files if name != "rates"}
    for number, rate in enumerate(rates()):
        yield {name: column[number] for name, column in columns.items()}, float(rate)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the inputs and targets of each step, for peers that know the learning rates beforehand."""
    for batch, _ in steps():
        yield batch["inputs"], batch["targets"]


def serve(run: Callable[[int], float], **facts: object) -> None:
    """Answer the driver until its input ends.

    Args:
        run: number of steps -> the mean of their losses, after all of them are done.
        facts: further figures of the peer, such as its number of parameters and its versions.
    """
    loss = run(1)
    print(json.dumps({"ready": True, "loss": loss, **facts}), flush=True)
    for line in sys.stdin:
        began, worked = time.perf_counter(), time.process_time()
        loss = run(int(line))
        block = {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - worked}
        print(json.dumps(block | {"loss": loss}), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_memory_bytes": peak}), flush=True)
