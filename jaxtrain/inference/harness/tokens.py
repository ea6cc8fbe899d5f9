"""How texts of a task become tokens: as a published tokenizer makes them for its own model.

Shapes are Python lists: rows are padded where they become arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.templates import ChatEncoder, ChatFormat, chat_encoder
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, encode_all
from jaxtrain.errors import DataError
from jaxtrain.inference.prompts import leading_tokens
from jaxtrain.inference.special import SpecialTokens

# What stands between two documents of bytes, which have no token for it.
_NEWLINE = ord("\n")


@dataclass(frozen=True)
class TaskTokens:
    """Encodes the texts of tasks.

    Attributes:
        tokenizer: of the model.
        leading: ids that the tokenizer's file puts before a text.
        prefix: id after which a text without context is scored.
        stop: ids at which the model ends an answer.
        chats: reads the special tokens that a chat template writes; None: texts that spell them are plain text.
    """

    tokenizer: Tokenizer
    leading: tuple[int, ...]
    prefix: int
    stop: frozenset[int]
    chats: ChatEncoder | None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts, with nothing around them."""
        if self.chats is not None:
            found: Sequence[np.ndarray] = [one.ids for one in self.chats.encode(texts)]
        else:
            found = encode_all(self.tokenizer, texts)
        return [ids.tolist() for ids in found]

    def contexts(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts that begin a row: with what the tokenizer's file puts before them, unless it is there."""
        encoded = self.encode(texts)
        size = len(self.leading)
        return [ids if tuple(ids[:size]) == self.leading else [*self.leading, *ids] for ids in encoded]

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Encodes contexts and continuations so that together they are the tokens of the whole text.

        Spaces that end a context belong to the first word after it, as tokenizers read them. A continuation without
        context follows the token that stands before a document.

        Args:
            pairs: (context, continuation) each.

        Returns:
            Ids of the context, at least one, and ids of the continuation, at least one.

        Raises:
            DataError: A continuation has no token of its own.
        """
        stripped = [context.rstrip() for context, _ in pairs]
        wholes = self.contexts([context + continuation for context, continuation in pairs])
        found = []
        for pair, shorter, context, whole in zip(pairs, stripped, self.contexts(stripped), wholes, strict=True):
            if not shorter:
                # The token before a document may be what the tokenizer's file puts there.
                whole = whole[len(self.leading) :]
                context = [self.prefix]
                continuation = whole[1:] if whole[:1] == context else whole
            else:
                continuation = whole[len(context) :]
            if not continuation:
                raise DataError(
                    f"the continuation {pair[1][:40]!r} of {pair[0][-40:]!r} has no token of its own, so it has no "
                    "log-likelihood; let the task begin it with a space or a line end"
                )
            found.append((context, continuation))
        return found


def task_tokens(tokenizer: BpeTokenizer | ByteTokenizer, special: SpecialTokens, form: ChatFormat | None) -> TaskTokens:
    """Finds how the texts of tasks are encoded.

    Args:
        tokenizer, special: Of the model.
        form: Of the chats in which the tasks ask; None: they ask in plain texts.
    """
    leading = leading_tokens(tokenizer) if special.added else ()
    begin, end = tokenizer.token_id(special.named.get("bos_token", "")), tokenizer.end_of_text
    stop = dict.fromkeys([*special.stop, *(() if end is None else (end,)), *(() if form is None else form.stop)])
    known = begin if begin is not None else next(iter(special.stop), end)
    prefix = _NEWLINE if known is None else known
    return TaskTokens(tokenizer, leading, prefix, frozenset(stop), None if form is None else chat_encoder(tokenizer))
