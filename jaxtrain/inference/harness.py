"""A model as benchmarks ask it: log-likelihoods of continuations and of whole texts, and answers.

Shapes: R rows, L length, S scored tokens, D embed, V vocabulary.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.templates import ChatEncoder, ChatFormat
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, encode_all
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.inference.decoding import Writing, generation_pieces
from jaxtrain.inference.generate import TextStream
from jaxtrain.inference.prompts import SpecialTokens, decoder_of, text_ends, tokens_before
from jaxtrain.inference.sampling import Sampling
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.ops.loss.cross_entropy import DeferredLogits
from jaxtrain.parallel.division import batch_shards
from jaxtrain.train.batch import batch_shardings, check_ids

# Answers that are generated at a time on one device, unless something else is asked for.
_ANSWERS = 8
# Widths of the arrays of scored tokens, so that few shapes are compiled: a word, a sentence, then powers of two.
_WIDTHS = (8, 64, 512)
_SHORTEST_ROW = 32
# Tokens of a batch on one device, and the most rows of one.
_TOKENS = 8192
_MOST_ROWS = 64
# Bytes of the float32 logits that one device holds at a time.
_LOGITS_BYTES = 128 * 2**20
# What stands between two documents of bytes, which have no token for it.
_NEWLINE = ord("\n")
# Names that tasks use for the number of tokens, in the order in which they count, and the harness's own default.
_COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = ("until", *_COUNTS, "do_sample", "temperature", "top_k", "top_p")
_DEFAULT_TOKENS = 256


@dataclass(frozen=True)
class TaskTokens:
    """Encodes the texts of tasks, as a published tokenizer makes them for its own model.

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
            return [one.ids.tolist() for one in self.chats.encode(texts)]
        return [ids.tolist() for ids in encode_all(self.tokenizer, texts)]

    def contexts(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts that begin a row: with what the tokenizer's file puts before them, unless it is there."""
        size = len(self.leading)
        return [ids if tuple(ids[:size]) == self.leading else [*self.leading, *ids] for ids in self.encode(texts)]

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Encodes contexts and continuations so that together they are the tokens of the whole text.

        Spaces that end a context belong to the first word after it, as tokenizers read them. A continuation without
        context follows the token that stands before a document.

        Args:
            pairs: (context, continuation) each.

        Returns:
            Ids of the context, at least one, and ids of the continuation, at least one.

        Raises:
            DataError: a continuation has no token of its own.
        """
        stripped = [context.rstrip() for context, _ in pairs]
        wholes = self.contexts([context + continuation for context, continuation in pairs])
        found = []
        for pair, shorter, context, whole in zip(pairs, stripped, self.contexts(stripped), wholes, strict=True):
            if not shorter:
                # The token before a document may be what the tokenizer's file puts there.
                whole, context = whole[len(self.leading) :], [self.prefix]
            continuation = whole[len(context) :] if shorter or whole[:1] == context else whole
            if not continuation:
                raise DataError(
                    f"the continuation {pair[1][:40]!r} of {pair[0][-40:]!r} has no token of its own; let the task "
                    "begin it with a space or a line end"
                )
            found.append((context, continuation))
        return found


def task_tokens(tokenizer: BpeTokenizer | ByteTokenizer, special: SpecialTokens, form: ChatFormat | None) -> TaskTokens:
    """Finds how the texts of tasks are encoded.

    Args:
        tokenizer, special: of the model.
        form: of the chats in which the tasks ask; None: they ask in plain texts.
    """
    leading = tokens_before(tokenizer) if special.added else ()
    begin = tokenizer.token_id(special.named.get("bos_token", ""))
    known = begin if begin is not None else next(iter(special.stop), tokenizer.end_of_text)
    prefix, stop = _NEWLINE if known is None else known, frozenset(text_ends(tokenizer, special, form))
    return TaskTokens(tokenizer, leading, prefix, stop, None if form is None else ChatEncoder(tokenizer))


@dataclass(frozen=True)
class Scored:
    """A row of which the last tokens, `targets`, are scored; the last of `inputs` predicts the last of them."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class ScoredBatch:
    """Indices of rows that are computed together, and what inputs, targets and their number are padded to."""

    rows: tuple[int, ...]
    length: int
    width: int
    size: int


def scored_pair(context: Sequence[int], continuation: Sequence[int], *, max_length: int) -> Scored:
    """Makes the row of a continuation; what the model has no positions for is cut from the left of the context."""
    if len(continuation) > max_length:
        raise DataError(f"a continuation of {len(continuation)} tokens exceeds the model's {max_length} positions")
    # The last token is predicted, and never read.
    ids = [*context, *continuation][-(max_length + 1) :]
    return Scored(tuple(ids[:-1]), tuple(continuation))


def scored_windows(ids: Sequence[int], *, prefix: int, max_length: int) -> list[Scored]:
    """Makes the rows of a whole text: each predicts as many tokens as the model has positions, the last one the rest.

    Every token is predicted once, the first one after `prefix`. The last row has as much context as there are
    positions, as the harness has it.
    """
    row, found = (prefix, *ids), []
    for start in range(0, len(ids), max_length):
        end = min(start + max_length, len(ids))
        found.append(Scored(row[max(0, end - max_length) : end], tuple(ids[start:end])))
    return found


def batches_of(
    rows: Sequence[Scored], *, max_length: int, short_length: int | None, shards: int, largest: int | None
) -> Iterator[ScoredBatch]:
    """Puts rows of similar lengths together, the longest first, in few different shapes.

    Rows of up to `short_length` are in no batch that is longer (see `Decoder`). A batch has `largest` rows at most, or
    as many as hold 8,192 tokens for each of the shards into which it divides.
    """
    is_long = [short_length is not None and len(row.inputs) > short_length for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].inputs), rows[i].inputs, rows[i].targets))
    at = 0
    while at < len(order):
        first = order[at]
        room = max_length if short_length is None or is_long[first] else short_length
        length = min(_power_of_two(len(rows[first].inputs), _SHORTEST_ROW), room)
        own = max(1, min(_MOST_ROWS, _TOKENS // length)) if largest is None else -(-largest // shards)
        taken = [i for i in order[at : at + shards * own] if is_long[i] == is_long[first]]
        at += len(taken)
        most = max(len(rows[i].targets) for i in taken)
        width = next((width for width in _WIDTHS if most <= width), _power_of_two(most, _WIDTHS[-1]))
        size = min(own, _power_of_two(-(-len(taken) // shards), 1))
        yield ScoredBatch(tuple(taken), length, width, shards * size)


def _power_of_two(count: int, least: int) -> int:
    """The smallest of `least`, twice as much, and so on that is at least `count`."""
    while least < count:
        least *= 2
    return least


class LogLikelihood:
    """Scores tokens with a model; logits are computed where tokens are scored alone.

    Raises:
        ConfigError: the model does not predict the next token of a text.
    """

    def __init__(
        self, sharded_model: ShardedModel, params: Params, model_state: ModelState, *, rows: int | None = None
    ) -> None:
        decoder = decoder_of(sharded_model.model, has_encoder=False)
        layout = sharded_model.layout
        self.max_length, self._short_length = decoder.max_length, decoder.short_length
        self.shards = batch_shards(layout.mesh.shape, layout.rules["batch"])
        self._sharded_model, self._params, self._model_state, self._rows = sharded_model, params, model_state, rows
        # Replicated, so that every process has all rows.
        self._jitted = jax.jit(self._score, out_shardings=NamedSharding(sharded_model.mesh, PartitionSpec()))

    def __call__(
        self, rows: Sequence[Scored], *, report: Callable[[int], None] = lambda count: None
    ) -> list[tuple[float, bool]]:
        """The sum of the log-probabilities of each row's targets in nats, and whether each of them is the likeliest.

        Args:
            rows: what is scored.
            report: receives the number of rows that are done.

        Raises:
            DataError: an id that the model does not have.
        """
        found: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        waiting: list[tuple[ScoredBatch, Any]] = []
        done = 0

        def read() -> None:
            nonlocal done
            batch, scores = waiting.pop(0)
            log_RS, greedy_RS = jax.device_get(scores)
            for r, i in enumerate(batch.rows):
                count = len(rows[i].targets)
                found[i] = (float(log_RS[r, :count].sum(dtype=np.float64)), bool(greedy_RS[r, :count].all()))
            done += len(batch.rows)
            report(done)

        for batch in batches_of(
            rows,
            max_length=self.max_length,
            short_length=self._short_length,
            shards=self.shards,
            largest=self._rows,
        ):
            waiting.append((batch, self._jitted(self._params, self._model_state, self._placed(rows, batch))))
            # The device computes the next batch while the host reads this one.
            if len(waiting) > 1:
                read()
        while waiting:
            read()
        return found

    def _placed(self, rows: Sequence[Scored], batch: ScoredBatch) -> dict[str, jax.Array]:
        """The arrays of a batch on the mesh: inputs [R, L], and positions and targets [R, S]."""
        inputs_RL = np.zeros((batch.size, batch.length), np.int32)
        positions_RS, targets_RS = (np.zeros((batch.size, batch.width), np.int32) for _ in range(2))
        for r, i in enumerate(batch.rows):
            length, count = len(rows[i].inputs), len(rows[i].targets)
            inputs_RL[r, :length] = rows[i].inputs
            positions_RS[r, :count] = np.arange(length - count, length)
            targets_RS[r, :count] = rows[i].targets
        arrays = {"inputs": inputs_RL, "positions": positions_RS, "targets": targets_RS}
        vocab_size = self._sharded_model.model.vocab_size
        if vocab_size is not None:
            check_ids(arrays, limits={"inputs": vocab_size, "targets": vocab_size}, where="a text of the task")
        shardings = batch_shardings(arrays, self._sharded_model.layout, {}, {})
        return {
            name: jax.make_array_from_callback(array.shape, shardings[name], array.__getitem__)
            for name, array in arrays.items()
        }

    def _score(
        self, params: Params, model_state: ModelState, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities float32 [R, S], and whether each target is the most likely token, bool [R, S]."""
        sharded_model, positions_RS = self._sharded_model, batch["positions"]
        with sharded_model.context():
            outputs, _ = sharded_model.apply_deferred(params, model_state, batch["inputs"], key=None, train=False)
            logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
            deferred = isinstance(logits, DeferredLogits)
            vocabulary = logits.vocabulary if deferred else logits.shape[-1]
            at_RSX = jnp.take_along_axis(logits.hidden if deferred else logits, positions_RS[..., None], axis=1)

            def scores(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                values, targets_RC = chunk
                logits_RCV = dataclasses.replace(logits, hidden=values).logits() if deferred else values
                logits_RCV = logits_RCV.astype(jnp.float32)
                target_RC = jnp.take_along_axis(logits_RCV, targets_RC[..., None], axis=-1)[..., 0]
                greedy_RC = jnp.argmax(logits_RCV, axis=-1) == targets_RC
                return target_RC - jax.nn.logsumexp(logits_RCV, axis=-1), greedy_RC

            rows, width = positions_RS.shape
            size = width
            while size > 1 and 4 * (rows // self.shards) * size * vocabulary > _LOGITS_BYTES:
                size //= 2
            if size == width:
                return scores((at_RSX, batch["targets"]))
            chunks = jax.tree.map(
                lambda leaf: jnp.moveaxis(leaf.reshape(rows, width // size, size, *leaf.shape[2:]), 1, 0),
                (at_RSX, batch["targets"]),
            )
            found = jax.lax.map(scores, chunks)
            return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(rows, width), found)


def read_generation(settings: Mapping[str, Any], *, task: str) -> Writing:
    """Reads the settings of a task (`generation_kwargs`).

    Sampling begins where `do_sample` is true or a temperature above 0 is given; `do_sample: false` is greedy.

    Raises:
        ConfigError: a setting that is not known, or a value out of its range; names the task.
    """
    unknown = sorted(set(settings) - set(_KNOWN))
    until = settings.get("until") or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    new_tokens = next((settings[name] for name in _COUNTS if settings.get(name) is not None), _DEFAULT_TOKENS)
    if unknown or not isinstance(new_tokens, int) or new_tokens < 1:
        wrong = f"{unknown[0]} is not known" if unknown else f"the number of tokens is {new_tokens!r}"
        raise ConfigError(f"generation_kwargs of the task {task}: {wrong}; jaxtrain takes {', '.join(_KNOWN)}")
    temperature, samples = settings.get("temperature"), settings.get("do_sample")
    if temperature is None:
        temperature = 1.0 if samples else 0.0
    if samples is False:
        temperature = 0.0
    # Empty stops say nothing; `top_k: 0` leaves every token.
    sampling = Sampling(temperature, settings.get("top_k") or None, settings.get("top_p"))
    return Writing(new_tokens, sampling, stop=tuple(one for one in until if one))


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
        self._score = LogLikelihood(sharded_model, params, model_state, rows=rows)
        self._length, shards = self._score.max_length, self._score.shards
        self._sharded_model, self._params, self.tokens = sharded_model, params, tokens
        self._seed, self._report = seed, report
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
        rows = [scored_pair(*pair, max_length=self._length) for pair in self.tokens.pairs(pairs)]
        return self._score(rows, report=lambda done: self._report(f"{done:,} of {len(rows):,} log-likelihoods"))

    def score_texts(self, texts: Sequence[str]) -> list[float]:
        """Log-probabilities of whole texts in nats, in windows that predict every token once."""
        windows = [
            scored_windows(ids, prefix=self.tokens.prefix, max_length=self._length) for ids in self.tokens.encode(texts)
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
            contexts = self.tokens.contexts([asked[i][0] for i in members])
            order = sorted(range(len(members)), key=lambda k: (-len(contexts[k]), contexts[k], k))
            for at in range(0, len(order), self._answer_rows):
                batch = order[at : at + self._answer_rows]
                answers = self._answers([contexts[k] for k in batch], read[name], first_row=done)
                for k, answer in zip(batch, answers, strict=True):
                    found[members[k]] = answer
                done += len(batch)
                self._report(f"{done:,} of {len(asked):,} answers")
        return found

    def _answers(self, contexts: Sequence[list[int]], asked: Writing, *, first_row: int) -> list[str]:
        """The answers to one batch of contexts, which lose their beginning where they and the answer do not fit."""
        new_tokens = min(asked.new_tokens or 1, self._length - 1)
        room = self._length - new_tokens
        # A last batch that is not full would compile for its own size; rows that fill it up repeat the shortest.
        filled = [np.array((ids or [self.tokens.prefix])[-room:], np.int32) for ids in contexts]
        filled += [filled[-1]] * (min(self._answer_rows, _power_of_two(len(filled), 1)) - len(filled))
        writing = dataclasses.replace(asked, new_tokens=new_tokens, seed=self._seed, first_row=first_row)
        (found,) = generation_pieces(self._sharded_model, self._params, filled, writing)
        answers = []
        for new_T in found.tokens[: len(contexts)].tolist():
            stream = TextStream(self.tokens.tokenizer, asked.stop, self.tokens.stop)
            answers.append("".join([*map(stream.feed, new_T), stream.finish()]))
        return answers


HEADER = ("task", "version", "filter", "shots", "metric", "value", "stderr", "rows")


def result_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each metric of each task and group, in the order of the harness.

    Args:
        found: what `lm_eval.simple_evaluate` returns.

    Returns:
        Rows with the entries of `HEADER`, and `higher_is_better`; an entry that the harness does not give is None.
        `rows` are the documents that were asked.
    """
    rows = []
    for task, metrics in {**found["results"], **found.get("groups", {})}.items():
        better = found.get("higher_is_better", {}).get(task) or {}
        for key, value in metrics.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filtered}")  # "N/A" where there is none
            rows.append(
                {
                    "task": task,
                    "version": found.get("versions", {}).get(task),
                    "filter": filtered,
                    "shots": found.get("n-shot", {}).get(task),
                    "metric": metric,
                    "value": value,
                    "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                    "rows": found.get("n-samples", {}).get(task, {}).get("effective"),
                    "higher_is_better": better.get(metric),
                }
            )
    return rows


def shown_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as texts, in the order of `HEADER`."""

    def text(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    return [tuple(text(row[name]) for name in HEADER) for row in rows]
