"""The model that lm-eval-harness asks; it needs the package lm-eval (the extra `harness`)."""

import datetime
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Declared by the extra `harness`: who imports this file has found it.
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)

from jaxtrain.data.chat.formats import ChatFormat
from jaxtrain.data.chat.templates import compile_template, render
from jaxtrain.data.tokenizer import tokenizer_sha256
from jaxtrain.errors import ConfigError
from jaxtrain.inference.generate import generate_ids
from jaxtrain.inference.harness.generation import Asked, fitted, read_generation
from jaxtrain.inference.harness.log_likelihood import LogLikelihood, scoring_decoder
from jaxtrain.inference.harness.scored import power_of_two, scored_pair
from jaxtrain.inference.harness.tokens import TaskTokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.text_stream import TextStream
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.parallel.division import batch_shards

# Answers that are generated at a time on one device, unless something else is asked for.
_ANSWERS = 8


class HarnessModel(LM):
    """A trained model as lm-eval-harness takes it: `lm_eval.simple_evaluate(model=HarnessModel(...), tasks=[...])`.

    Every process of a run asks the same and gets the same answers, so that to the harness there is one.

    Args:
        sharded_model: predicts the next token.
        params: as the model stores them, on its mesh; also quantized.
        model_state: of the model.
        tokens: turns texts into ids.
        form: how chats are written, for tasks that ask in chats; None: there is no template.
        rows: rows of a batch, at most; None: from their lengths for log-likelihoods, and 8 per device for answers.
        seed: of answers that are sampled.
        report: receives what is computed, and how many of its requests are done.

    Raises:
        ConfigError: the model does not predict the next token of a text.
    """

    def __init__(
        self,
        sharded_model: ShardedModel,
        params: Params,
        model_state: ModelState,
        tokens: TaskTokens,
        *,
        form: ChatFormat | None = None,
        rows: int | None = None,
        seed: int = 0,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__()
        self._decoder = scoring_decoder(sharded_model)
        self._sharded_model, self._params, self._tokens = sharded_model, params, tokens
        self._form, self._rows, self._seed, self._report = form, rows, seed, report
        self._template = None if form is None else compile_template(form, today=datetime.date.today())
        self._score = LogLikelihood(sharded_model, params, model_state, rows=rows)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Scores continuations.

        Args:
            requests: `args` of each are (context, continuation).
            disable_tqdm: of the interface; there is no bar.

        Returns:
            For each, the log-probability of the continuation in nats, and whether greedy choice would give it.

        Raises:
            DataError: a continuation without a token of its own, or one that exceeds the model's positions.
        """
        pairs = self._tokens.pairs([(context, continuation) for context, continuation in _arguments(requests)])
        rows = [scored_pair(*pair, max_length=self._decoder.max_length) for pair in pairs]
        return self._score(rows, report=lambda done: self._report(f"{done:,} of {len(rows):,} log-likelihoods"))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts, in windows of the model's positions that predict every token once.

        The first token follows the token that stands before a document. Windows are those of the harness: each but the
        first has as much context as there are positions.

        Args:
            requests: `args` of each are (text,).
            disable_tqdm: of the interface; there is no bar.

        Returns:
            The log-probability of each text in nats.
        """
        rows, owners = [], []
        limit = self._decoder.max_length
        for owner, ids in enumerate(self._tokens.encode([text for (text,) in _arguments(requests)])):
            windows = get_rolling_token_windows(ids, self._tokens.prefix, limit, 1)
            for context, continuation in map(make_disjoint_window, windows):
                rows.append(scored_pair(context, continuation, max_length=limit))
                owners.append(owner)
        scores = self._score(rows, report=lambda done: self._report(f"{done:,} of {len(rows):,} windows of texts"))
        totals = np.zeros(len(requests))
        np.add.at(totals, owners, [score for score, _ in scores])
        return totals.tolist()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers contexts up to a stop; a context that is too long loses its beginning.

        Args:
            requests: `args` of each are (context, settings), see `read_generation`.
            disable_tqdm: of the interface; there is no bar.

        Returns:
            The answers, without what ended them.

        Raises:
            ConfigError: a setting that is not known.
        """
        found = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, (_, settings) in enumerate(_arguments(requests)):
            groups.setdefault(json.dumps(settings, sort_keys=True, default=repr), []).append(i)
        done = 0
        for members in groups.values():
            settings = requests[members[0]].args[1]
            asked = read_generation(settings, task=str(requests[members[0]].task_name))
            contexts = self._tokens.contexts([requests[i].args[0] for i in members])
            order = sorted(range(len(members)), key=lambda k: (-len(contexts[k]), contexts[k], k))
            for at in range(0, len(order), self._answer_rows):
                batch = order[at : at + self._answer_rows]
                answers = self._answers([contexts[k] for k in batch], asked, seed=self._seed + done)
                for k, answer in zip(batch, answers, strict=True):
                    found[members[k]] = answer
                done += len(batch)
                self._report(f"{done:,} of {len(requests):,} answers")
        return found

    @property
    def _answer_rows(self) -> int:
        layout = self._sharded_model.layout
        shards = batch_shards(layout.mesh.shape, layout.rules["batch"])
        return _ANSWERS * shards if self._rows is None else -(-self._rows // shards) * shards

    def _answers(self, contexts: Sequence[list[int]], asked: Asked, *, seed: int) -> list[str]:
        """The answers to one batch of contexts."""
        limit = self._decoder.max_length
        fit = [fitted(ids or [self._tokens.prefix], new_tokens=asked.new_tokens, max_length=limit) for ids in contexts]
        # A last batch that is not full would compile for its own size; rows that fill it up repeat the shortest.
        filled = [np.array(ids, np.int32) for ids, _ in fit]
        filled += [filled[-1]] * (min(self._answer_rows, power_of_two(len(filled), 1)) - len(filled))
        new_BT = generate_ids(
            self._sharded_model,
            self._params,
            filled,
            new_tokens=fit[0][1],
            sampling=Sampling(asked.temperature, asked.top_k, asked.top_p),
            seed=seed,
        )
        return [self._text(new_T, asked) for new_T in new_BT[: len(contexts)].tolist()]

    def _text(self, new_T: Sequence[int], asked: Asked) -> str:
        stream = TextStream(self._tokens.tokenizer, stop=asked.until, stop_tokens=self._tokens.stop)
        for token in new_T:
            stream.feed(token)
            if stream.stopped:
                break
        stream.finish()
        return stream.text

    @property
    def tokenizer_name(self) -> str:
        """A name that another tokenizer or chat template does not have."""
        template = "" if self._form is None else self._form.source
        digest = hashlib.sha256(template.encode()).hexdigest()
        return f"jaxtrain-{tokenizer_sha256(self._tokens.tokenizer)[:16]}-{digest[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the model's template; empty where none is used."""
        return "" if self._form is None or not chat_template else self._form.source

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Writes messages as text.

        Args:
            chat_history: `role` and `content` of each message.
            add_generation_prompt: whether the text ends where an answer begins; otherwise the last message is the
                beginning of an answer, and the text ends with it.

        Raises:
            ConfigError: the model has no template, or it fails.
            DataError: the template refuses the messages.
        """
        if self._template is None:
            raise ConfigError("the model has no chat template; leave --chat out")
        where = "a chat of the task"
        text = render(self._template, chat_history, prompt=add_generation_prompt, where=where).text
        if add_generation_prompt:
            return text
        said = chat_history[-1]["content"].strip()
        return text[: text.rindex(said) + len(said)]


def _arguments(requests: Sequence[Instance]) -> list[tuple[Any, ...]]:
    return [request.args for request in requests]
