"""What a model that writes texts is known by, and how prompts become the ids that it reads.

Shapes: B prompts, P longest prompt.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.conversation import Conversation
from jaxtrain.data.chat.templates import ChatEncoder, ChatFormat, compile_template, render
from jaxtrain.data.sources.texts import Frame, fill_frame, make_frame
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, NamedTokens, special_ids
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import Decoder, Model, ModelState, Params
from jaxtrain.models.sharded import ShardedModel

# Prompts are padded to this many tokens times a power of two, so that few lengths are compiled for.
_SHORTEST_PROMPT = 16


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a model beside what its tokenizer knows.

    Attributes:
        added: whether what the tokenizer's file puts before a text (a beginning of text) stands before a prompt. A
            published model was trained so; rows of plain text, which a run was trained on, have none.
        stop: ids at which the model ends a text, beside the tokenizer's end of text.
        named: name of a special token in the published files (bos_token) -> its text.
    """

    added: bool = True
    stop: tuple[int, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)


NOTHING_SPECIAL = SpecialTokens()


@dataclass(frozen=True)
class Served:
    """A model that is asked: its parameters on their mesh, and how texts become its inputs.

    Attributes:
        name: what clients call it.
        sharded_model: the model on its mesh.
        params: in its shardings; also quantized.
        model_state: what changes without a gradient.
        tokenizer: between texts and ids.
        chat: how conversations are written; None: the model has no chat template.
        created: when it was opened, seconds since 1970.
        special: what is known of its special tokens.
        step: of the checkpoint of a run; None: it is no run.
    """

    name: str
    sharded_model: ShardedModel
    params: Params = field(repr=False)
    model_state: ModelState = field(repr=False)
    tokenizer: BpeTokenizer | ByteTokenizer
    chat: ChatFormat | None
    created: int
    special: SpecialTokens = NOTHING_SPECIAL
    step: int | None = None


@dataclass(frozen=True)
class EncoderPrompts:
    """What stands around a prompt for an encoder, and after an output.

    Attributes:
        frame: special tokens around a prompt; None: the tokenizer knows none.
        end: token after an output; None: there is none.
    """

    frame: Frame | None
    end: int | None

    def framed(self, ids: list[int]) -> list[int]:
        """The ids of a prompt with what stands around it."""
        if self.frame is None:
            return ids
        return fill_frame(self.frame, [ids], len(ids) + self.frame.num_special)[0]


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts as ids.

    Attributes:
        tokens: what the model reads, int32 [length] each, none empty.
        given: what stands before the new tokens in the text; nothing for answers, and for a model with an encoder.
        ends: ids that end a text.
    """

    tokens: list[np.ndarray]
    given: list[list[int]]
    ends: frozenset[int]


def decoder_of(model: Model, *, has_encoder: bool = True) -> Decoder:
    """How the model generates; a ConfigError where it does not, or with an encoder that the caller does not take."""
    if model.decoder is None or (model.decoder.encode is not None and not has_encoder):
        why = (
            "does not generate text" if model.decoder is None else "reads its prompt with an encoder; use generate_text"
        )
        raise ConfigError(f"model {model.name} {why}")
    return model.decoder


def text_ends(
    tokenizer: Tokenizer, special: SpecialTokens = NOTHING_SPECIAL, chat: ChatFormat | None = None
) -> set[int]:
    """The ids at which a text ends: the end of text, those of the model, and those of its chat template."""
    end = tokenizer.end_of_text
    return {*special.stop, *(() if end is None else (end,)), *(() if chat is None else chat.stop)}


def encoder_prompts(tokenizer: Tokenizer) -> EncoderPrompts:
    """How a tokenizer's prompts are framed: by its own file, or by its special tokens of the usual names."""
    if not isinstance(tokenizer, NamedTokens):
        return EncoderPrompts(None, tokenizer.end_of_text)
    special = special_ids(tokenizer, None)
    end = tokenizer.end_of_text if special.end is None else special.end
    return EncoderPrompts(make_frame(tokenizer, special, pair=False), end)


def tokens_before(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that the tokenizer's file puts before a text (a beginning of text)."""
    entries = [entry for entry, _ in tokenizer.frame(pair=False)] if isinstance(tokenizer, BpeTokenizer) else []
    place = entries.index("first") if "first" in entries else 0
    return tuple(one for one in entries[:place] if isinstance(one, int))


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that no text has, as far as the tokenizer says."""
    return frozenset(tokenizer.special_ids() if isinstance(tokenizer, NamedTokens) else ())


def encode_prompts(
    model: Model, tokenizer: Tokenizer, prompts: Sequence[str], *, add_special_tokens: bool = True
) -> EncodedPrompts:
    """Turn prompts into ids: an empty one becomes the end-of-text token, those for an encoder are framed.

    Args:
        model: has a decoder.
        tokenizer: turns texts into ids.
        prompts: the texts.
        add_special_tokens: whether what the tokenizer's file puts before a text is added; those for an encoder are
            always framed.

    Raises:
        ConfigError: the model does not generate, or a prompt is no text (an argument that is not UTF-8).
    """
    for text in prompts:
        if not isinstance(tokenizer, ByteTokenizer) and any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"the prompt {text[:30]!a} has an invalid character; give text in UTF-8")
    given = [np.asarray(tokenizer.encode(prompt)).tolist() for prompt in prompts]
    encoded, end = given, tokenizer.end_of_text
    if decoder_of(model).encode is not None:
        framing = encoder_prompts(tokenizer)
        encoded, end = [framing.framed(ids) for ids in given], framing.end
        given = [[] for _ in given]
    elif add_special_tokens:
        encoded = [[*tokens_before(tokenizer), *ids] for ids in given]
    start = tokenizer.end_of_text or 0
    tokens = [np.array(ids or [start], np.int32) for ids in encoded]
    return EncodedPrompts(tokens, given, frozenset(() if end is None else (end,)))


def encode_questions(tokenizer: Tokenizer, chat: ChatFormat, questions: Sequence[str]) -> EncodedPrompts:
    """Turn questions, each a conversation of its own, into ids by a chat template, which writes all special tokens."""
    assert isinstance(tokenizer, BpeTokenizer | ByteTokenizer), "chats need a tokenizer.json"
    template = compile_template(chat, today=datetime.date.today())
    texts = [
        render(template, Conversation("the question", ({"role": "user", "content": question},)), prompt=True).text
        for question in questions
    ]
    tokens = [found.ids for found in ChatEncoder(tokenizer).encode(texts)]
    return EncodedPrompts(tokens, [[] for _ in tokens], frozenset(text_ends(tokenizer, chat=chat)))


def padded_prompts(model: Model, encoded: Sequence[np.ndarray], new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The prompts in rows of one length int32 [B, P], and their own lengths int32 [B].

    Raises:
        ConfigError: there is none, one is empty or holds an id that the vocabulary does not have, or prompts and new
            tokens exceed the model's positions.
    """
    decoder = decoder_of(model)
    largest = max((int(np.max(ids, initial=-1)) for ids in encoded), default=-1)
    if not all(map(len, encoded)) or not 0 <= largest < (model.vocab_size or largest + 1):
        raise ConfigError(
            f"each prompt takes at least one token, and ids below {model.vocab_size} (the largest is {largest}); use "
            "the model's own tokenizer"
        )
    longest, limit, short = max(map(len, encoded)), decoder.max_length, decoder.short_length
    most = room_for_new_tokens(decoder, longest) if longest <= limit else 0
    if new_tokens > most:
        raise ConfigError(
            f"a prompt of {longest} tokens and {new_tokens} new tokens exceed the model's {limit} positions; "
            f"ask for at most {max(most, 0)} or shorten the prompt"
        )
    room = limit if decoder.encode is not None else limit - new_tokens
    if short is not None and longest + new_tokens <= short:
        # Padding alone may not make a text a long one, whose positions rotate by other frequencies.
        room = min(room, short - new_tokens)
    length = _SHORTEST_PROMPT
    while length < longest:
        length *= 2
    prompts_BP = np.zeros((len(encoded), min(length, room)), np.int32)
    for row, ids in enumerate(encoded):
        prompts_BP[row, : len(ids)] = ids
    return prompts_BP, np.array([len(ids) for ids in encoded], np.int32)


def room_for_new_tokens(decoder: Decoder, prompt_length: int) -> int:
    """How many tokens can follow a prompt; the outputs of a model with an encoder have all positions for themselves."""
    return decoder.max_length - (prompt_length if decoder.encode is None else 0)
