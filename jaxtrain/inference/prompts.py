"""How prompts become ids; those of a model with an encoder as rows of pairs of texts are made in training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.data.text.frame import Frame, fill_frame, make_frame
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, NamedTokens, special_ids
from jaxtrain.errors import ConfigError
from jaxtrain.inference.decoding import decoder_of
from jaxtrain.models.model import Model


@dataclass(frozen=True)
class EncoderPrompts:
    """What stands around a prompt, and after an output.

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


def encoder_prompts(tokenizer: Tokenizer) -> EncoderPrompts:
    """How a tokenizer's prompts are framed: by its own file, or by its special tokens of the usual names."""
    if not isinstance(tokenizer, NamedTokens):
        return EncoderPrompts(None, tokenizer.end_of_text)
    special = special_ids(tokenizer, None)
    end = tokenizer.end_of_text if special.end is None else special.end
    return EncoderPrompts(make_frame(tokenizer, special, pair=False), end)


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts as ids.

    Attributes:
        tokens: what the model reads, int32 [length] each, none empty.
        given: what stands before the new tokens in the text; nothing for a model with an encoder.
        end: token that ends a text; None: there is none.
    """

    tokens: list[np.ndarray]
    given: list[list[int]]
    end: int | None


def leading_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that the tokenizer's file puts before a text: a beginning of text, or none."""
    before, _ = tokens_around(tokenizer)
    return before


def tokens_around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that the tokenizer's file puts before a text, and those after it."""
    if not isinstance(tokenizer, BpeTokenizer):
        return (), ()
    entries = [entry for entry, _ in tokenizer.frame(pair=False)]
    place = entries.index("first") if "first" in entries else 0
    before, after = entries[:place], entries[place + 1 :]
    return tuple(one for one in before if isinstance(one, int)), tuple(one for one in after if isinstance(one, int))


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that no text has, as far as the tokenizer says."""
    return frozenset(tokenizer.special_ids() if isinstance(tokenizer, NamedTokens) else ())


def check_characters(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Check that a tokenizer can read texts: in Python they may hold halves of characters, as of bytes in arguments.

    Raises:
        ConfigError: one does. `ByteTokenizer` reads them.
    """
    for text in texts:
        if not isinstance(tokenizer, ByteTokenizer) and any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"the prompt {text[:30]!a} holds what is no character; give text in UTF-8")


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
        ConfigError: the model does not generate, or a prompt has halves of characters.
    """
    check_characters(tokenizer, prompts)
    encoded = [np.asarray(tokenizer.encode(prompt), np.int32) for prompt in prompts]
    start, given = 0 if tokenizer.end_of_text is None else tokenizer.end_of_text, [ids.tolist() for ids in encoded]
    end = tokenizer.end_of_text
    if decoder_of(model).encode is not None:
        framing = encoder_prompts(tokenizer)
        encoded, end = [np.asarray(framing.framed(ids), np.int32) for ids in given], framing.end
        given = [[] for _ in given]
    elif add_special_tokens:
        leading = leading_tokens(tokenizer)
        encoded = [np.array([*leading, *ids], np.int32) for ids in given]
    return EncodedPrompts([ids if len(ids) else np.array([start], np.int32) for ids in encoded], given, end)
