"""Log-probabilities of given tokens, in batches of few shapes; logits are computed where tokens are scored alone.

Shapes: R rows, L length, S scored tokens, D embed, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.inference.harness.scored import Scored, ScoredBatch, batches_of
from jaxtrain.models.model import Decoder, ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.ops.loss.cross_entropy import DeferredLogits
from jaxtrain.parallel.division import batch_shards
from jaxtrain.train.batch import batch_shardings
from jaxtrain.train.checks import check_ids

# Bytes of the float32 logits that one device holds at a time.
_LOGITS_BYTES = 128 * 2**20


def scoring_decoder(sharded_model: ShardedModel) -> Decoder:
    """The decoder of a model that predicts the next token of a text.

    Raises:
        ConfigError: it predicts none, or reads its prompt with an encoder.
    """
    model = sharded_model.model
    if model.decoder is None:
        raise ConfigError(f"model {model.name} does not predict the next token of a text, so it has no log-likelihoods")
    if model.decoder.encode is not None:
        raise ConfigError(
            f"model {model.name} reads its prompt with an encoder; log-likelihoods of texts are computed for models "
            "that continue them (model.kind=transformer)"
        )
    return model.decoder


class LogLikelihood:
    """Scores tokens with a model.

    Args:
        sharded_model: predicts the next token.
        params: as the model stores them, on its mesh; also quantized.
        model_state: of the model.
        rows: rows of a batch, at most, rounded up to divide by the mesh; None: from their lengths.

    Raises:
        ConfigError: the model does not predict the next token of a text.
    """

    def __init__(
        self, sharded_model: ShardedModel, params: Params, model_state: ModelState, *, rows: int | None = None
    ) -> None:
        self._decoder = scoring_decoder(sharded_model)
        self._sharded_model, self._params, self._model_state, self._rows = sharded_model, params, model_state, rows
        mesh = sharded_model.mesh
        # Replicated, so that every process has all rows.
        self._jitted = jax.jit(self._score, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(
        self, rows: Sequence[Scored], *, report: Callable[[int], None] = lambda count: None
    ) -> list[tuple[float, bool]]:
        """Scores rows.

        Args:
            rows: what is scored.
            report: receives the number of rows that are done.

        Returns:
            For each row, the sum of the log-probabilities of its targets in nats, and whether each of them is the most
            likely token (the one of the lowest id among equals).

        Raises:
            DataError: an id that the model does not have.
        """
        layout = self._sharded_model.layout
        batches = batches_of(
            rows,
            max_length=self._decoder.max_length,
            short_length=self._decoder.short_length,
            shards=batch_shards(layout.mesh.shape, layout.rules["batch"]),
            largest=self._rows,
        )
        found: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        waiting: list[tuple[ScoredBatch, Any]] = []
        done = 0
        for batch in batches:
            waiting.append((batch, self._jitted(self._params, self._model_state, self._placed(rows, batch))))
            # The device computes the next batch while the host reads this one.
            if len(waiting) > 1:
                done += _read(found, rows, *waiting.pop(0))
                report(done)
        for batch, scores in waiting:
            done += _read(found, rows, batch, scores)
            report(done)
        return found

    def _placed(self, rows: Sequence[Scored], batch: ScoredBatch) -> dict[str, jax.Array]:
        """The arrays of a batch on the mesh: inputs [R, L], and positions and targets [R, S]."""
        inputs_RL = np.zeros((batch.size, batch.length), np.int32)
        positions_RS, targets_RS = (np.zeros((batch.size, batch.width), np.int32) for _ in range(2))
        for r, i in enumerate(batch.rows):
            length, count = len(rows[i].inputs), len(rows[i].targets)
            inputs_RL[r, :length] = rows[i].inputs
            positions_RS[r, :count] = np.arange(length - count, length)
            targets_RS[r, :count] = rows[i].targets
        arrays = {"inputs": inputs_RL, "positions": positions_RS, "targets": targets_RS}
        vocab_size = self._sharded_model.model.vocab_size
        if vocab_size is not None:
            limits = {"inputs": vocab_size, "targets": vocab_size}
            check_ids(arrays, limits=limits, where="a text of the task")
        shardings = batch_shardings(arrays, self._sharded_model.layout, {}, {})
        return {
            name: jax.make_array_from_callback(array.shape, shardings[name], array.__getitem__)
            for name, array in arrays.items()
        }

    def _score(
        self, params: Params, model_state: ModelState, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities float32 [R, S], and whether each target is the most likely token, bool [R, S]."""
        sharded_model, positions_RS = self._sharded_model, batch["positions"]
        with sharded_model.context():
            outputs, _ = sharded_model.apply_deferred(params, model_state, batch["inputs"], key=None, train=False)
            logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
            deferred = isinstance(logits, DeferredLogits)
            vocabulary = logits.vocabulary if deferred else logits.shape[-1]
            at_RSX = jnp.take_along_axis(logits.hidden if deferred else logits, positions_RS[..., None], axis=1)

            def scores(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                values, targets_RC = chunk
                logits_RCV = dataclasses.replace(logits, hidden=values).logits() if deferred else values
                logits_RCV = logits_RCV.astype(jnp.float32)
                target_RC = jnp.take_along_axis(logits_RCV, targets_RC[..., None], axis=-1)[..., 0]
                greedy_RC = jnp.argmax(logits_RCV, axis=-1) == targets_RC
                return target_RC - jax.nn.logsumexp(logits_RCV, axis=-1), greedy_RC

            rows, width = positions_RS.shape
            size = self._chunk(rows, width, vocabulary)
            if size == width:
                return scores((at_RSX, batch["targets"]))
            chunks = jax.tree.map(
                lambda leaf: jnp.moveaxis(leaf.reshape(rows, width // size, size, *leaf.shape[2:]), 1, 0),
                (at_RSX, batch["targets"]),
            )
            found = jax.lax.map(scores, chunks)
            return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(rows, width), found)

    def _chunk(self, rows: int, width: int, vocabulary: int) -> int:
        """Scored positions whose logits are in memory at a time: a power of two, as the width is."""
        layout = self._sharded_model.layout
        rows //= batch_shards(layout.mesh.shape, layout.rules["batch"])
        size = width
        while size > 1 and 4 * rows * size * vocabulary > _LOGITS_BYTES:
            size //= 2
        return size


def _read(
    found: list[tuple[float, bool]], rows: Sequence[Scored], batch: ScoredBatch, scores: tuple[jax.Array, jax.Array]
) -> int:
    """Writes the sums of a batch into what was found; returns the number of its rows."""
    log_RS, greedy_RS = jax.device_get(scores)
    for r, i in enumerate(batch.rows):
        count = len(rows[i].targets)
        found[i] = (float(log_RS[r, :count].sum(dtype=np.float64)), bool(greedy_RS[r, :count].all()))
    return len(batch.rows)
