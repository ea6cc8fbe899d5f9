"""The model that lm-eval-harness asks; it needs the package lm-eval (the extra `harness`)."""

import datetime
import hashlib
from typing import Any

# Declared by the extra `harness`: who imports this file has found it.
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

from jaxtrain.data.chat.conversation import Conversation, read_messages
from jaxtrain.data.chat.templates import ChatFormat, compile_template, render
from jaxtrain.data.tokenizer import tokenizer_sha256
from jaxtrain.errors import DataError
from jaxtrain.inference.harness import AskedModel


def _pair(request: Instance) -> tuple[Any, Any]:
    """Both arguments of a request."""
    first, second = request.args  # pyright: ignore[reportAssignmentType] the harness declares tuples of any length
    return first, second


class HarnessModel(LM):
    """A trained model as lm-eval-harness takes it: `lm_eval.simple_evaluate(model=HarnessModel(...), tasks=[...])`.

    Every process of a run asks the same and gets the same answers, so that to the harness there is one.

    Args:
        asked: answers the questions.
        form: how chats are written, for tasks that ask in chats; None: there is no template.

    Raises:
        ConfigError: the template has an error.
    """

    def __init__(self, asked: AskedModel, form: ChatFormat | None = None) -> None:
        super().__init__()
        self._asked, self._form = asked, form
        self._template = None if form is None else compile_template(form, today=datetime.date.today())

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Scores continuations, see `AskedModel.score_continuations`."""
        return self._asked.score_continuations([_pair(one) for one in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts, see `AskedModel.score_texts`."""
        return self._asked.score_texts([text for (text,) in (one.args for one in requests)])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers contexts up to a stop, see `AskedModel.answer`."""
        tasks = ", ".join(dict.fromkeys(str(one.task_name) for one in requests))
        return self._asked.answer([_pair(one) for one in requests], task=tasks)

    @property
    def tokenizer_name(self) -> str:
        """A name that no other tokenizer or chat template has; the harness keeps requests under it."""
        template = "" if self._form is None else self._form.source
        digest = hashlib.sha256(template.encode()).hexdigest()
        return f"jaxtrain-{tokenizer_sha256(self._asked.tokens.tokenizer)[:16]}-{digest[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the model's template; empty where none is used."""
        return "" if self._form is None or not chat_template else self._form.source

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Writes messages as text, up to where an answer begins, or else to the end of the last message.

        Raises:
            ConfigError: the template fails.
            DataError: the template refuses the messages, or writes the beginning of an answer in other words.
        """
        assert self._template is not None, "the harness writes chats where a template was given"
        where = "a chat of the task"
        messages = read_messages(chat_history, where=where)
        text = render(self._template, Conversation(where, messages), prompt=add_generation_prompt).text
        if add_generation_prompt:
            return text
        said = (messages[-1]["content"] or "").strip()
        end = text.rfind(said)
        if end < 0:
            raise DataError(f"{where}: the template changes the beginning of an answer, {said[:40]!r}")
        return text[: end + len(said)]
