"""Texts, ids and conversations as prompts of the engine."""

import datetime
from collections.abc import Sequence
from typing import Any

from jaxtrain.data.chat.templates import ChatFormat, Template, chat_encoder, compile_template, prompt_text
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.errors import UserError
from jaxtrain.inference.prompts import tokens_around
from jaxtrain.inference.server.call import Prompt
from jaxtrain.inference.server.fields import is_whole, shown
from jaxtrain.inference.server.refused import RefusedError
from jaxtrain.inference.special import SpecialTokens

_NOTHING_SPECIAL = SpecialTokens()


class PromptReader:
    """Makes prompts; safe to use from several threads.

    Special tokens that a text spells are read as such, as other servers do it: clients write templates by hand.

    Args:
        tokenizer: between texts and ids.
        chat: how conversations are written; None: there is no template.
        vocab_size: ids that the model has.
        special: what is known of the special tokens besides.

    Attributes:
        tokenizer, chat, vocab_size, special: as given.
        stop_tokens: ids at which the model stops.
        special_tokens: text of each special token -> its id.
    """

    def __init__(
        self,
        tokenizer: BpeTokenizer | ByteTokenizer,
        chat: ChatFormat | None,
        *,
        vocab_size: int,
        special: SpecialTokens = _NOTHING_SPECIAL,
    ):
        self.tokenizer, self.chat, self.vocab_size, self.special = tokenizer, chat, vocab_size, special
        end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        self.stop_tokens = frozenset([*end, *special.stop, *(() if chat is None else chat.stop)])
        self.special_tokens = {tokenizer.decode([one]): one for one in tokenizer.special_ids()}
        self._encoder = chat_encoder(tokenizer)
        self._begins, self._ends = tokens_around(tokenizer)
        self._template: tuple[datetime.date, Template] | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text.

        Args:
            text: may spell special tokens.
            add_special_tokens: whether what the tokenizer's file puts around a text is added.
        """
        ids = next(iter(self._encoder.encode([text]))).ids.tolist()
        return [*self._begins, *ids, *self._ends] if add_special_tokens else ids

    def of_text(self, text: str, *, add_special_tokens: bool | None = None) -> Prompt:
        """A text that is to be continued: special tokens are added before it, none after it.

        Args:
            text: may spell special tokens.
            add_special_tokens: whether what the tokenizer's file puts before a text is added; None: if the model was
                trained so.

        Raises:
            RefusedError: the text has ids that the model does not have.
        """
        ids = self.encode(text, add_special_tokens=False)
        adds = self.special.added if add_special_tokens is None else add_special_tokens
        added = [*self._begins] if adds else []
        if not added and not ids:
            # Something must stand before the first token; documents end with this one in training.
            added = [0 if self.tokenizer.end_of_text is None else self.tokenizer.end_of_text]
        return Prompt(text, self.checked([*added, *ids], "prompt"), len(added))

    def of_tokens(self, ids: Sequence[Any], *, name: str = "prompt") -> Prompt:
        """Ids that are to be continued.

        Raises:
            RefusedError: there is none, or one is no id of the model.
        """
        if not ids:
            raise RefusedError(400, f"{name} holds a list without a token id; give at least one", param=name)
        tokens = self.checked(ids, name)
        return Prompt(self.tokenizer.decode(tokens), tokens)

    def of_messages(self, messages: list[dict[str, str]]) -> Prompt:
        """A conversation that is to be answered.

        Raises:
            RefusedError: there is no template, or it refuses the conversation.
        """
        if self.chat is None:
            raise RefusedError(
                400,
                "this model has no chat template, so it cannot write conversations; use /v1/completions",
                code="no_chat_template",
            )
        try:
            text = prompt_text(self._compiled(self.chat), messages)
        except UserError as error:
            raise RefusedError(400, str(error), param="messages") from None
        # A template writes the special tokens itself.
        ids = self.encode(text, add_special_tokens=False)
        if not ids:
            raise RefusedError(400, "the chat template makes an empty text of messages", param="messages")
        return Prompt(text, self.checked(ids, "messages"))

    def _compiled(self, form: ChatFormat) -> Template:
        """The template of today: some write the date."""
        today = datetime.date.today()
        if self._template is None or self._template[0] != today:
            self._template = (today, compile_template(form, today=today))
        return self._template[1]

    def checked(self, ids: Sequence[Any], name: str) -> tuple[int, ...]:
        """The ids, all of which the model has.

        Args:
            ids: of a text.
            name: of the field that they come from.

        Raises:
            RefusedError: one is no id of the model.
        """
        for one in ids:
            if not is_whole(one) or not 0 <= one < self.vocab_size:
                raise RefusedError(
                    400, f"{name} holds {shown(one)}, which is no token id; use 0 to {self.vocab_size - 1}", param=name
                )
        return tuple(ids)
