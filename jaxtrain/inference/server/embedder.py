"""Embeddings of texts, by programs of few shapes that are compiled before the first request.

Shapes: B texts of a batch, L tokens, D model width.
"""

import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.inference.engine.compiles import CompileCounter
from jaxtrain.inference.server.served import Served
from jaxtrain.parallel.division import batch_shards

_SHORTEST = 16
_ROWS = 8


class Embedder:
    """Gives one vector per text.

    Args:
        served: a model that embeds.
        length: tokens of the longest text.

    Attributes:
        length: as given.
    """

    def __init__(self, served: Served, *, length: int):
        self.length = length
        self._served = served
        shards = batch_shards(served.sharded_model.mesh.shape)
        self._rows = -(-_ROWS // shards) * shards
        self._programs: dict[int, jax.stages.Compiled] = {}
        self._lock = threading.Lock()
        self._compiles = CompileCounter()

    @property
    def compiled(self) -> int:
        """Programs that were compiled after the start."""
        return self._compiles.count

    def start(self) -> None:
        """Compiles a program for each length that texts are filled up to, and runs each once."""
        model = self._served.sharded_model
        replicated = NamedSharding(model.mesh, PartitionSpec())

        def apply(params, model_state, tokens_BL, segments_BL):
            with model.context():
                inputs = {"tokens": tokens_BL, "segments": segments_BL}
                outputs, _ = model.apply(params, model_state, inputs, key=None, train=False)
            return outputs.astype(jnp.float32)

        jitted = jax.jit(apply, out_shardings=replicated)
        for size in _sizes(self.length):
            empty_BL = np.zeros((self._rows, size), np.int32)
            lowered = jitted.lower(self._served.params, self._served.model_state, empty_BL, empty_BL)
            self._programs[size] = lowered.compile()
            self([[0] * size])
        self._compiles.count = 0

    def __call__(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """The vectors of texts, float32 [texts, D].

        Args:
            texts: ids with what stands around a text, at most `length` each, at least one.
        """
        found_ND: list[np.ndarray | None] = [None] * len(texts)
        # Texts of similar lengths share a batch, whose rows are filled up to one length.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        with self._lock, self._compiles.on_this_thread():  # one batch at a time on the devices
            for start in range(0, len(order), self._rows):
                chosen = order[start : start + self._rows]
                longest = max(len(texts[index]) for index in chosen)
                size = next(size for size in self._programs if size >= longest)
                tokens_BL, segments_BL = (np.zeros((self._rows, size), np.int32) for _ in range(2))
                for row, index in enumerate(chosen):
                    tokens_BL[row, : len(texts[index])] = texts[index]
                    segments_BL[row, : len(texts[index])] = 1
                program, served = self._programs[size], self._served
                vectors_BD = np.asarray(program(served.params, served.model_state, tokens_BL, segments_BL))
                for row, index in enumerate(chosen):
                    found_ND[index] = vectors_BD[row]
        return np.stack([vector for vector in found_ND if vector is not None])


def _sizes(length: int) -> list[int]:
    """Powers of two from the shortest to the longest, which need not be one."""
    sizes = [_SHORTEST]
    while sizes[-1] < length:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], length] if sizes[-1] > length else sizes
