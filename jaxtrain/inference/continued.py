"""Texts that continue prompts, drawn at random or found by a search: what `sample` of a run and of the command do."""

from collections.abc import Sequence

from jaxtrain.data import Tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.beam import beam_search
from jaxtrain.inference.decoding import decoder_of
from jaxtrain.inference.generate import generate_text
from jaxtrain.inference.pieces import room_for_new_tokens
from jaxtrain.inference.prompts import EncodedPrompts, encode_prompts, special_tokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.special import SpecialTokens
from jaxtrain.models.model import Decoder, Params
from jaxtrain.models.sharded import ShardedModel

_DEFAULT_TOKENS = 200
_NOTHING_SPECIAL = SpecialTokens()


def continue_texts(
    sharded_model: ShardedModel,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    new_tokens: int | None,
    sampling: Sampling,
    seed: int,
    stop: Sequence[str],
    beams: int | None,
    special: SpecialTokens = _NOTHING_SPECIAL,
    skip_special_tokens: bool = True,
) -> list[str]:
    """Continue texts in one batch.

    Args:
        sharded_model: has a decoder.
        params: on any mesh; also quantized.
        tokenizer: turns texts into ids.
        prompts: the texts.
        new_tokens: tokens to add to each, at most; None: 200, or as many as the model has positions for.
        sampling: how tokens are chosen, without `beams`.
        seed: of the random choices.
        stop: texts at which a continuation ends.
        beams: beginnings of each text that are followed for the most likely one; None: tokens are chosen one by one.
        special: what is known of the model's special tokens.
        skip_special_tokens: whether those that the model writes are left out of the text.

    Returns:
        Each prompt with its continuation; of a model with an encoder, its output.

    Raises:
        ConfigError: the model cannot generate, or an option is out of range or does not go with another.
    """
    decoder = decoder_of(sharded_model.model)
    encoded = encode_prompts(sharded_model.model, tokenizer, prompts, add_special_tokens=special.added)
    if new_tokens is None:
        new_tokens = default_new_tokens(decoder, encoded)
    if beams is None:
        return generate_text(
            sharded_model,
            params,
            tokenizer,
            prompts,
            new_tokens=new_tokens,
            sampling=sampling,
            seed=seed,
            stop=stop,
            stop_tokens=special.stop,
            add_special_tokens=special.added,
            skip_special_tokens=skip_special_tokens,
        )
    default = Sampling(sampling.temperature)
    if sampling != default or stop:
        raise ConfigError(
            "beams follow the most likely texts and draw nothing: they go with no top_k, top_p, min_p, "
            "repetition_penalty or stop; leave those or beams out"
        )
    if not len(prompts):
        return []
    ends = {*special.stop, *(() if encoded.end is None else (encoded.end,))}
    hidden = special_tokens(tokenizer) if skip_special_tokens else frozenset()
    found = beam_search(
        sharded_model,
        params,
        encoded.tokens,
        beams=beams,
        new_tokens=new_tokens,
        stop_tokens=ends,
    )
    texts = []
    for row, given in enumerate(encoded.given):
        new = found.tokens[row, 0, : found.counts[row, 0]].tolist()
        new = new[:-1] if new[-1] in ends else new
        texts.append(tokenizer.decode([*given, *(token for token in new if token not in hidden)]))
    return texts


def default_new_tokens(decoder: Decoder, encoded: EncodedPrompts) -> int:
    """The tokens that are added where nobody says how many: 200, or as many as the model has positions for."""
    longest = max(map(len, encoded.tokens), default=1)
    return max(1, min(_DEFAULT_TOKENS, room_for_new_tokens(decoder, longest)))
