"""Text generation: texts that continue prompts, or that a model with an encoder writes about them.

Shapes: B prompts, P longest prompt, T new tokens, A alternatives that are reported.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config.arguments import check_kind, check_whole, refusal
from jaxtrain.data import Tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.decoding import DecodingForm, advance_function, decoder_of, row_rules, start_function
from jaxtrain.inference.pieces import Generated, generation_pieces
from jaxtrain.inference.pieces import room_for_new_tokens as room_for_new_tokens
from jaxtrain.inference.prompts import encode_prompts, special_tokens
from jaxtrain.inference.sampling import Sampling, is_number
from jaxtrain.inference.text_stream import TextStream, checked_stops
from jaxtrain.models.model import Model, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.precision.policy import Policy, get_policy
from jaxtrain.runtime.compiler import decoding_options
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep, check_not_donated

# (params, prompts_BP, lengths_B, key) -> new tokens int32 [B, T]
Generator = Callable[[Params, Any, Any, jax.Array], jax.Array]

# Tokens between two looks for a stop string, for which the host waits.
_PIECE = 16


def make_generator(
    model: Model, *, new_tokens: int, sampling: Sampling, policy: str | Policy = "fp32", mesh: Mesh | None = None
) -> Generator:
    """A jitted function (params, prompts_BP, lengths_B, key) -> new tokens int32 [B, T], all in one program.

    Prompts are padded on the right to P; each row goes on from its own length.

    Args:
        model: has a decoder.
        new_tokens: T.
        sampling: how tokens are chosen.
        policy: number formats, as a name or a `Policy`.
        mesh: of the parameters; the tokens are replicated over it, so that every process has them.

    Raises:
        ConfigError: the model cannot generate, or `new_tokens` is below 1.
    """
    decoder_of(model)
    new_tokens = _checked_new_tokens(new_tokens)
    form, dtypes = DecodingForm(new_tokens, counts_tokens=sampling.counts_tokens), get_policy(policy)
    start, advance = start_function(model, form, dtypes, mesh), advance_function(model, form, dtypes, mesh)

    def generate(params: Params, prompts_BP: jax.Array, lengths_B: jax.Array, key: jax.Array) -> jax.Array:
        rows = row_rules([sampling] * len(prompts_BP), [0] * len(prompts_BP), (), model)
        seeds_B = jax.random.bits(key, (len(prompts_BP),), jnp.uint32)
        rows = replace(rows, sampling=replace(rows.sampling, seed=seeds_B))
        texts = start(params, prompts_BP, lengths_B, rows)
        return advance(params, texts, rows, jnp.int32(new_tokens)).tokens_BT

    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    placed = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(generate, out_shardings=placed, compiler_options={**decoding_options(device)} or None)


def generate_text(
    step: TrainStep | ShardedModel,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    sampling: Sampling | Sequence[Sampling],
    seed: int | Sequence[int] = 0,
    stop: Sequence[str] = (),
    stop_tokens: Collection[int] = (),
    add_special_tokens: bool = True,
    skip_special_tokens: bool = True,
    cache_dtype: str | None = None,
) -> list[str]:
    """Continue prompts, or write the outputs of a model that reads them with an encoder.

    A row ends at its end-of-text token or at a stop string, and the program when all rows have ended. The compiled
    programs are kept with the sharded model: another call with as many prompts of a similar length and the same
    `new_tokens` compiles nothing, whatever the rows are sampled by.

    Args:
        step: a train step, or a sharded model: model, number formats and layout.
        params: as in the state, on any mesh; also quantized.
        tokenizer: turns the prompts into ids, and ids into text.
        prompts: a list of texts; all are continued in one batch.
        new_tokens: tokens to add to each, at most.
        sampling: how tokens are chosen, of all prompts or one per prompt.
        seed: of the random choices: row r has seed + r; or a list of one per prompt.
        stop: texts at which a continuation ends; they are not part of it.
        stop_tokens: ids that end it beside the tokenizer's end of text; they are not part of it.
        add_special_tokens: whether what the tokenizer's file puts before a text (a beginning of text) is put before
            each prompt. Published models are trained so; a run on plain text is not.
        skip_special_tokens: whether special tokens that the model writes are left out of the text.
        cache_dtype: of keys and values: float32, bfloat16, float16 or int8; None: the compute dtype.

    Returns:
        For each prompt, the prompt and its continuation up to the end-of-text token or a stop; of a model with an
        encoder, its output up to there.

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
    _check_call(params, tokenizer, prompts, seed)
    sharded_model = step.sharded_model if isinstance(step, TrainStep) else step
    decoder_of(sharded_model.model)
    new_tokens = _checked_new_tokens(new_tokens)
    stop = checked_stops(stop)
    write = "stop_tokens=[2]"
    stop_tokens = [check_whole(one, what="generate_text: stop_tokens", least=0, write=write) for one in stop_tokens]
    check_not_donated(params)
    if not len(prompts):
        return []
    encoded = encode_prompts(sharded_model.model, tokenizer, prompts, add_special_tokens=add_special_tokens)
    ends = {*stop_tokens, *(() if encoded.end is None else (encoded.end,))}
    hidden = special_tokens(tokenizer) if skip_special_tokens else frozenset()
    ended_B, texts = np.zeros(len(prompts), bool), [""] * len(prompts)
    for found in generation_pieces(
        sharded_model,
        params,
        encoded.tokens,
        new_tokens=new_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=ends,
        cache_dtype=cache_dtype,
        piece=_PIECE if stop else None,
        ended_B=ended_B,
    ):
        for row in np.flatnonzero(~ended_B):
            new = found.tokens[row, : found.counts[row]].tolist()
            end = next((place for place, token in enumerate(new) if token in ends), len(new))
            new = [token for token in new[:end] if token not in hidden]
            texts[row], ended_B[row] = _until_stop(tokenizer, encoded.given[row], new, stop)
    return texts


def _until_stop(tokenizer: Tokenizer, given: list[int], new: list[int], stop: Sequence[str]) -> tuple[str, bool]:
    """The text of a row before its first stop string, and whether there is one."""
    if not stop:
        return tokenizer.decode([*given, *new]), False
    stream, whole, fed = TextStream(tokenizer, stop=stop), TextStream(tokenizer), 0
    while fed < len(new) and not stream.stopped:
        stream.feed(new[fed])
        whole.feed(new[fed])
        fed += 1
    stream.finish()
    whole.finish()
    # The first of the tokens may lose its space where nothing stands before it, so the end is what is counted from.
    text = tokenizer.decode([*given, *new[:fed]])
    return text[: len(text) - (len(whole.text) - len(stream.text))], stream.stopped


def generate_ids(
    sharded_model: ShardedModel,
    params: Params,
    encoded: Sequence[np.ndarray],
    *,
    new_tokens: int,
    sampling: Sampling | Sequence[Sampling],
    seed: int | Sequence[int] = 0,
    stop_tokens: Collection[int] = (),
    cache_dtype: str | None = None,
) -> np.ndarray:
    """Continue prompts that are token ids already; the compiled programs are kept, as `generate_text` says.

    Args:
        sharded_model: has a decoder.
        params: on any mesh; also quantized.
        encoded: at least one prompt, int32 [length] each, none of them empty.
        new_tokens: T, tokens to add to each, at least 1.
        sampling: how tokens are chosen, of all prompts or one per prompt.
        seed: of the random choices: row r has seed + r; or a list of one per prompt.
        stop_tokens: ids that end a row.
        cache_dtype: as in `generate_text`.

    Returns:
        int32 [B, T]; zeros follow a stop token.

    Raises:
        ConfigError: prompt and continuation exceed the model's positions, or it does not generate text.
    """
    return generate_rows(
        sharded_model,
        params,
        encoded,
        new_tokens=new_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=stop_tokens,
        cache_dtype=cache_dtype,
    ).tokens


def generate_rows(
    sharded_model: ShardedModel,
    params: Params,
    encoded: Sequence[np.ndarray],
    *,
    new_tokens: int,
    sampling: Sampling | Sequence[Sampling],
    seed: int | Sequence[int] = 0,
    stop_tokens: Collection[int] = (),
    top: int | None = None,
    cache_dtype: str | None = None,
) -> Generated:
    """`generate_ids` with the lengths of the rows, and with log-probabilities where they are asked for.

    Args:
        sharded_model, params, encoded, new_tokens, sampling, seed, stop_tokens, cache_dtype: as for `generate_ids`.
        top: A, the most likely tokens that are reported for each place; None: no log-probabilities.

    Raises:
        ConfigError: as for `generate_ids`.
    """
    (found,) = generation_pieces(
        sharded_model,
        params,
        encoded,
        new_tokens=new_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=stop_tokens,
        top=top,
        cache_dtype=cache_dtype,
    )
    return found


def _check_call(params: Any, tokenizer: Any, prompts: Any, seed: Any) -> None:
    """Raise where an argument of `generate_text` is of another type."""
    if isinstance(params, TrainState) or params is None:
        raise ConfigError(refusal("generate_text: params", "parameters", params, "state.params"))
    if isinstance(prompts, str | bytes):
        raise ConfigError(f"prompts is one text, {prompts[:20]!r}; use a list of texts: [{prompts[:20]!r}]")
    what, takes, write = "generate_text: prompts", "a list of texts", "['Once upon a time']"
    check_kind(prompts, Sequence, what=what, takes=takes, write=write)
    if not callable(getattr(tokenizer, "encode", None)) or not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(refusal("generate_text: tokenizer", "a tokenizer", tokenizer, "data.tokenizer"))
    for one in seed if isinstance(seed, list | tuple) else [seed]:
        check_whole(one, what="generate_text: seed", least=None, write="seed=0")


def _checked_new_tokens(new_tokens: int) -> int:
    if not is_number(new_tokens, Integral) or new_tokens < 1:
        raise ConfigError(f"new_tokens is {new_tokens}; use a whole number of 1 or more")
    return operator.index(new_tokens)
