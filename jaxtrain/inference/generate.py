"""Text generation with a KV cache: one prefill, then a scanned loop, compiled once for prompts of similar lengths.

Shapes: B prompts, P longest prompt, T new tokens, V vocabulary.
"""

import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config.arguments import check_kind, check_whole, refusal
from jaxtrain.data import Tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.prompts import encoder_prompts
from jaxtrain.inference.sampling import SMALLEST_TEMPERATURE, Sampling, is_number
from jaxtrain.models.model import Decoder, Model, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.precision.policy import Policy, cast_floats, get_policy
from jaxtrain.train.given_state import check_not_donated
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep

# (params, prompts_BP, lengths_B, key) -> new tokens int32 [B, T]
Generator = Callable[[Params, Any, Any, jax.Array], jax.Array]

# Prompts are padded to this many tokens times a power of two, so that few lengths are compiled for.
_SHORTEST_PROMPT = 16


def choose(logits_BV: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of each row: int32 [B].

    Of equal logits the one of the lower token ranks first, for `top_k` and `top_p` as for greedy choice.
    """
    if sampling.temperature < SMALLEST_TEMPERATURE:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    # The largest becomes 0 before the division: a small temperature can then reach -inf, which is probability 0.
    logits_BV = logits_BV.astype(jnp.float32)
    logits_BV = (logits_BV - logits_BV.max(axis=-1, keepdims=True)) / sampling.temperature
    if sampling.top_k is not None:
        tokens_BK = jax.lax.top_k(logits_BV, min(sampling.top_k, logits_BV.shape[-1]))[1]
        logits_BV = _only(logits_BV, tokens_BK, jnp.ones(tokens_BK.shape, bool))
    if sampling.top_p is not None:
        tokens_BV = jnp.argsort(logits_BV, axis=-1, stable=True, descending=True)
        ordered_BV = jax.nn.softmax(jnp.take_along_axis(logits_BV, tokens_BV, axis=-1), axis=-1)
        before_BV = jnp.cumsum(ordered_BV, axis=-1) - ordered_BV
        # The first token always stays: nothing stands before it, and a tiny top_p is 0 on the device.
        logits_BV = _only(logits_BV, tokens_BV, (before_BV < sampling.top_p).at[:, 0].set(True))
    return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)


def _only(logits_BV: jax.Array, tokens_BK: jax.Array, stays_BK: jax.Array) -> jax.Array:
    """The logits with -inf for every token that is not listed as one that stays."""
    stays_BV = jnp.put_along_axis(jnp.zeros(logits_BV.shape, bool), tokens_BK, stays_BK, axis=-1, inplace=False)
    return jnp.where(stays_BV, logits_BV, -jnp.inf)


def make_generator(
    model: Model, *, new_tokens: int, sampling: Sampling, policy: str | Policy = "fp32", mesh: Mesh | None = None
) -> Generator:
    """A jitted function (params, prompts_BP, lengths_B, key) -> new tokens int32 [B, T].

    Prompts are padded on the right to P; each row goes on from its own length. The cache overwrites the padding's
    entries before anything can see them. A model with an encoder reads the prompt there, and the new tokens are its
    output.

    Args:
        model: has a decoder.
        new_tokens: T.
        sampling: how tokens are chosen.
        policy: number formats, as a name or a `Policy`.
        mesh: of the parameters; the tokens are replicated over it, so that every process has them.

    Raises:
        ConfigError: the model cannot generate, or `new_tokens` is below 1.
    """
    decoder = model.decoder
    if decoder is None:
        raise ConfigError(f"model {model.name} does not generate text")
    new_tokens = _checked_new_tokens(new_tokens)
    dtypes = get_policy(policy)

    def generate(params: Params, prompts_BP: jax.Array, lengths_B: jax.Array, key: jax.Array) -> jax.Array:
        params = cast_floats(params, dtypes.compute_dtype)
        batch, longest = prompts_BP.shape
        if decoder.encode is not None:  # from here on the start token is the prompt
            cache = decoder.init_cache(batch, 1 + new_tokens, dtypes.compute_dtype)
            cache = decoder.encode(params, prompts_BP, lengths_B, cache)
            prompts_BP = jnp.full((batch, 1), decoder.start_token, prompts_BP.dtype)
            longest, lengths_B = 1, jnp.ones_like(lengths_B)
        else:
            cache = decoder.init_cache(batch, longest + new_tokens, dtypes.compute_dtype)
        if decoder.prefill is None:
            positions = jnp.broadcast_to(jnp.arange(longest), prompts_BP.shape)
            logits_BPV, cache = decoder.decode(params, prompts_BP, positions, cache)
            last = jnp.take_along_axis(logits_BPV, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
        else:
            last, cache = decoder.prefill(params, prompts_BP, lengths_B, cache)
        first = choose(last, jax.random.fold_in(key, 0), sampling)

        def advance(carry: Any, index: jax.Array) -> tuple[Any, jax.Array]:
            token, cache = carry
            logits, cache = decoder.decode(params, token[:, None], (lengths_B + index)[:, None], cache)
            new = choose(logits[:, 0], jax.random.fold_in(key, index + 1), sampling)
            return (new, cache), token

        (last_token, _), tokens = jax.lax.scan(advance, (first, cache), jnp.arange(new_tokens - 1))
        return jnp.concatenate([jnp.moveaxis(tokens, 0, 1), last_token[:, None]], axis=1)

    return jax.jit(generate, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))


# Jitted generation by what it was made for, kept as long as the sharded model is.
_generators: weakref.WeakKeyDictionary[ShardedModel, dict[Hashable, Generator]] = weakref.WeakKeyDictionary()


def generate_text(
    step: TrainStep | ShardedModel,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
) -> list[str]:
    """Continue prompts, or write the outputs of a model that reads them with an encoder.

    The compiled program is kept with the sharded model: another call with as many prompts of a similar length, the
    same `new_tokens` and the same `sampling` compiles nothing.

    Args:
        step: a train step, or a sharded model: model, number formats and layout.
        params: as in the state, on any mesh; also quantized.
        tokenizer: turns the prompts into ids, and ids into text.
        prompts: a list of texts; all are continued in one batch.
        new_tokens: tokens to add to each, at most.
        sampling: how tokens are chosen.
        seed: of the random choices.

    Returns:
        For each prompt, the prompt and its continuation up to the end-of-text token; of a model with an encoder, its
        output up to that token.

    Raises:
        ConfigError: the model cannot generate, the parameters were donated to a step, `prompts` is a single text,
            `new_tokens` is below 1, prompt and continuation exceed its positions, or another argument is of another
            type.

    Example:
        >>> from jaxtrain.data.tokenizer import ByteTokenizer
        >>> sharded = jt.shard_model(text_model)
        >>> params, _ = jax.jit(sharded.init)(jax.random.key(0))
        >>> texts = jt.generate_text(
        ...     sharded, params, ByteTokenizer(), ["To be"], new_tokens=2, sampling=jt.Sampling(temperature=0.7)
        ... )
        >>> texts[0].startswith("To be")
        True
    """
    _check_call(step, params, tokenizer, prompts, sampling, seed)
    sharded_model = step.sharded_model if isinstance(step, TrainStep) else step
    model = sharded_model.model
    if model.decoder is None:
        raise ConfigError(f"model {model.name} does not generate text")
    new_tokens = _checked_new_tokens(new_tokens)
    check_not_donated(params)
    if not len(prompts):
        return []
    encoded = [np.asarray(tokenizer.encode(prompt), np.int32) for prompt in prompts]
    start = 0 if tokenizer.end_of_text is None else tokenizer.end_of_text
    given = [ids.tolist() for ids in encoded]
    framing = None if model.decoder.encode is None else encoder_prompts(tokenizer)
    if framing is not None:
        given, encoded = [[] for _ in given], [np.asarray(framing.framed(ids), np.int32) for ids in given]
    encoded = [ids if len(ids) else np.array([start], np.int32) for ids in encoded]
    new_BT = generate_ids(sharded_model, params, encoded, new_tokens=new_tokens, sampling=sampling, seed=seed)
    end = tokenizer.end_of_text if framing is None else framing.end
    texts = []
    for ids, new in zip(given, new_BT, strict=True):
        stop = np.flatnonzero(new == end)
        texts.append(tokenizer.decode([*ids, *new[: stop[0] if len(stop) else None].tolist()]))
    return texts


def generate_ids(
    sharded_model: ShardedModel,
    params: Params,
    encoded: Sequence[np.ndarray],
    *,
    new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
) -> np.ndarray:
    """Continue prompts that are token ids already; the compiled program is kept, as `generate_text` says.

    Args:
        sharded_model: has a decoder.
        params: on any mesh; also quantized.
        encoded: at least one prompt, int32 [length] each, none of them empty.
        new_tokens: T, tokens to add to each, at least 1.
        sampling: how tokens are chosen.
        seed: of the random choices.

    Returns:
        int32 [B, T]; what follows a token that ends the text is meaningless.

    Raises:
        ConfigError: prompt and continuation exceed the model's positions, or it does not generate text.
    """
    model = sharded_model.model
    if model.decoder is None:
        raise ConfigError(f"model {model.name} does not generate text")
    longest = max(map(len, encoded))
    room, short = _room(model.decoder, longest, new_tokens), model.decoder.short_length
    if short is not None and longest + new_tokens <= short:
        # Padding alone may not make a text a long one, whose positions rotate by other frequencies.
        room = min(room, short - new_tokens)
    prompts_BP = np.zeros((len(encoded), _padded_length(longest, room)), np.int32)
    for row, ids in enumerate(encoded):
        prompts_BP[row, : len(ids)] = ids
    lengths_B = np.array([len(ids) for ids in encoded], np.int32)
    generators = _generators.setdefault(sharded_model, {})
    generator = generators.get((new_tokens, sampling))
    if generator is None:
        generator = make_generator(
            model, new_tokens=new_tokens, sampling=sampling, policy=sharded_model.policy, mesh=sharded_model.mesh
        )
        generators[new_tokens, sampling] = generator
    with sharded_model.context():
        return np.asarray(generator(params, prompts_BP, lengths_B, jax.random.key(seed)))


def _room(decoder: Decoder, longest: int, new_tokens: int) -> int:
    """How many tokens prompts may have; a model with an encoder has as many positions for its outputs besides.

    Raises:
        ConfigError: prompts of `longest` tokens, or so many new ones, exceed the model's positions.
    """
    limit = decoder.max_length
    if decoder.encode is None:
        if longest + new_tokens > limit:
            raise ConfigError(
                f"a prompt of {longest} tokens and {new_tokens} new ones exceed the model's {limit} positions; "
                f"ask for at most {max(limit - longest, 0)} new tokens or shorten the prompt"
            )
        return limit - new_tokens
    if longest > limit:
        raise ConfigError(f"a prompt of {longest} tokens exceeds the model's {limit} positions; shorten the prompt")
    if new_tokens > limit:
        raise ConfigError(
            f"{new_tokens} new tokens exceed the model's {limit} positions; ask for at most {limit} new tokens"
        )
    return limit


def room_for_new_tokens(decoder: Decoder, prompt_length: int) -> int:
    """How many tokens can follow a prompt; the outputs of a model with an encoder have all positions for themselves."""
    if decoder.encode is None:
        return decoder.max_length - prompt_length
    return decoder.max_length if prompt_length <= decoder.max_length else 0


def _check_call(step: Any, params: Any, tokenizer: Any, prompts: Any, sampling: Any, seed: Any) -> None:
    """Raise where an argument of `generate_text` is of another type."""
    write = "generate_text(step, ...), or generate_text(shard_model(model), ...)"
    check_kind(step, (TrainStep, ShardedModel), what="generate_text", takes="a train step", write=write)
    if isinstance(params, TrainState) or params is None:
        raise ConfigError(refusal("generate_text: params", "parameters", params, "state.params"))
    if isinstance(prompts, str | bytes):
        raise ConfigError(f"prompts is one text, {prompts[:20]!r}; use a list of texts: [{prompts[:20]!r}]")
    what, takes, write = "generate_text: prompts", "a list of texts", "['Once upon a time']"
    check_kind(prompts, Sequence, what=what, takes=takes, write=write)
    for prompt in prompts:
        check_kind(prompt, str, what=what, takes=takes, write=write)
    if not callable(getattr(tokenizer, "encode", None)) or not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(refusal("generate_text: tokenizer", "a tokenizer", tokenizer, "data.tokenizer"))
    temperature = sampling if is_number(sampling) else 0.8
    write = f"sampling=Sampling(temperature={temperature})"
    check_kind(sampling, Sampling, what="generate_text: sampling", takes="a record", write=write)
    check_whole(seed, what="generate_text: seed", least=None, write="seed=0")


def _checked_new_tokens(new_tokens: int) -> int:
    if not is_number(new_tokens, Integral) or new_tokens < 1:
        raise ConfigError(f"new_tokens is {new_tokens}; use a whole number of 1 or more")
    return operator.index(new_tokens)


def _padded_length(longest: int, room: int) -> int:
    """The compiled length of prompts of `longest` tokens, at most `room`."""
    length = _SHORTEST_PROMPT
    while length < longest:
        length *= 2
    return min(length, room)
