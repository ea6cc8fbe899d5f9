"""A trained model as a benchmark asks it: log-likelihoods of continuations and of whole texts, and answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.inference.generate import generate_ids
from jaxtrain.inference.harness.generation import Asked, fitted, read_generation
from jaxtrain.inference.harness.log_likelihood import LogLikelihood, scoring_decoder
from jaxtrain.inference.harness.scored import power_of_two, scored_pair, scored_windows
from jaxtrain.inference.harness.tokens import TaskTokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.text_stream import TextStream
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.parallel.division import batch_shards

# Answers that are generated at a time on one device, unless something else is asked for.
_ANSWERS = 8


class AskedModel:
    """Answers the three kinds of questions of benchmarks.

    Args:
        sharded_model: predicts the next token.
        params: as the model stores them, on its mesh; also quantized.
        model_state: of the model.
        tokens: turns texts into ids.
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
        rows: int | None = None,
        seed: int = 0,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._length = scoring_decoder(sharded_model).max_length
        self._sharded_model, self._params, self._tokens = sharded_model, params, tokens
        self._seed, self._report = seed, report
        self._score = LogLikelihood(sharded_model, params, model_state, rows=rows)
        shards = batch_shards(sharded_model.mesh.shape, sharded_model.layout.rules["batch"])
        self._answer_rows = _ANSWERS * shards if rows is None else -(-rows // shards) * shards

    def score_continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Scores continuations of contexts.

        Args:
            pairs: (context, continuation) each. A context that is too long loses its beginning.

        Returns:
            For each, the log-probability of the continuation in nats, and whether greedy choice would give it.

        Raises:
            DataError: a continuation without a token of its own, or one that exceeds the model's positions.
        """
        rows = [scored_pair(*pair, max_length=self._length) for pair in self._tokens.pairs(pairs)]
        return self._score(rows, report=lambda done: self._report(f"{done:,} of {len(rows):,} log-likelihoods"))

    def score_texts(self, texts: Sequence[str]) -> list[float]:
        """Scores whole texts, in windows of the model's positions that predict every token once.

        The first token follows the token that stands before a document.

        Returns:
            The log-probability of each text in nats.
        """
        windows = [
            scored_windows(ids, prefix=self._tokens.prefix, max_length=self._length)
            for ids in self._tokens.encode(texts)
        ]
        rows = [row for of_text in windows for row in of_text]
        scores = iter(
            self._score(rows, report=lambda done: self._report(f"{done:,} of {len(rows):,} windows of texts"))
        )
        return [float(sum(next(scores)[0] for _ in of_text)) for of_text in windows]

    def answer(self, asked: Sequence[tuple[str, Mapping[str, Any]]], *, task: str) -> list[str]:
        """Continues contexts up to a stop. A context that is too long loses its beginning.

        Args:
            asked: (context, settings) each; settings as `read_generation` takes them.
            task: for messages.

        Returns:
            The answers, without what ended them.

        Raises:
            ConfigError: a setting that is not known.
        """
        found = [""] * len(asked)
        groups: dict[str, list[int]] = {}
        for i, (_, settings) in enumerate(asked):
            groups.setdefault(json.dumps(settings, sort_keys=True, default=repr), []).append(i)
        # All settings are read before anything is computed.
        read = {name: read_generation(asked[members[0]][1], task=task) for name, members in groups.items()}
        done = 0
        for name, members in groups.items():
            contexts = self._tokens.contexts([asked[i][0] for i in members])
            order = sorted(range(len(members)), key=lambda k: (-len(contexts[k]), contexts[k], k))
            for at in range(0, len(order), self._answer_rows):
                batch = order[at : at + self._answer_rows]
                answers = self._answers([contexts[k] for k in batch], read[name], seed=self._seed + done)
                for k, answer in zip(batch, answers, strict=True):
                    found[members[k]] = answer
                done += len(batch)
                self._report(f"{done:,} of {len(asked):,} answers")
        return found

    def _answers(self, contexts: Sequence[list[int]], asked: Asked, *, seed: int) -> list[str]:
        """The answers to one batch of contexts."""
        prefix = [self._tokens.prefix]
        fit = [fitted(ids or prefix, new_tokens=asked.new_tokens, max_length=self._length) for ids in contexts]
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
