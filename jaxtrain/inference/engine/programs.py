"""The programs of the engine and what they hand on: a token for every slot, a chunk of one prompt, a slot's counts.

Shapes: S slots, C tokens of a chunk, V vocabulary, K alternatives, R rows.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.inference.engine.request import MOST_ALTERNATIVES
from jaxtrain.inference.sampling import RowSampling, Sampling, choose_rows, log_probabilities_of, row_sampling
from jaxtrain.layout.gather import hold_parameters
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.model import NOWHERE, Decoder, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.ops.loss.cross_entropy import DeferredLogits
from jaxtrain.precision.policy import cast_floats
from jaxtrain.runtime.compiler import decoding_options

# Chunks of this many tokens or more are worth a second program for short prompts.
_LONG_CHUNK = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """What the device holds of the slots; every program takes it over and gives it back.

    Attributes:
        cache: keys and values, as the decoder makes it.
        prompt_counts_SV: how often each token is in the prompt of a request with penalties, int32.
        output_counts_SV: how often each was emitted, int32; meaningless for a request without penalties.
    """

    cache: Any
    prompt_counts_SV: Any
    output_counts_SV: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """Tokens with what is reported of them; on the host these are NumPy arrays.

    Attributes:
        tokens: ids, int32 [...].
        log_probabilities: float32 [...].
        top_ids: of the likeliest tokens, int32 [..., K]; zeros where nobody asked.
        top_log_probabilities: theirs, float32 [..., K].
    """

    tokens: Any
    log_probabilities: Any
    top_ids: Any
    top_log_probabilities: Any


def decode_slots(
    params: Params,
    state: SlotState,
    tokens_S: jax.Array,
    positions_S: jax.Array,
    rows: RowSampling,
    wants_top: jax.Array,
    *,
    decoder: Decoder,
) -> tuple[SlotState, Chosen]:
    """Feed every slot its last token, and choose what follows: [S].

    A slot without a text that goes on is fed too, at the position `NOWHERE`, which is not written. `wants_top`, bool
    [], says whether anybody asked for alternatives.
    """
    logits_S1V, cache = decoder.decode(params, tokens_S[:, None], positions_S[:, None], state.cache)
    logits_SV = logits_S1V[:, 0]
    chosen_S = choose_rows(
        logits_SV,
        rows,
        positions_S + 1,
        prompt_counts_SV=state.prompt_counts_SV,
        output_counts_SV=state.output_counts_SV,
    )
    writes_S = (positions_S != NOWHERE).astype(jnp.int32)
    counts_SV = state.output_counts_SV.at[jnp.arange(len(tokens_S)), chosen_S].add(writes_S)
    return replace(state, cache=cache, output_counts_SV=counts_SV), _described(logits_SV, chosen_S, wants_top)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """Tokens of a prompt that are read into a slot at a time, numbers of NumPy.

    Attributes:
        slot: whose prompt it is, int32 [].
        tokens_C: ids, int32, padded on the right.
        begin: position of the first, int32 [].
        count: of them without the padding, int32 [].
        is_last: whether the prompt ends with them, bool [].
        row: how the token that follows is chosen, arrays [1].
        wants_top: whether alternatives are asked for, bool [].
    """

    slot: Any
    tokens_C: Any
    begin: Any
    count: Any
    is_last: Any
    row: RowSampling
    wants_top: Any


def prefill_chunk(
    params: Params, state: SlotState, chunk: Chunk, *, decoder: Decoder, slot_dims: Any
) -> tuple[SlotState, Chosen]:
    """Read a chunk of a prompt into a slot; what follows it is [1], zeros where the prompt goes on.

    `slot_dims` are those of `slot_dims_of`.
    """
    order_C = jnp.arange(chunk.tokens_C.shape[0], dtype=jnp.int32)
    positions_C = jnp.where(order_C < chunk.count, chunk.begin + order_C, NOWHERE)

    def part_of(array: jax.Array, dim: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, chunk.slot, 1, axis=dim)

    def with_part(array: jax.Array, part: jax.Array, dim: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(array, part, chunk.slot, axis=dim)

    # The vocabulary is a large part of what a small model computes for a chunk, and one token needs it.
    feed = decoder.deferred or decoder.decode
    part = jax.tree.map(part_of, state.cache, slot_dims)
    outputs, part = feed(params, chunk.tokens_C[None], positions_C[None], part)

    def next_token() -> Chosen:
        if isinstance(outputs, DeferredLogits):
            last_11D = jax.lax.dynamic_slice_in_dim(outputs.hidden, chunk.count - 1, 1, axis=1)
            last_1V = replace(outputs, hidden=last_11D).logits()[0].astype(jnp.float32)
        else:
            last_1V = jax.lax.dynamic_slice_in_dim(outputs[0], chunk.count - 1, 1)
        chosen_1 = choose_rows(
            last_1V,
            chunk.row,
            (chunk.begin + chunk.count)[None],
            prompt_counts_SV=part_of(state.prompt_counts_SV, 0),
            output_counts_SV=part_of(state.output_counts_SV, 0),
        )
        return _described(last_1V, chosen_1, chunk.wants_top)

    def nothing() -> Chosen:
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(next_token))

    chosen = jax.lax.cond(chunk.is_last, next_token, nothing)
    counts_SV = state.output_counts_SV.at[chunk.slot, chosen.tokens[0]].add(chunk.is_last.astype(jnp.int32))
    cache = jax.tree.map(with_part, state.cache, part, slot_dims)
    return replace(state, cache=cache, output_counts_SV=counts_SV), chosen


def slot_dims_of(decoder: Decoder) -> Any:
    """Find the dim of the slots in each array of a cache; a decoder may arrange its cache as it likes."""

    def shapes(slots: int) -> Any:
        return jax.eval_shape(lambda: decoder.init_cache(slots, 2, jnp.float32))

    def differing_dim(array: Any, larger: Any) -> int:
        return next(dim for dim, size in enumerate(array.shape) if size != larger.shape[dim])

    return jax.tree.map(differing_dim, shapes(1), shapes(2))


def begin_counts(state: SlotState, slot: jax.Array, prompt_counts_V: jax.Array) -> SlotState:
    """Begin the counts of a request with penalties, int32 [V] of its prompt."""
    return replace(
        state,
        prompt_counts_SV=state.prompt_counts_SV.at[slot].set(prompt_counts_V),
        output_counts_SV=state.output_counts_SV.at[slot].set(0),
    )


def _described(logits_RV: jax.Array, tokens_R: jax.Array, wants_top: jax.Array) -> Chosen:
    """Add what is reported of a token in each row; sorting out the alternatives is left out where nobody asked."""
    number = min(MOST_ALTERNATIVES, logits_RV.shape[-1])

    def with_top() -> Chosen:
        return Chosen(tokens_R, *log_probabilities_of(logits_RV, tokens_R, number))

    def without_top() -> Chosen:
        log_probabilities_R, _, _ = log_probabilities_of(logits_RV, tokens_R, 0)
        shape = (len(tokens_R), number)
        return Chosen(tokens_R, log_probabilities_R, jnp.zeros(shape, jnp.int32), jnp.zeros(shape))

    return jax.lax.cond(wants_top, with_top, without_top)


class Programs:
    """The compiled programs with the state that they hand on.

    Args:
        sharded_model: has a decoder without an encoder.
        params: of the model, on its mesh; also quantized.
        slots, length, chunk, cache_dtype: as of `Engine`.
    """

    def __init__(
        self,
        sharded_model: ShardedModel,
        params: Params,
        *,
        slots: int,
        length: int,
        chunk: int,
        cache_dtype: str | None,
    ):
        decoder = sharded_model.model.decoder
        assert decoder is not None
        self._model = sharded_model
        self.slots = slots
        self.chunk = chunk
        self.vocab_size = sharded_model.model.vocab_size or 0
        self.keeps_positions = decoder.keeps_positions
        dtype = jnp.dtype(cache_dtype or sharded_model.policy.compute_dtype)
        # Once, and not in every step, which would read the parameters as they are stored.
        self.params = cast_floats(params, sharded_model.policy.compute_dtype)
        if sharded_model.layout.state_axes:
            # Nor gather what ZeRO 1 and 2 shard over `data`.
            with sharded_model.context():
                self.params = jax.jit(hold_parameters)(self.params)

        def begin() -> SlotState:
            counts_SV = constrain(jnp.zeros((slots, self.vocab_size), jnp.int32), "batch", None)
            return SlotState(decoder.init_cache(slots, length, dtype), counts_SV, counts_SV)

        try:
            with sharded_model.context(), jax.default_device(sharded_model.mesh.devices.flat[0]):
                state = jax.block_until_ready(jax.jit(begin)())
        except jax.errors.JaxRuntimeError as error:
            arrays = jax.tree.leaves(jax.eval_shape(begin))
            size = sum(array.size * array.dtype.itemsize for array in arrays)
            raise ConfigError(
                f"the devices have no room for the cache: {slots} slots of {length} positions take "
                f"{size / 2**30:.1f} GiB; use fewer slots, a smaller length or cache_dtype='int8'"
            ) from error
        placed = jax.tree.map(lambda leaf: leaf.sharding, state)
        replicated = NamedSharding(sharded_model.mesh, PartitionSpec())
        # Bound to the mesh from the first call on: a later call with arrays that are would compile again.
        self._state = jax.device_put(state, placed)

        def bound(leaf: Any) -> jax.Array:
            is_bound = isinstance(leaf, jax.Array) and leaf.committed
            return leaf if is_bound else jax.device_put(leaf, replicated)

        self.params = jax.tree.map(bound, self.params)
        self._decode = jax.jit(
            functools.partial(decode_slots, decoder=decoder),
            donate_argnames="state",
            out_shardings=(placed, replicated),
            compiler_options=decoding_options(sharded_model.mesh.devices.flat[0]) or None,
        )
        self._prefill = jax.jit(
            functools.partial(prefill_chunk, decoder=decoder, slot_dims=slot_dims_of(decoder)),
            donate_argnames="state",
            out_shardings=(placed, replicated),
        )
        self._begin_counts = jax.jit(begin_counts, donate_argnames="state", out_shardings=placed)
        self._widths = [chunk]
        if chunk >= _LONG_CHUNK:
            # A short prompt does not pay for a whole chunk.
            self._widths.insert(0, chunk // 4)

    def update(self, params: Params) -> None:
        """Take a copy of other parameters, which the compiled programs run with from then on."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.params)
        params = cast_floats(params, self._model.policy.compute_dtype)
        self.params = jax.device_put(params, shardings, may_alias=False)

    def compile(self) -> None:
        """Compile every program by running it once.

        What that writes is overwritten before any text sees it.
        """
        idle_S = np.full(self.slots, NOWHERE, np.int32)
        self.decode(np.zeros(self.slots, np.int32), idle_S, greedy_rows(self.slots), wants_top=False)
        for width in self._widths:
            chunk = Chunk(
                slot=np.int32(0),
                tokens_C=np.zeros(width, np.int32),
                begin=np.int32(0),
                count=np.int32(width),
                is_last=np.bool_(False),
                row=greedy_rows(1),
                wants_top=np.bool_(False),
            )
            jax.block_until_ready(self.prefill(chunk))
        self.begin_counts(0, [0])

    def decode(self, tokens_S: np.ndarray, positions_S: np.ndarray, rows: RowSampling, *, wants_top: bool) -> Chosen:
        """Run `decode_slots`, and wait for what it chose."""
        with self._model.context():
            self._state, chosen = self._decode(
                self.params, self._state, tokens_S, positions_S, rows, np.bool_(wants_top)
            )
        return jax.device_get(chosen)

    def prefill(self, chunk: Chunk) -> Chosen:
        """Run `prefill_chunk` with at most C tokens, not padded; what it gives is on the device still."""
        width = next(width for width in self._widths if width >= chunk.count)
        padded = replace(chunk, tokens_C=np.pad(chunk.tokens_C, (0, width - chunk.count)))
        with self._model.context():
            self._state, chosen = self._prefill(self.params, self._state, padded)
        return chosen

    def begin_counts(self, slot: int, prompt: Sequence[int]) -> None:
        """Run `begin_counts` for the tokens of a prompt."""
        prompt_counts_V = np.bincount(prompt, minlength=self.vocab_size).astype(np.int32)
        self._state = self._begin_counts(self._state, np.int32(slot), prompt_counts_V)


def greedy_rows(count: int) -> RowSampling:
    """Return the settings of rows that take the likeliest token."""
    return row_sampling([Sampling(temperature=0)] * count, [0] * count)
