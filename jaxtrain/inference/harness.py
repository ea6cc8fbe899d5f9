"""A trained model as lm-eval-harness asks it; needs the package lm-eval (the extra `harness`)."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# Declared by the extra `harness`: `evaluate_tasks` checks that it is installed.
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import Collator, normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from jaxtrain.data.chat.conversation import Conversation, read_messages
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.inference.decoding import Writing, generation_pieces
from jaxtrain.inference.generate import TextStream
from jaxtrain.inference.likelihood import Continuation, LikelihoodScorer
from jaxtrain.inference.opened import OpenedModel
from jaxtrain.inference.prompts import PromptReader, tokens_before
from jaxtrain.inference.sampling import Sampling

# Answers that are generated at a time on one device.
_ANSWERS = 8
# What stands between two documents of bytes, which have no token for it.
_NEWLINE = ord("\n")
_SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")


class HarnessModel(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=HarnessModel(jt.open_model("runs/x")), tasks=[...])`.

    Every process asks the same and gets the same answers, so that to the harness there is one.

    Args:
        opened: a model that writes texts.
        chat: whether the tasks ask in chats, by the template of the model.
        batch_size: most rows of a batch; None: by their length for log-likelihoods, and 8 answers per device.
        report: receives how many requests there are, and how many answers are done.

    Raises:
        ConfigError: the model writes no text, or has no chat template.
    """

    def __init__(
        self,
        opened: OpenedModel,
        *,
        chat: bool = False,
        batch_size: int | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__()
        self._tokenizer = opened.text_tokenizer(chat=chat)
        self._opened = opened
        self._report = report
        self._scorer = LikelihoodScorer(opened.sharded_model, batch_size=batch_size)
        self._answers = batch_size or _ANSWERS * self._scorer.shards
        self._leading: list[int] = []
        if opened.special.added:
            self._leading = list(tokens_before(self._tokenizer))
        self._is_chat = chat
        self._reader = PromptReader(self._tokenizer, opened.chat if chat else None, opened.special)

    @property
    def eot_token_id(self) -> int:
        """The token that stands before a document: what is scored without a context follows it."""
        special = self._opened.special
        begin = self._tokenizer.token_id(special.named.get("bos_token", ""))
        for token in (begin, *special.stop, self._tokenizer.end_of_text):
            if token is not None:
                return token
        return _NEWLINE

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text; None: after what the tokenizer's file puts before a text, unless it begins with it."""
        ids = self._reader.encode(string) if self._is_chat else self._tokenizer.encode(string).tolist()
        if add_special_tokens is None:
            add_special_tokens = ids[: len(self._leading)] != self._leading
        return self._leading + ids if add_special_tokens else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        # Nothing is left of a context of spaces alone: they belong to the first word after it.
        begin = [self.eot_token_id]
        return self._scores([(context or begin, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts in nats, in windows that predict every token once."""
        windows = []
        numbers = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(
                ids,
                prefix_token=self.eot_token_id,
                max_seq_len=self._scorer.max_length,
                context_len=1,
            ):
                windows.append(make_disjoint_window(window))
                numbers.append(number)
        totals = [0.0] * len(requests)
        scores = self._scores(windows)
        for number, (log_probability, _) in zip(numbers, scores, strict=True):
            totals[number] += log_probability
        return totals

    def _scores(self, continuations: Sequence[Continuation]) -> list[tuple[float, bool]]:
        self._report(f"{len(continuations):,} log-likelihoods")
        return self._scorer(
            self._opened.params,
            self._opened.model_state,
            continuations,
        )

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a stop, without it; a context that is too long loses its beginning.

        Raises:
            ConfigError: a task has a setting that is not supported.
        """
        collator = Collator(
            [request.args for request in requests],
            # Of like lengths together, the longest first.
            sort_fn=lambda arguments: (-len(arguments[0]), arguments[0]),
            group_by="gen_kwargs",
            group_fn=operator.itemgetter(1),
        )
        answers: list[str] = []
        for batch in collator.get_batched(n=self._answers):
            writing = read_generation(batch[0][1])
            contexts = [context for context, _ in batch]
            answers += self._continued(contexts, writing, first_row=len(answers))
            self._report(f"{len(answers):,} of {len(requests):,} answers")
        return collator.get_original(answers)

    def _continued(self, contexts: Sequence[str], writing: Writing, *, first_row: int) -> list[str]:
        max_length = self._scorer.max_length
        new_tokens = min(writing.new_tokens or 1, max_length - 1)
        prompts = []
        for context in contexts:
            ids = self.tok_encode(context) or [self.eot_token_id]
            prompts.append(np.array(ids[new_tokens - max_length :], np.int32))
        # A last batch that is not full would compile for its own size.
        prompts += [prompts[-1]] * (self._answers - len(prompts))
        writing = dataclasses.replace(
            writing,
            new_tokens=new_tokens,
            stop_tokens=self._reader.stop_tokens,
            first_row=first_row,
        )
        (generated,) = generation_pieces(
            self._opened.sharded_model,
            self._opened.params,
            prompts,
            writing,
        )
        answers = []
        for tokens in generated.tokens[: len(contexts)].tolist():
            stream = TextStream(self._tokenizer, writing.stop, self._reader.stop_tokens)
            text = "".join(map(stream.feed, tokens))
            answers.append(text + stream.finish())
        return answers

    @property
    def tokenizer_name(self) -> str:
        """A name under which the harness may keep requests."""
        return str(self._opened.path)

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Write messages as text, up to where an answer begins, or else to the end of the last message.

        Raises:
            ConfigError: the template fails.
            DataError: the template refuses the messages, or writes the beginning of an answer in other words.
        """
        where = "a chat of the task"
        messages = read_messages(chat_history, where=where)
        text = self._reader.write_chat(Conversation(where, messages), prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        beginning = (messages[-1]["content"] or "").strip()
        before, separator, _ = text.rpartition(beginning)
        if not separator:
            raise DataError(f"{where}: the template changes the beginning of an answer, {beginning[:40]!r}")
        return before + beginning


def read_generation(settings: Mapping[str, Any]) -> Writing:
    """Read the settings of a task (`generation_kwargs`).

    Sampling begins where `do_sample` is true or a temperature above 0 is given; `do_sample: false` is greedy.

    Raises:
        ConfigError: a setting that is not supported.
    """
    settings = {**normalize_gen_kwargs(dict(settings))}
    unknown = sorted(set(settings) - set(_SETTINGS))
    if unknown:
        raise ConfigError(
            f"generation_kwargs of a task: {unknown[0]} is not supported; supported are {', '.join(_SETTINGS)}"
        )
    temperature = 0.0
    if settings["do_sample"]:
        temperature = settings.get("temperature", 1.0)
    sampling = Sampling(
        temperature,
        # 0 leaves every token.
        top_k=settings.get("top_k") or None,
        top_p=settings.get("top_p"),
    )
    # An empty text is no stop.
    stop = [text for text in settings["until"] if text]
    return Writing(settings["max_gen_toks"], sampling, stop=stop)
