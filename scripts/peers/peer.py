"""The protocol of every peer of bench_peers.py: a first step, then blocks of steps that the driver asks for.

A peer is a process. It prints a line of JSON after its first step, one after each block of steps that a line on
standard input asks for (a number), and one with its peak memory at the end of its input.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

# The transformer of every peer: the model of configs/bench_cpu.yaml.
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 6, 384, 6, 256, 256, 16
LEARNING_RATE, WEIGHT_DECAY, CLIP, B1, B2, EPSILON = 1e-3, 0.1, 1.0, 0.9, 0.95, 1e-8
NORM_EPSILON = 1e-5
# The images of the ResNets, small enough for two cores.
IMAGES, IMAGE_SIZE, CLASSES, MOMENTUM, RATE = 8, 96, 1000, 0.9, 0.1
# A BERT of MiniLM's size that learns labels, and a T5-small; keys of our model groups.
BERT = {
    "vocab_size": 30522,
    "num_layers": 6,
    "embed_dim": 384,
    "num_heads": 12,
    "mlp_dim": 1536,
    "max_sequence_length": 512,
}
BERT_ROWS, BERT_TOKENS, LABELS = 16, 128, 2
T5 = {"vocab_size": 32128, "num_layers": 6, "embed_dim": 512, "num_heads": 8, "head_dim": 64, "mlp_dim": 2048}
T5_ROWS, T5_SOURCE, T5_TARGET = 8, 128, 64
RATE_PUBLISHED = 1e-4


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs and targets [16, 256] from a text in Python's standard library, as int32 bytes."""
    import pydoc_data.topics

    text = "".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    generator = np.random.default_rng(0)
    rows = (len(tokens) - 1) // LENGTH
    while True:
        starts = generator.integers(0, rows, BATCH)[:, None] * LENGTH + np.arange(LENGTH)
        yield tokens[starts], tokens[starts + 1]


def images() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield images [8, 96, 96, 3] of noise, float32, and labels [8], int32."""
    generator = np.random.default_rng(0)
    while True:
        inputs = generator.standard_normal((IMAGES, IMAGE_SIZE, IMAGE_SIZE, 3), np.float32)
        yield inputs, generator.integers(0, CLASSES, IMAGES).astype(np.int32)


def serve(run: Callable[[int], float], **facts: object) -> None:
    """Answer the driver until its input ends.

    Args:
        run: number of steps -> the last loss, after all of them are done.
        facts: further figures of the peer, such as its number of parameters and its versions.
    """
    loss = run(1)
    print(json.dumps({"ready": True, "loss": loss, **facts}), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        loss = run(int(line))
        print(json.dumps({"seconds": time.perf_counter() - began, "loss": loss}), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_memory_bytes": peak}), flush=True)
