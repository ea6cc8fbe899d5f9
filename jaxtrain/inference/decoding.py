"""The decode loop: one program reads the prompts, one adds tokens until every row has ended; both are kept.

Shapes: B prompts, P longest prompt, T most new tokens, V vocabulary, N stop tokens.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.inference.prompts import decoder_of, padded_prompts
from jaxtrain.inference.sampling import RowSampling, Sampling, choose_rows, row_sampling
from jaxtrain.layout.gather import hold_parameters
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.precision.policy import cast_floats
from jaxtrain.runtime.compiler import decoding_options

# Stop tokens are filled up to a multiple of this, so that few counts are compiled for.
_STOPS = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowRules:
    """How rows are generated.

    Attributes:
        sampling: of each row.
        stop_N: int32, tokens that end a row; -1 fills it up.
    """

    sampling: RowSampling
    stop_N: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """A batch of texts between two tokens.

    Attributes:
        cache: keys and values.
        lengths_B: int32, tokens of each prompt.
        written: int32 [], new tokens of every row that has not ended.
        done_B: bool, whether a row has ended.
        counts_B, tokens_BT: as in `Generated`.
        prompt_counts_BV: int32, how often each prompt has each token.
        output_counts_BV: int32, how often each output has it.
    """

    cache: Any
    lengths_B: jax.Array
    written: jax.Array
    done_B: jax.Array
    counts_B: jax.Array
    tokens_BT: jax.Array
    prompt_counts_BV: jax.Array
    output_counts_BV: jax.Array


@dataclass(frozen=True)
class Writing:
    """How texts are written.

    Attributes:
        new_tokens: tokens to add to each prompt, at most; None: 200, or as many as the model has positions for.
        sampling: how tokens are chosen, of all prompts or one per prompt.
        seed: of the random choices; each row has its own. Or a list of one per prompt, which is then as alone.
        stop: texts that end a row; they are not part of its text.
        skip_special_tokens: whether special tokens that the model writes are left out of the text.
        piece: tokens of each row between two looks at them, for which the host waits; None: all.
        stop_tokens: ids that end a row beside the end of text; they are not part of its text.
        add_special_tokens: whether what the tokenizer's file puts before a text is put before each prompt.
        cache_dtype: of keys and values: float32, bfloat16, float16 or int8; None: the compute dtype.
        first_row: number of the first row among the rows with this seed, where they are several batches.
    """

    new_tokens: int | None
    sampling: Sampling | Sequence[Sampling]
    seed: int | Sequence[int] = 0
    stop: Sequence[str] = ()
    skip_special_tokens: bool = True
    piece: int | None = None
    stop_tokens: Collection[int] = ()
    add_special_tokens: bool = True
    cache_dtype: str | None = None
    first_row: int = 0


@dataclass(frozen=True)
class Generated:
    """What was generated so far, in arrays of NumPy.

    Attributes:
        tokens: int32 [B, T]; zeros follow the last token of a row.
        counts: int32 [B], tokens of each row; one that ended it counts.
    """

    tokens: np.ndarray
    counts: np.ndarray


# Of (params, prompts_BP, lengths_B, rules), and of (params, state, rules, ended_B, most tokens of a row).
Program = Callable[..., DecodeState]


def generate_ids(
    sharded_model: ShardedModel,
    params: Params,
    encoded: Sequence[np.ndarray],
    *,
    new_tokens: int,
    sampling: Sampling | Sequence[Sampling],
    seed: int | Sequence[int] = 0,
    cache_dtype: str | None = None,
) -> np.ndarray:
    """Continue prompts that are token ids already; the compiled programs are kept, as `generate_text` says.

    Args:
        sharded_model: has a decoder.
        params: on any mesh; also quantized.
        encoded: at least one prompt, int32 [length] each, none of them empty.
        new_tokens, sampling, seed, cache_dtype: as in `Writing`.

    Returns:
        int32 [B, T].

    Raises:
        ConfigError: prompt and continuation exceed the model's positions, or it does not generate text.
    """
    writing = Writing(new_tokens, sampling, seed, cache_dtype=cache_dtype)
    (generated,) = generation_pieces(sharded_model, params, encoded, writing)
    return generated.tokens


def generation_pieces(
    sharded_model: ShardedModel,
    params: Params,
    encoded: Sequence[np.ndarray],
    writing: Writing,
    ended_B: np.ndarray | None = None,
) -> Iterator[Generated]:
    """Give out what was generated after every piece; the last one has everything.

    Arguments and errors are those of `generate_ids`; `ended_B`, bool, are rows that the caller ends, which is read
    after each piece.
    """
    new_tokens = writing.new_tokens or 0
    prompts_BP, lengths_B = padded_prompts(sharded_model.model, encoded, new_tokens)
    rules = row_rules(writing, len(encoded))
    start, advance = _compiled(sharded_model, new_tokens, writing.cache_dtype)
    if ended_B is None:
        ended_B = np.zeros(len(encoded), bool)
    with sharded_model.context():
        # Once, so that no program casts them for each of its calls.
        params = cast_floats(params, sharded_model.policy.compute_dtype)
        state = start(params, prompts_BP, lengths_B, rules)
    written = 1
    while written < new_tokens and not np.all(state.done_B):
        if writing.piece is None:
            written = new_tokens
        else:
            yield _generated(state)
            written = min(written + writing.piece, new_tokens)
        with sharded_model.context():
            state = advance(params, state, rules, ended_B, np.int32(written))
    yield _generated(state)


def _generated(state: DecodeState) -> Generated:
    # Copies, because the next program writes into the memory of these.
    return Generated(np.array(state.tokens_BT), np.array(state.counts_B))


@functools.lru_cache
def _compiled(sharded_model: ShardedModel, new_tokens: int, cache_dtype: str | None) -> tuple[Program, Program]:
    """Return the two programs, which are compiled at their first call with each number and length of prompts."""
    start = jax.jit(start_function(sharded_model, new_tokens, cache_dtype))
    options = decoding_options(sharded_model.mesh.devices.flat[0]) or None
    advance = jax.jit(advance_function(sharded_model), donate_argnames="state", compiler_options=options)
    return start, advance


def start_function(sharded_model: ShardedModel, new_tokens: int, cache_dtype: str | None = None) -> Program:
    """Make the function that reads prompts, padded on the right, and chooses the first token of each row.

    The cache overwrites the padding's entries before anything can see them. All but the cache is replicated over the
    mesh, so that every process has it.
    """
    decoder = decoder_of(sharded_model.model)
    dtype = jnp.dtype(cache_dtype or sharded_model.policy.compute_dtype)

    def start(params: Params, prompts_BP: jax.Array, lengths_B: jax.Array, rules: RowRules) -> DecodeState:
        params = hold_parameters(params)
        batch = len(lengths_B)
        if decoder.encode is not None:
            cache = decoder.init_cache(batch, 1 + new_tokens, dtype)
            cache = decoder.encode(params, prompts_BP, lengths_B, cache)
            prompts_BP = jnp.full((batch, 1), decoder.start_token, prompts_BP.dtype)
            lengths_B = jnp.ones_like(lengths_B)
        else:
            cache = decoder.init_cache(batch, prompts_BP.shape[1] + new_tokens, dtype)
        order_P = jnp.arange(prompts_BP.shape[1])
        if decoder.prefill is not None:
            logits_BV, cache = decoder.prefill(params, prompts_BP, lengths_B, cache)
        else:
            logits_BPV, cache = decoder.decode(params, prompts_BP, jnp.broadcast_to(order_P, prompts_BP.shape), cache)
            logits_BV = jnp.take_along_axis(logits_BPV, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
        no_counts_BV = jnp.zeros(logits_BV.shape, jnp.int32)
        is_token_BP = (order_P < lengths_B[:, None]).astype(jnp.int32)
        state = DecodeState(
            cache=cache,
            lengths_B=lengths_B.astype(jnp.int32),
            written=jnp.int32(0),
            done_B=jnp.zeros(batch, bool),
            counts_B=jnp.zeros(batch, jnp.int32),
            tokens_BT=jnp.zeros((batch, new_tokens), jnp.int32),
            prompt_counts_BV=no_counts_BV.at[jnp.arange(batch)[:, None], prompts_BP].add(is_token_BP),
            output_counts_BV=no_counts_BV,
        )
        return _replicated(_with_token(state, logits_BV, rules), sharded_model.mesh)

    return start


def advance_function(sharded_model: ShardedModel) -> Program:
    """Make the function that adds tokens to texts until all rows have ended, or have as many as are asked for."""
    decoder = decoder_of(sharded_model.model)

    def advance(
        params: Params, state: DecodeState, rules: RowRules, ended_B: jax.Array, limit: jax.Array
    ) -> DecodeState:
        params = hold_parameters(params)

        def goes_on(state: DecodeState) -> jax.Array:
            return (state.written < limit) & ~jnp.all(state.done_B)

        def step(state: DecodeState) -> DecodeState:
            last_B1 = jax.lax.dynamic_slice_in_dim(state.tokens_BT, state.written - 1, 1, axis=1)
            positions_B1 = (state.lengths_B + state.written - 1)[:, None]
            logits_B1V, cache = decoder.decode(params, last_B1, positions_B1, state.cache)
            return _with_token(replace(state, cache=cache), logits_B1V[:, 0], rules)

        state = replace(state, done_B=state.done_B | ended_B)
        return _replicated(jax.lax.while_loop(goes_on, step, state), sharded_model.mesh)

    return advance


def row_rules(writing: Writing, batch: int) -> RowRules:
    """Return what the programs take of how rows are sampled and where they end, in arrays of NumPy."""
    samplings = writing.sampling
    if isinstance(samplings, Sampling):
        samplings = [samplings] * batch
    seeds = writing.seed
    rows = None
    if not isinstance(seeds, Sequence):
        seeds = [seeds] * batch
        rows = range(writing.first_row, writing.first_row + batch)
    stop_tokens = sorted(writing.stop_tokens)
    padding = -len(stop_tokens) % _STOPS if stop_tokens else _STOPS
    stop_N = np.array(stop_tokens + [-1] * padding, np.int32)
    return RowRules(row_sampling(samplings, seeds, rows), stop_N)


@jax.named_scope("choose")
def _with_token(state: DecodeState, logits_BV: jax.Array, rules: RowRules) -> DecodeState:
    """Add to each row the token that its logits give; rows that have ended get none."""
    chosen_B = choose_rows(
        logits_BV,
        rules.sampling,
        state.lengths_B + state.written,
        prompt_counts_SV=state.prompt_counts_BV,
        output_counts_SV=state.output_counts_BV,
    )
    tokens_B = jnp.where(state.done_B, 0, chosen_B)
    added_B = (~state.done_B).astype(jnp.int32)
    is_stop_B = (tokens_B[:, None] == rules.stop_N[None]).any(axis=-1)
    return replace(
        state,
        written=state.written + 1,
        done_B=state.done_B | is_stop_B,
        counts_B=state.counts_B + added_B,
        tokens_BT=jax.lax.dynamic_update_slice_in_dim(state.tokens_BT, tokens_B[:, None], state.written, axis=1),
        output_counts_BV=state.output_counts_BV.at[jnp.arange(len(tokens_B)), tokens_B].add(added_B),
    )


def _replicated(state: DecodeState, mesh: Mesh) -> DecodeState:
    """Replicate everything but the cache over the mesh."""
    replicated = NamedSharding(mesh, PartitionSpec())
    without_cache = jax.lax.with_sharding_constraint(replace(state, cache=None), replicated)
    return replace(without_cache, cache=state.cache)
