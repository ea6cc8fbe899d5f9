"""Log-probabilities of continuations, in batches of few shapes.

Shapes: R rows, L length, S scored tokens, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import DataError
from jaxtrain.inference.prompts import decoder_of
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.ops.loss.cross_entropy import DeferredLogits
from jaxtrain.parallel.division import batch_shards
from jaxtrain.train.batch import batch_shardings, check_ids

# What a batch holds on one device, at most: rows, tokens, and bytes of float32 logits.
_MOST_ROWS = 64
_TOKENS = 8192
_LOGITS_BYTES = 2**30
# Lengths are 32, 64, 128 and so on; numbers of scored tokens are 8, 64, 512 and so on.
_SHORTEST_ROW = 32
_FEWEST_SCORED = 8

# Ids of a context, at least one, and of the continuation that is scored after it.
Continuation = tuple[Sequence[int], Sequence[int]]


class LikelihoodScorer:
    """Scores continuations with a model; only the logits of scored tokens are computed.

    Args:
        sharded_model: predicts the next token.
        batch_size: most rows of a batch; None: by their length, up to 8,192 tokens per device.

    Attributes:
        max_length: positions of the model.
        shards: parts that the rows of a batch divide into.

    Raises:
        ConfigError: the model does not predict the next token of a text.
    """

    def __init__(self, sharded_model: ShardedModel, *, batch_size: int | None = None) -> None:
        layout = sharded_model.layout
        self._decoder = decoder_of(sharded_model.model, has_encoder=False)
        self.shards = batch_shards(layout.mesh.shape, layout.rules["batch"])
        self._sharded_model = sharded_model
        self._batch_size = batch_size
        # Replicated, so that every process has all rows.
        self._jitted = jax.jit(self._score, out_shardings=NamedSharding(layout.mesh, PartitionSpec()))
        self.max_length = self._decoder.max_length

    def __call__(
        self,
        params: Params,
        model_state: ModelState,
        continuations: Sequence[Continuation],
        *,
        report: Callable[[int], None] = lambda count: None,
    ) -> list[tuple[float, bool]]:
        """Score continuations; a context that is too long loses its beginning.

        Args:
            params: as the model stores them, on its mesh; also quantized.
            model_state: of the model.
            continuations: ids of contexts and continuations.
            report: receives the number of continuations that are done.

        Returns:
            For each, the log-probability of the continuation in nats, and whether greedy choice would give it.

        Raises:
            DataError: a continuation has no token, or more than the model has positions; or an id is not in the
                vocabulary.
        """
        for _, continuation in continuations:
            if not 1 <= len(continuation) <= self.max_length:
                raise DataError(
                    f"a continuation of {len(continuation)} tokens cannot be scored; it must have 1 to "
                    f"{self.max_length} (an empty one may need a space or a line end at its beginning)"
                )
        scores = [(0.0, False)] * len(continuations)
        done = 0
        for shape, indices in self.batches(continuations):
            batch = self._arrays([continuations[index] for index in indices], *shape)
            log_probabilities_RS, greedy_RS = jax.device_get(self._jitted(params, model_state, batch))
            for row, index in enumerate(indices):
                count = len(continuations[index][1])
                log_probability = log_probabilities_RS[row, :count].sum(dtype=np.float64)
                scores[index] = (float(log_probability), bool(greedy_RS[row, :count].all()))
            done += len(indices)
            report(done)
        return scores

    def batches(self, continuations: Sequence[Continuation]) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """Yield (length, scored tokens) of the arrays of a batch, and the indices of its rows; the longest first."""
        short_length = self._decoder.short_length
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index, (context, continuation) in enumerate(continuations):
            # The last token is predicted, and never read.
            length = min(len(context) + len(continuation) - 1, self.max_length)
            limit = self.max_length
            if short_length is not None and length <= short_length:
                # Padding may not make a text a long one, whose positions rotate by other frequencies.
                limit = short_length
            shape = (min(_padded(length, _SHORTEST_ROW), limit), _padded(len(continuation), _FEWEST_SCORED, factor=8))
            by_shape.setdefault(shape, []).append(index)
        vocab_size = self._sharded_model.model.vocab_size or 1
        for shape in sorted(by_shape, reverse=True):
            length, num_scored = shape
            rows_per_device = min(_MOST_ROWS, _TOKENS // length, _LOGITS_BYTES // (4 * num_scored * vocab_size))
            num_rows = self._batch_size or self.shards * max(1, rows_per_device)
            indices = by_shape[shape]
            for start in range(0, len(indices), num_rows):
                yield shape, indices[start : start + num_rows]

    def _arrays(self, continuations: Sequence[Continuation], length: int, num_scored: int) -> dict[str, jax.Array]:
        """The arrays of a batch on the mesh: inputs [R, L], and positions and targets [R, S]."""
        # A power of two per shard: the last batch of a shape, which may be small, has few sizes too.
        num_rows = self.shards * _padded(-(-len(continuations) // self.shards), 1)
        inputs_RL = np.zeros((num_rows, length), np.int32)
        positions_RS = np.zeros((num_rows, num_scored), np.int32)
        targets_RS = np.zeros((num_rows, num_scored), np.int32)
        for row, (context, continuation) in enumerate(continuations):
            ids = [*context, *continuation][-(length + 1) : -1]
            count = len(continuation)
            inputs_RL[row, : len(ids)] = ids
            positions_RS[row, :count] = np.arange(len(ids) - count, len(ids))
            targets_RS[row, :count] = continuation
        batch = {"inputs": inputs_RL, "positions": positions_RS, "targets": targets_RS}
        vocab_size = self._sharded_model.model.vocab_size
        if vocab_size is not None:
            check_ids(batch, limits={"inputs": vocab_size, "targets": vocab_size}, where="a text of the task")
        return jax.device_put(batch, batch_shardings(batch, self._sharded_model.layout, {}, {}))

    def _score(
        self, params: Params, model_state: ModelState, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities float32 [R, S], and whether each target is the most likely token, bool [R, S]."""

        def scored(leaf_RLX: jax.Array) -> jax.Array:
            return jnp.take_along_axis(leaf_RLX, batch["positions"][..., None], axis=1)

        with self._sharded_model.context():
            outputs, _ = self._sharded_model.apply_deferred(params, model_state, batch["inputs"], key=None, train=False)
            logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
            if isinstance(logits, DeferredLogits):
                logits_RSV = dataclasses.replace(logits, hidden=scored(logits.hidden)).logits()
            else:
                logits_RSV = scored(logits)
            logits_RSV = logits_RSV.astype(jnp.float32)
            target_RS = jnp.take_along_axis(logits_RSV, batch["targets"][..., None], axis=-1)[..., 0]
            greedy_RS = jnp.argmax(logits_RSV, axis=-1) == batch["targets"]
            return target_RS - jax.nn.logsumexp(logits_RSV, axis=-1), greedy_RS


def _padded(count: int, least: int, *, factor: int = 2) -> int:
    """Return the first of `least`, `factor` times as much, and so on that is at least `count`."""
    while least < count:
        least *= factor
    return least
