"""Beam search: the most likely continuations that are found by following the best few beginnings at a time.

Shapes: B prompts, N beams of each, M = B N rows, K candidates of a prompt in a step, T most new tokens, V vocabulary.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.inference.decoding import cast_params, prompt_cache, read_prompts
from jaxtrain.inference.prompts import decoder_of, padded_prompts
from jaxtrain.layout.gather import hold_parameters
from jaxtrain.models.model import Decoder, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.precision.policy import cast_floats
from jaxtrain.runtime.compiler import decoding_options


@dataclass(frozen=True)
class Beams:
    """Continuations of each prompt, the best first, in arrays of NumPy.

    Attributes:
        tokens: int32 [B, N, T]; zeros follow the last token of each.
        counts: int32 [B, N], tokens of each; one that ended it counts.
        scores: float32 [B, N], sum of the log-probabilities over count ** length_penalty; -inf: there are fewer.
    """

    tokens: np.ndarray
    counts: np.ndarray
    scores: np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Pool:
    """Some continuations of each prompt: tokens int32 [B, N, T], counts int32 [B, N], scores float32 [B, N]."""

    tokens: jax.Array
    counts: jax.Array
    scores: jax.Array

    def best(self, count: int) -> tuple["_Pool", jax.Array]:
        """The best of each prompt, and which they are: int32 [B, count]."""
        scores, picked = jax.lax.top_k(self.scores, count)
        tokens = jnp.take_along_axis(self.tokens, picked[:, :, None], axis=1)
        return _Pool(tokens, jnp.take_along_axis(self.counts, picked, axis=1), scores), picked

    def joined(self, other: "_Pool") -> "_Pool":
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), self, other)


@dataclass(frozen=True)
class _Form:
    """What a search is compiled for."""

    beams: int
    new_tokens: int
    length_penalty: float
    stop_tokens: tuple[int, ...]


_searches: weakref.WeakKeyDictionary[ShardedModel, dict[_Form, Callable[..., _Pool]]] = weakref.WeakKeyDictionary()


def beam_search(
    sharded_model: ShardedModel,
    params: Params,
    encoded: Sequence[np.ndarray],
    *,
    beams: int,
    new_tokens: int,
    stop_tokens: Collection[int] = (),
    length_penalty: float = 1.0,
) -> Beams:
    """Find the most likely continuations of prompts; the compiled program is kept, as `generate_text` says.

    Every step extends the best N beginnings of each prompt by every token and keeps the best N again. One that ends is
    set aside with its score. The search ends when no beginning can reach a better score than those set aside.

    Args:
        sharded_model: has a decoder.
        params: on any mesh; also quantized.
        encoded: at least one prompt, int32 [length] each, none of them empty.
        beams: N; 1 follows the most likely token alone.
        new_tokens: T, tokens to add to each, at most.
        stop_tokens: ids that end a continuation.
        length_penalty: power of the length that scores are divided by; 0: the sum, which prefers short ones.

    Raises:
        ConfigError: prompt and continuation exceed the model's positions, it does not generate text, or a number is
            out of range.
    """
    if beams < 1 or new_tokens < 1 or not 0 <= length_penalty <= 10:
        raise ConfigError("a search takes 1 beam or more, 1 new token or more, and a length_penalty from 0 to 10")
    decoder = decoder_of(sharded_model.model)
    prompts_BP, lengths_B = padded_prompts(sharded_model.model, encoded, new_tokens)
    form = _Form(beams, new_tokens, float(length_penalty), tuple(sorted(stop_tokens)))
    searches = _searches.setdefault(sharded_model, {})
    if form not in searches:
        whole = NamedSharding(sharded_model.mesh, PartitionSpec())
        options = {**decoding_options(sharded_model.mesh.devices.flat[0])} or None
        search = _search_function(sharded_model, decoder, form)
        searches[form] = jax.jit(search, out_shardings=whole, compiler_options=options)
    with sharded_model.context():
        params = cast_params(sharded_model, params)
        found = searches[form](params, np.repeat(prompts_BP, beams, axis=0), np.repeat(lengths_B, beams))
    return Beams(np.asarray(found.tokens), np.asarray(found.counts), np.asarray(found.scores))


def _search_function(sharded_model: ShardedModel, decoder: Decoder, form: _Form) -> Callable[..., _Pool]:
    """The function (params, prompts_MP, lengths_M) -> the best continuations, in which a prompt has N equal rows."""
    dtype, last = sharded_model.policy.compute_dtype, form.new_tokens
    stops = np.array(form.stop_tokens, np.int32)

    def search(params: Params, prompts_MP: jax.Array, lengths_M: jax.Array) -> _Pool:
        params = hold_parameters(cast_floats(params, dtype))
        logits_MV, cache, _, lengths_M = read_prompts(
            decoder, params, prompts_MP, lengths_M, new_tokens=last, cache_dtype=dtype
        )
        batch = len(prompts_MP) // form.beams
        shape = (batch, form.beams)
        empty = _Pool(jnp.zeros((*shape, last), jnp.int32), jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf))
        # The rows of a prompt are equal: all but the first would be found again.
        running = _Pool(empty.tokens, empty.counts, empty.scores.at[:, 0].set(0.0))

        def extend(running: _Pool, ended: _Pool, logits_MV: jax.Array, at: Any) -> tuple[_Pool, _Pool, jax.Array]:
            """The beginnings with one more token, those that have ended, and the row that each continues."""
            vocabulary = logits_MV.shape[-1]
            log_BNV = jax.nn.log_softmax(logits_MV.astype(jnp.float32)).reshape(*shape, vocabulary)
            all_BX = (running.scores[:, :, None] + log_BNV).reshape(batch, -1)
            # So many that N are left where each beginning may end by every stop token.
            values_BK, index_BK = jax.lax.top_k(all_BX, min(form.beams * (1 + len(stops)), all_BX.shape[1]))
            parent_BK, token_BK = index_BK // vocabulary, (index_BK % vocabulary).astype(jnp.int32)
            tokens_BKT = jnp.take_along_axis(running.tokens, parent_BK[:, :, None], axis=1)
            tokens_BKT = jax.lax.dynamic_update_slice_in_dim(tokens_BKT, token_BK[:, :, None], at, axis=2)
            counts_BK = jnp.full(token_BK.shape, at + 1, jnp.int32)
            stops_BK = (token_BK[:, :, None] == stops).any(axis=-1)
            scores_BK = jnp.where(stops_BK, values_BK / _length(at + 1), -jnp.inf)
            ended, _ = ended.joined(_Pool(tokens_BKT, counts_BK, scores_BK)).best(form.beams)
            values_BK = jnp.where(stops_BK, -jnp.inf, values_BK)
            running, picked_BN = _Pool(tokens_BKT, counts_BK, values_BK).best(form.beams)
            parent_BN = jnp.take_along_axis(parent_BK, picked_BN, axis=1)
            return running, ended, (jnp.arange(batch)[:, None] * form.beams + parent_BN).reshape(-1)

        def made(rows: int) -> Any:
            if decoder.encode is not None:
                return decoder.init_cache(rows, 1 + last, dtype)
            return prompt_cache(decoder, rows, prompts_MP.shape[1], new_tokens=last, cache_dtype=dtype)

        def _length(count: Any) -> jax.Array:
            return jnp.asarray(count, jnp.float32) ** form.length_penalty

        def goes_on(carry: Any) -> jax.Array:
            at, running, ended, _ = carry
            # Sums only fall, and what they are divided by is largest at the end.
            reachable_B = running.scores.max(axis=-1) / _length(last)
            return (at < last) & jnp.any(reachable_B > ended.scores.min(axis=-1))

        def step(carry: Any) -> Any:
            at, running, ended, cache = carry
            last_M1 = jax.lax.dynamic_slice_in_dim(running.tokens, at - 1, 1, axis=2).reshape(-1, 1)
            logits_M1V, cache = decoder.decode(params, last_M1, (lengths_M + at - 1)[:, None], cache)
            running, ended, rows_M = extend(running, ended, logits_M1V[:, 0], at)
            return at + 1, running, ended, _with_rows(cache, rows_M, made)

        running, ended, rows_M = extend(running, empty, logits_MV, 0)
        cache = _with_rows(cache, rows_M, made)
        at, running, ended, _ = jax.lax.while_loop(goes_on, step, (jnp.int32(1), running, ended, cache))
        # Those that are cut off count as they are; where the search ended before, they cannot win.
        cut_off = jnp.where(at == last, running.scores / _length(last), -jnp.inf)
        return ended.joined(_Pool(running.tokens, running.counts, cut_off)).best(form.beams)[0]

    return search


def _with_rows(cache: Any, rows_M: jax.Array, made: Callable[[int], Any]) -> Any:
    """The cache with its rows taken from others; what an encoder wrote is the same for all beams of a prompt."""

    def shapes(rows: int) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda: made(rows)))
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}

    # Shapes alone say which dim counts rows, so that a decoder may arrange its cache as it likes.
    one, two = shapes(1), shapes(2)

    def take(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if name not in one:
            return leaf
        dim = next(at for at, (a, b) in enumerate(zip(one[name], two[name], strict=True)) if a != b)
        return jnp.take(leaf, rows_M, axis=dim)

    return jax.tree_util.tree_map_with_path(take, cache)
