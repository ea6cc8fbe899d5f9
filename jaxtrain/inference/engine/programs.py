"""The programs of the engine and what they hand on: a token for every slot, a chunk of one prompt, a slot's counts.

Shapes: S slots, C tokens of a chunk, V vocabulary, K alternatives, R rows.
"""

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxtrain.errors import ConfigError
from jaxtrain.inference.decoding import cache_dtype_of
from jaxtrain.inference.engine.request import MOST_ALTERNATIVES
from jaxtrain.inference.sampling import RowSampling, Sampling, choose_rows, log_probabilities_of, row_sampling
from jaxtrain.layout.gather import hold_parameters
from jaxtrain.layout.rules import entry_degree
from jaxtrain.layout.sharding import Layout, logical_spec
from jaxtrain.models.model import NOWHERE, Decoder, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.ops.loss.cross_entropy import DeferredLogits
from jaxtrain.precision.policy import cast_floats
from jaxtrain.runtime.compiler import decoding_options

# Chunks of this many tokens or more are worth a second program for short prompts.
_LONG_CHUNK = 64


@dataclass(frozen=True)
class CacheLayout:
    """The dims and shardings of a cache, leaf for leaf.

    Attributes:
        slot_dims: which dim of each leaf is that of the slots.
        shardings: slots are sharded as a batch is, and heads over `tensor`, where they divide.
    """

    slot_dims: Any
    shardings: Any

    def take(self, cache: Any, slot: jax.Array) -> Any:
        """One slot's part of a cache, with a dim of 1."""
        return jax.tree.map(
            lambda leaf, dim: jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=dim), cache, self.slot_dims
        )

    def put(self, cache: Any, own: Any, slot: jax.Array) -> Any:
        """The cache with a slot's part put back; see `take`."""

        def put(leaf: jax.Array, part: jax.Array, dim: int) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, part, slot, axis=dim)

        return jax.tree.map(put, cache, own, self.slot_dims)


def cache_layout(decoder: Decoder, layout: Layout, *, slots: int, length: int, dtype: DTypeLike) -> CacheLayout:
    """Find the dims of a decoder's cache, and its shardings."""

    def shapes(slots: int, length: int) -> Any:
        return jax.eval_shape(lambda: decoder.init_cache(slots, length, dtype))

    def differs(first: Any, other: Any) -> int:
        return next((dim for dim, size in enumerate(first.shape) if size != other.shape[dim]), -1)

    cache = shapes(slots, length)
    # Shapes alone say which dim is which, so that a decoder may arrange its cache as it likes.
    slot_dims = jax.tree.map(differs, cache, shapes(slots + 1, length))
    length_dims = jax.tree.map(differs, cache, shapes(slots, length + 1))
    assert all(dim >= 0 for dim in jax.tree.leaves(slot_dims)), "every array of a cache has a row per text"

    def sharding(leaf: Any, slot_dim: int, length_dim: int) -> NamedSharding:
        names: list[str | None] = [None] * len(leaf.shape)
        names[slot_dim] = "batch"
        # The heads are the one dim between slots and positions, or the one after positions that directly follow slots.
        heads = slot_dim + 1 if length_dim == slot_dim + 2 else length_dim + 1
        if length_dim > slot_dim and heads < len(names):
            names[heads] = "activation_kv_heads"
        return NamedSharding(layout.mesh, _fitting(layout, leaf.shape, *names))

    return CacheLayout(slot_dims, jax.tree.map(sharding, cache, slot_dims, length_dims))


def _fitting(layout: Layout, shape: tuple[int, ...], *names: str | None) -> PartitionSpec:
    """The spec of logical axes, without those that a dim does not divide by."""
    entries = list(logical_spec(names, layout))
    entries += [None] * (len(shape) - len(entries))
    degrees = layout.mesh.shape
    return PartitionSpec(
        *(
            entry if size % entry_degree(entry, degrees) == 0 else None
            for entry, size in zip(entries, shape, strict=True)
        )
    )


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
    chosen_S = choose_rows(
        logits_S1V[:, 0],
        rows,
        positions_S + 1,
        prompt_counts_SV=state.prompt_counts_SV,
        output_counts_SV=state.output_counts_SV,
    )
    writes_S = (positions_S != NOWHERE).astype(jnp.int32)
    counts_SV = state.output_counts_SV.at[jnp.arange(len(tokens_S)), chosen_S].add(writes_S)
    return replace(state, cache=cache, output_counts_SV=counts_SV), _described(logits_S1V[:, 0], chosen_S, wants_top)


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
    params: Params, state: SlotState, chunk: Chunk, *, decoder: Decoder, layout: CacheLayout
) -> tuple[SlotState, Chosen]:
    """Read a chunk of a prompt into a slot; what follows it is [1], zeros where the prompt goes on."""
    slot, begin, count = chunk.slot, chunk.begin, chunk.count
    own, order_C = layout.take(state.cache, slot), jnp.arange(chunk.tokens_C.shape[0], dtype=jnp.int32)
    positions_1C = jnp.where(order_C < count, begin + order_C, NOWHERE)[None]
    # The vocabulary is a large part of what a small model computes for a chunk, and one token needs it.
    feed = decoder.decode if decoder.deferred is None else decoder.deferred
    outputs, own = feed(params, chunk.tokens_C[None], positions_1C, own)
    one = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=slot, slice_size=1)

    def following() -> Chosen:
        if isinstance(outputs, DeferredLogits):
            last_11D = jax.lax.dynamic_slice_in_dim(outputs.hidden, count - 1, 1, axis=1)
            last_1V = replace(outputs, hidden=last_11D).logits()[0].astype(jnp.float32)
        else:
            last_1V = jax.lax.dynamic_slice_in_dim(outputs[0], count - 1, 1)
        chosen_1 = choose_rows(
            last_1V,
            chunk.row,
            (begin + count)[None],
            prompt_counts_SV=one(state.prompt_counts_SV),
            output_counts_SV=one(state.output_counts_SV),
        )
        return _described(last_1V, chosen_1, chunk.wants_top)

    def nothing() -> Chosen:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(following))

    chosen = jax.lax.cond(chunk.is_last, following, nothing)
    counts_SV = state.output_counts_SV.at[slot, chosen.tokens[0]].add(chunk.is_last.astype(jnp.int32))
    cache = layout.put(state.cache, own, slot)
    return replace(state, cache=cache, output_counts_SV=counts_SV), chosen


def begin_counts(state: SlotState, slot: jax.Array, prompt_counts_V: jax.Array) -> SlotState:
    """Begin the counts of a request with penalties, int32 [V] of its prompt."""
    return replace(
        state,
        prompt_counts_SV=state.prompt_counts_SV.at[slot].set(prompt_counts_V),
        output_counts_SV=state.output_counts_SV.at[slot].set(0),
    )


def _described(logits_RV: jax.Array, tokens_R: jax.Array, wants_top: jax.Array) -> Chosen:
    """What is reported of a token in each row; sorting out the alternatives is left out where nobody asked."""
    number = min(MOST_ALTERNATIVES, logits_RV.shape[-1])

    def with_top() -> tuple[jax.Array, jax.Array, jax.Array]:
        return log_probabilities_of(logits_RV, tokens_R, number)

    def alone() -> tuple[jax.Array, jax.Array, jax.Array]:
        shape = (*tokens_R.shape, number)
        return log_probabilities_of(logits_RV, tokens_R, 0)[0], jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

    return Chosen(tokens_R, *jax.lax.cond(wants_top, with_top, alone))


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
        self._model, self.slots, self.chunk = sharded_model, slots, chunk
        self.keeps_positions = decoder.keeps_positions
        dtype = cache_dtype_of(cache_dtype, sharded_model.policy)
        self._layout = cache_layout(decoder, sharded_model.layout, slots=slots, length=length, dtype=dtype)
        # Once, and not in every step, which would read the parameters as they are stored.
        self.params = cast_floats(params, sharded_model.policy.compute_dtype)
        one_token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        with sharded_model.context():
            if sharded_model.layout.state_axes:
                # Nor gather what ZeRO 1 and 2 shard over `data`.
                self.params = jax.jit(hold_parameters)(self.params)
            one_cache = jax.eval_shape(lambda: decoder.init_cache(1, length, dtype))
            logits, _ = jax.eval_shape(decoder.decode, self.params, one_token, one_token, one_cache)
        self.vocab_size = logits.shape[-1]
        table = NamedSharding(
            sharded_model.mesh, _fitting(sharded_model.layout, (slots, self.vocab_size), "batch", None)
        )
        self._placed = SlotState(self._layout.shardings, table, table)

        def begin() -> SlotState:
            counts = jnp.zeros((slots, self.vocab_size), jnp.int32)
            cache = decoder.init_cache(slots, length, dtype)
            return SlotState(cache, counts, counts)

        with sharded_model.context():
            try:
                self._state = jax.block_until_ready(jax.jit(begin, out_shardings=self._placed)())
            except jax.errors.JaxRuntimeError as error:
                size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(begin)))
                raise ConfigError(
                    f"the devices have no room for the cache: {slots} slots of {length} positions take "
                    f"{size / 2**30:.1f} GiB; use fewer slots, a smaller length or cache_dtype='int8'"
                ) from error
        self._compile(decoder)

    def update(self, params: Params) -> None:
        """Take a copy of other parameters, which the compiled programs run with from then on.

        Raises:
            ConfigError: they are not those of this model.
        """
        if jax.tree.map(np.shape, params) != jax.tree.map(np.shape, self.params):
            raise ConfigError(
                "these parameters have other paths or shapes than those that the engine was started with; pass the "
                "params of a state of the same model"
            )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.params)
        params = cast_floats(params, self._model.policy.compute_dtype)
        self.params = jax.device_put(params, shardings, may_alias=False)

    def _compile(self, decoder: Decoder) -> None:
        """Compile every program for what it is given: traced one after the other, compiled at the same time."""
        mesh = self._model.mesh
        replicated, placed = NamedSharding(mesh, PartitionSpec()), self._placed
        pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="jaxtrain compile")

        def compiled(function: Any, before: tuple[Any, ...], given: Any, outputs: Any, **options: Any) -> Future[Any]:
            given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), given)
            jitted = jax.jit(function, donate_argnums=len(before) - 1, out_shardings=outputs, **options)
            return pool.submit(jitted.lower(*before, *given).compile)

        options = {**decoding_options(mesh.devices.flat[0])} or None
        # A short prompt does not pay for a whole chunk.
        widths = {self.chunk, self.chunk // 4} if self.chunk >= _LONG_CHUNK else {self.chunk}
        read = functools.partial(prefill_chunk, decoder=decoder, layout=self._layout)
        with self._model.context(), pool:
            fed, one = (self.params, self._state), (self._state,)
            decode = compiled(
                functools.partial(decode_slots, decoder=decoder),
                fed,
                self._nothing_to_decode(),
                (placed, replicated),
                compiler_options=options,
            )
            prefills = {}
            for width in sorted(widths):
                prefills[width] = compiled(read, fed, (_nothing_to_read(width),), (placed, replicated))
            counts = compiled(begin_counts, one, (np.int32(0), np.zeros(self.vocab_size, np.int32)), placed)
        self._decode, self._begin_counts = decode.result(), counts.result()
        self._prefill = {width: program.result() for width, program in prefills.items()}

    def _nothing_to_decode(self) -> tuple[Any, ...]:
        """What `decode` is given where no slot has a text."""
        zeros_S = np.zeros(self.slots, np.int32)
        return zeros_S, zeros_S + np.int32(NOWHERE), _greedy(self.slots), np.bool_(False)

    def decode(self, tokens_S: np.ndarray, positions_S: np.ndarray, rows: RowSampling, *, wants_top: bool) -> Chosen:
        """Run `decode_slots`, and wait for what it chose."""
        given = (tokens_S, positions_S, rows, np.bool_(wants_top))
        self._state, chosen = self._decode(self.params, self._state, *given)
        return jax.device_get(chosen)

    def prefill(self, chunk: Chunk) -> Chosen:
        """Run `prefill_chunk` with at most C tokens, not padded; what it gives is on the device still."""
        count = len(chunk.tokens_C)
        width = next(width for width in self._prefill if width >= count)
        padded = replace(chunk, tokens_C=np.pad(chunk.tokens_C, (0, width - count)))
        self._state, chosen = self._prefill[width](self.params, self._state, padded)
        return chosen

    def begin_counts(self, slot: int, prompt_counts_V: np.ndarray) -> None:
        """Run `begin_counts`."""
        self._state = self._begin_counts(self._state, np.int32(slot), prompt_counts_V)

    def warm(self) -> None:
        """Run every program once, so that no request pays for what a first run sets up.

        What that writes is overwritten before any text sees it.
        """
        *given, _ = self._nothing_to_decode()
        self.decode(*given, wants_top=False)
        for width in self._prefill:
            jax.block_until_ready(self.prefill(_nothing_to_read(width)))
        self.begin_counts(0, np.zeros(self.vocab_size, np.int32))


def _nothing_to_read(width: int) -> Chunk:
    zero, no = np.int32(0), np.bool_(False)
    return Chunk(zero, np.zeros(width, np.int32), zero, np.int32(width), no, _greedy(1), no)


def _greedy(rows: int) -> RowSampling:
    return row_sampling([Sampling(temperature=0)] * rows, [0] * rows)
