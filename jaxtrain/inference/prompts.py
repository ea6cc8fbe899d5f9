"""How the prompt of a model with an encoder becomes its input, as rows of pairs of texts are made in training."""

from dataclasses import dataclass

from jaxtrain.data import Tokenizer
from jaxtrain.data.special import NamedTokens, special_ids
from jaxtrain.data.text.frame import Frame, fill_frame, make_frame


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
