"""Log-probabilities of continuations, in batches of few shapes.

Shapes: R rows, L length, S scored tokens, D width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.schema import IGNORED
from jaxtrain.data.rows import ArrayRows
from jaxtrain.errors import DataError
from jaxtrain.inference.predict import Predictor
from jaxtrain.inference.prompts import decoder_of
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.ops.loss.cross_entropy import DeferredLogits, cross_entropy
from jaxtrain.parallel.division import batch_shards

# What a batch holds on one device, at most: rows, tokens, and bytes of float32 logits.
_MOST_ROWS = 64
_TOKENS = 8192
_LOGITS_BYTES = 2**30
# What rows and their scored tokens are padded to, so that few shapes are compiled for.
_LENGTHS = tuple(32 * 2**power for power in range(16))
_NUMS_SCORED = (8, 64, 512)

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
        decoder = decoder_of(sharded_model.model, has_encoder=False)
        self.max_length = decoder.max_length
        self.shards = batch_shards(layout.mesh.shape, layout.rules["batch"])
        self._nums_scored = {*_NUMS_SCORED, self.max_length}
        self._lengths = {length for length in _LENGTHS if length < self.max_length} | {self.max_length}
        if decoder.short_length is not None:
            # Padding may not make a text a long one, whose positions rotate by other frequencies.
            self._lengths.add(decoder.short_length)
        self._vocab_size = sharded_model.model.vocab_size or 1
        self._batch_size = batch_size
        self._predictor = Predictor(
            sharded_model,
            functools.partial(_score, sharded_model),
            batch_axes={},
        )

    def __call__(
        self,
        params: Params,
        model_state: ModelState,
        continuations: Sequence[Continuation],
    ) -> list[tuple[float, bool]]:
        """Score continuations; a context that is too long loses its beginning.

        Args:
            params: as the model stores them, on its mesh; also quantized.
            model_state: of the model.
            continuations: ids of contexts and continuations.

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
        # The longest first: what does not fit the memory fails at once.
        for shape, indices in sorted(self.by_shape(continuations).items(), reverse=True):
            members = [continuations[index] for index in indices]
            log_probabilities_R, is_greedy_R = self._predictor(
                params,
                model_state,
                _rows(members, *shape),
                batch_size=self._batch_size or self._most_rows(*shape),
            )
            for index, log_probability, is_greedy in zip(indices, log_probabilities_R, is_greedy_R, strict=True):
                scores[index] = (float(log_probability), bool(is_greedy))
        return scores

    def by_shape(self, continuations: Sequence[Continuation]) -> dict[tuple[int, int], list[int]]:
        """Sort continuations by what their rows are padded to: (length, scored tokens) -> their indices."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index, (context, continuation) in enumerate(continuations):
            # The last token is predicted, and never read.
            length = min(len(context) + len(continuation) - 1, self.max_length)
            padded_length = _padded(length, self._lengths)
            num_scored = _padded(len(continuation), self._nums_scored)
            by_shape.setdefault((padded_length, num_scored), []).append(index)
        return by_shape

    def _most_rows(self, length: int, num_scored: int) -> int:
        logits_bytes = 4 * num_scored * self._vocab_size
        rows_per_device = min(
            _MOST_ROWS,
            _TOKENS // length,
            _LOGITS_BYTES // logits_bytes,
        )
        return self.shards * max(1, rows_per_device)


def _rows(continuations: Sequence[Continuation], length: int, num_scored: int) -> ArrayRows:
    """Rows of tokens [R, L], of the position [R] that predicts the first scored token, and of targets [R, S]."""
    num_rows = len(continuations)
    tokens_RL = np.zeros((num_rows, length), np.int32)
    starts_R = np.zeros(num_rows, np.int32)
    targets_RS = np.full((num_rows, num_scored), IGNORED, np.int32)
    for row, (context, continuation) in enumerate(continuations):
        ids = [*context, *continuation][-(length + 1) : -1]
        tokens_RL[row, : len(ids)] = ids
        starts_R[row] = len(ids) - len(continuation)
        targets_RS[row, : len(continuation)] = continuation
    inputs = {
        "tokens": tokens_RL,
        "starts": starts_R,
        "targets": targets_RS,
    }
    return ArrayRows({"inputs": inputs})


def _score(
    sharded_model: ShardedModel,
    params: Params,
    model_state: ModelState,
    inputs: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the targets, float32 [R], and whether all of them are the most likely tokens, bool [R]."""
    targets_RS = inputs["targets"]
    positions_RS = inputs["starts"][:, None] + jnp.arange(targets_RS.shape[1])

    def scored(leaf_RLD: jax.Array) -> jax.Array:
        # A shorter continuation has no target at the last positions, which may not be there.
        return jnp.take_along_axis(leaf_RLD, positions_RS[..., None], axis=1, mode="clip")

    with sharded_model.context():
        outputs, _ = sharded_model.apply_deferred(params, model_state, inputs["tokens"], key=None, train=False)
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
        if isinstance(logits, DeferredLogits):
            logits_RSV = dataclasses.replace(logits, hidden=scored(logits.hidden)).logits()
        else:
            logits_RSV = scored(logits)
        log_probabilities_RS = -cross_entropy(logits_RSV, targets_RS)
        is_greedy_RS = jnp.argmax(logits_RSV, axis=-1) == targets_RS
        is_greedy_RS |= targets_RS == IGNORED
        return log_probabilities_RS.sum(axis=-1), is_greedy_RS.all(axis=-1)


def _padded(count: int, sizes: Collection[int]) -> int:
    """Return the smallest size that is at least `count`."""
    return min(size for size in sizes if size >= count)
