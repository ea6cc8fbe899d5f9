"""What a model that writes texts is known by, and how prompts become the ids that it reads.

Shapes: B prompts, P longest prompt.
"""

import datetime
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.conversation import Conversation
from jaxtrain.data.chat.templates import ChatEncoder, ChatFormat, compile_template, render
from jaxtrain.data.sources.texts import Frame, fill_frame, make_frame
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, NamedTokens, special_ids
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import Decoder, Model

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


def decoder_of(model: Model, *, has_encoder: bool = True) -> Decoder:
    """Return how the model generates; a ConfigError where it does not, or has an encoder that the caller refuses."""
    if model.decoder is None:
        raise ConfigError(f"model {model.name} does not generate text")
    if model.decoder.encode is not None and not has_encoder:
        raise ConfigError(f"model {model.name} reads its prompt with an encoder; use generate_text")
    return model.decoder


def encoder_prompts(tokenizer: Tokenizer) -> tuple[Frame, int | None]:
    """Return what stands around a prompt for an encoder, and the token after an output (None: there is none).

    The tokenizer's own file says it, or its special tokens of the usual names.
    """
    if not isinstance(tokenizer, NamedTokens):
        return Frame((("first", 0),)), tokenizer.end_of_text
    special = special_ids(tokenizer, None)
    end = tokenizer.end_of_text if special.end is None else special.end
    return make_frame(tokenizer, special, pair=False), end


def tokens_before(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer's file puts before a text (a beginning of text)."""
    tokens: list[int] = []
    if isinstance(tokenizer, BpeTokenizer):
        for entry, _ in tokenizer.frame(pair=False):
            if not isinstance(entry, int):
                break
            tokens.append(entry)
    return tuple(tokens)


def encode_prompts(
    model: Model, tokenizer: Tokenizer, prompts: Sequence[str], *, add_special_tokens: bool = True
) -> tuple[list[np.ndarray], set[int]]:
    """Turn prompts into ids: an empty one becomes the end-of-text token, those for an encoder are framed.

    Args:
        model: has a decoder.
        tokenizer: turns texts into ids.
        prompts: the texts.
        add_special_tokens: whether what the tokenizer's file puts before a text is added; those for an encoder are
            always framed.

    Returns:
        What the model reads, int32 [length] each, none empty, and the ids that end a text.

    Raises:
        ConfigError: the model does not generate.
    """
    frame = None
    end = tokenizer.end_of_text
    if decoder_of(model).encode is not None:
        frame, end = encoder_prompts(tokenizer)
    leading = tokens_before(tokenizer) if add_special_tokens else ()
    encoded = []
    for prompt in prompts:
        ids = np.asarray(tokenizer.encode(prompt)).tolist()
        if frame is None:
            ids = [*leading, *ids]
        else:
            ids = fill_frame(frame, [ids], len(ids) + frame.num_special)[0]
        # Documents end with this token in training, so that a text follows it.
        encoded.append(np.array(ids or [tokenizer.end_of_text or 0], np.int32))
    return encoded, set() if end is None else {end}


class PromptReader:
    """Makes prompts; safe to use from several threads.

    Special tokens that a text spells are read as such, as other servers do it: clients write templates by hand.

    Args:
        tokenizer: that has a file.
        chat: how conversations are written; None: the model has no chat template.
        special: of the model.

    Attributes:
        tokenizer, chat: as given.
        stop_tokens: ids at which the model stops.
        special_tokens: text of each special token -> its id.
    """

    def __init__(
        self,
        tokenizer: BpeTokenizer | ByteTokenizer,
        chat: ChatFormat | None,
        special: SpecialTokens,
    ):
        self.tokenizer = tokenizer
        self._special = special
        self.stop_tokens = frozenset(special.stop)
        if tokenizer.end_of_text is not None:
            self.stop_tokens |= {tokenizer.end_of_text}
        if chat is not None:
            self.stop_tokens |= set(chat.stop)
            # Some templates write the date.
            self._template = functools.cache(functools.partial(compile_template, chat))
        self.special_tokens = {tokenizer.decode([token]): token for token in tokenizer.special_ids()}
        self._encoder = ChatEncoder(tokenizer)
        self.chat = chat

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, which may spell special tokens; none is added."""
        (encoded,) = self._encoder.encode([text])
        return encoded.ids.tolist()

    def of_text(self, text: str, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Encode a text that is to be continued, after special tokens (None: if the model was trained so)."""
        if add_special_tokens is None:
            add_special_tokens = self._special.added
        leading = tokens_before(self.tokenizer) if add_special_tokens else ()
        # Something must stand before the first token; documents end with this one in training.
        return (*leading, *self.encode(text)) or (self.tokenizer.end_of_text or 0,)

    def write_chat(self, conversation: Conversation, *, prompt: bool = True) -> str:
        """Write a conversation by the model's template, up to where the answer begins if it is a `prompt`.

        Raises:
            ConfigError: there is no template, or it fails.
            DataError: the template refuses the conversation.
        """
        if self.chat is None:
            raise ConfigError("the model has no chat template; ask in plain text")
        return render(self._template(today=datetime.date.today()), conversation, prompt=prompt).text

    def of_chat(self, conversation: Conversation) -> tuple[int, ...]:
        """Encode a conversation that is to be answered; the template writes the special tokens itself."""
        return tuple(self.encode(self.write_chat(conversation)))


def padded_prompts(model: Model, encoded: Sequence[np.ndarray], new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Put prompts into rows of one length int32 [B, P]; their own lengths are int32 [B].

    Raises:
        ConfigError: a prompt holds an id that the vocabulary does not have, or prompts and new tokens exceed the
            model's positions.
    """
    decoder = decoder_of(model)
    lengths = [len(ids) for ids in encoded]
    longest = max(lengths)
    largest = max(int(np.max(ids)) for ids in encoded)
    if model.vocab_size is not None and largest >= model.vocab_size:
        raise ConfigError(
            f"prompts take ids below {model.vocab_size} (the largest is {largest}); use the model's own tokenizer"
        )
    limit = decoder.max_length
    room = room_for_new_tokens(decoder, longest)
    if longest > limit or not 1 <= new_tokens <= room:
        raise ConfigError(
            f"new_tokens={new_tokens} is below 1, or it and a prompt of {longest} tokens exceed the model's {limit} "
            f"positions; use at most {max(room, 0)}, or shorten the prompt"
        )
    if decoder.encode is None:
        limit -= new_tokens
    short = decoder.short_length
    if short is not None and longest + new_tokens <= short:
        # Padding alone may not make a text a long one, whose positions rotate by other frequencies.
        limit = min(limit, short - new_tokens)
    padded_length = _SHORTEST_PROMPT
    while padded_length < longest:
        padded_length *= 2
    prompts_BP = np.zeros((len(encoded), min(padded_length, limit)), np.int32)
    for row, ids in enumerate(encoded):
        prompts_BP[row, : len(ids)] = ids
    return prompts_BP, np.array(lengths, np.int32)


def room_for_new_tokens(decoder: Decoder, prompt_length: int) -> int:
    """Count the tokens that fit after a prompt; outputs of a model with an encoder have all positions."""
    if decoder.encode is not None:
        return decoder.max_length
    return decoder.max_length - prompt_length
