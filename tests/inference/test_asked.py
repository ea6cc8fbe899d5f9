"""What benchmarks ask of a model, without lm-eval: against log-softmax and argmax of logits, row by row in NumPy."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data.chat.templates import BUILT_IN, ChatFormat
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.inference.harness import (
    AskedModel,
    LogLikelihood,
    Scored,
    batches_of,
    read_generation,
    scored_pair,
    task_tokens,
)
from jaxtrain.inference.prompts import SpecialTokens

LENGTH = 24
NEWLINE = 10
LONG = pytest.mark.long


@pytest.fixture(scope="module", params=[pytest.param(1, id="one device"), pytest.param(4, id="data=4", marks=LONG)])
def sharded(request):
    model = jt.build_model(
        {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": LENGTH},
        input_shape=(LENGTH,),
        vocab_size=256,
    )
    return jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[: request.param]))


@pytest.fixture(scope="module")
def params(sharded):
    return jax.jit(sharded.init)(jax.random.key(3))[0]


@pytest.fixture(scope="module")
def log_softmax(sharded, params):
    """ids -> log-probabilities of the next token after each, float64 [length, 256], of one row."""
    forward = jax.jit(lambda row: sharded.model.apply(params, {}, row, key=None, train=False)[0])

    def compute(ids):
        # One shape to compile, filled up with other ids than batches are.
        row = np.full((1, LENGTH), 77, np.int32)
        row[0, : len(ids)] = ids
        logits = np.asarray(forward(row), np.float64)[0, : len(ids)]
        return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))

    return compute


@pytest.fixture(scope="module")
def asked(sharded, params):
    return AskedModel(sharded, params, {}, task_tokens(ByteTokenizer(), SpecialTokens(), None))


PAIRS = {
    "a word": ("To be or", " not"),
    "spaces go to the continuation": ("To be  ", "or"),
    "no context": ("", "not"),
    "as long as the model": ("x" * 14, "y" * 10 + "z"),
    "the context loses its beginning": ("The quick brown fox jumps over", " the dog"),
    "a continuation of all positions": ("abc", "d" * LENGTH),
}


def test_log_likelihoods_are_those_of_single_rows(asked, log_softmax):
    found = asked.score_continuations(list(PAIRS.values()))
    for (name, (context, continuation)), (score, is_greedy) in zip(PAIRS.items(), found, strict=True):
        stripped = context.rstrip()
        continuation = list((context[len(stripped) :] + continuation).encode())
        ids = ([*stripped.encode()] or [NEWLINE]) + continuation
        ids = ids[-(LENGTH + 1) :]
        logs = log_softmax(ids[:-1])[-len(continuation) :]
        expected = logs[np.arange(len(continuation)), continuation].sum()
        # Sums of float32 numbers of about 5 in another order.
        assert score == pytest.approx(expected, rel=1e-5), name
        assert is_greedy == bool((logs.argmax(-1) == continuation).all()), name


def test_a_text_is_the_sum_of_its_windows(asked, log_softmax):
    texts = [[97 + i % 26 for i in range(length)] for length in (0, 1, LENGTH, LENGTH + 1, 2 * LENGTH + 5)]
    for ids, found in zip(texts, asked.score_texts([bytes(ids).decode() for ids in texts]), strict=True):
        length = len(ids)
        row, expected, at = [NEWLINE, *ids], 0.0, 0
        while at < length:
            end = min(at + LENGTH, length)
            logs = log_softmax(row[max(0, end - LENGTH) : end])[-(end - at) :]
            expected += logs[np.arange(end - at), ids[at:end]].sum()
            at = end
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_a_chunk_of_logits_at_a_time_gives_the_same(sharded, params, monkeypatch):
    rows = [scored_pair([1, 2, 3], list(range(9, 25)), max_length=LENGTH), scored_pair([7], [8], max_length=LENGTH)]
    whole = LogLikelihood(sharded, params, {})(rows)
    monkeypatch.setattr("jaxtrain.inference.harness._LOGITS_BYTES", 4 * 8 * 256)
    chunked = LogLikelihood(sharded, params, {})(rows)
    assert [greedy for _, greedy in chunked] == [greedy for _, greedy in whole]
    # The same products, summed by other instructions.
    assert [score for score, _ in chunked] == pytest.approx([score for score, _ in whole], rel=1e-6)


def test_batches_hold_every_row_once_and_keep_short_texts_apart():
    rows = [Scored(tuple(range(length)), (1,) * min(3, length)) for length in (5, 100, 3, 40, 33, 64, 7, 1000)]
    batches = list(batches_of(rows, max_length=1024, short_length=64, shards=2, largest=3))
    assert sorted(i for batch in batches for i in batch.rows) == list(range(len(rows)))
    for batch in batches:
        lengths = [len(rows[i].inputs) for i in batch.rows]
        assert max(lengths) <= batch.length
        assert batch.size % 2 == 0
        assert len(batch.rows) <= batch.size <= 4
        assert batch.length <= 64 or min(lengths) > 64
    assert [batch.length for batch in batches] == [1024, 64, 32]


def test_answers_end_before_the_first_stop_and_batches_do_not_matter(asked):
    contexts = [f"question {i}{'?' * (i % 3)}" for i in range(8)]
    plain = asked.answer([(context, {"max_gen_toks": 5}) for context in contexts], task="t")
    single = [asked.answer([(context, {"max_gen_toks": 5})], task="t")[0] for context in contexts[:2]]
    assert plain[:2] == single
    stops = sorted({answer[2] for answer in plain if len(answer) > 2})[:2]
    stopped = asked.answer([(context, {"max_gen_toks": 5, "until": stops}) for context in contexts], task="t")
    assert stopped == [min((answer.split(stop)[0] for stop in stops), key=len) for answer in plain]
    # Settings of one context leave the others alone; a long context loses its beginning.
    mixed = asked.answer([("a" * 40, {"max_gen_toks": 5}), (contexts[0], {"max_gen_toks": 5, "until": "x"})], task="t")
    assert mixed[0] == asked.answer([("a" * (LENGTH - 5), {"max_gen_toks": 5})], task="t")[0]


def test_settings_of_tasks():
    asked = read_generation({"until": "\n", "max_tokens": 3}, task="t")
    assert (asked.stop, asked.new_tokens, asked.sampling) == (("\n",), 3, jt.Sampling(0.0))
    assert read_generation({}, task="t").new_tokens == 256
    assert read_generation({"do_sample": True}, task="t").sampling == jt.Sampling(1.0)
    assert read_generation({"do_sample": False, "temperature": 0.7}, task="t").sampling == jt.Sampling(0.0)
    assert read_generation({"temperature": 0.7, "top_k": 0, "top_p": 0.9}, task="t").sampling == jt.Sampling(
        0.7, None, 0.9
    )
    with pytest.raises(ConfigError, match=r"^generation_kwargs of the task t: [^\n]*num_beams is not known[^\n]*$"):
        read_generation({"num_beams": 4}, task="t")


def test_what_has_no_log_likelihood_is_one_line(asked):
    with pytest.raises(DataError, match=r"has no token of its own"):
        asked.score_continuations([("a context", "")])
    with pytest.raises(DataError, match=r"a continuation of 25 tokens exceeds the model's 24 positions"):
        asked.score_continuations([("a", "b" * 25)])


def test_a_tokenizer_with_a_first_token_puts_it_before_contexts_once():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from jaxtrain.data.tokenizer import BpeTokenizer

    model = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?"))
    model.add_special_tokens(["<s>", "</s>"])
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = SpecialTokens(True, (1,), {"bos_token": "<s>", "eos_token": "</s>"})
    tokens = task_tokens(BpeTokenizer(model), special, None)
    assert (tokens.leading, tokens.prefix, tokens.stop) == ((0,), 0, {1})
    assert tokens.pairs([("a b", " a"), ("", "b"), ("a ", "b")]) == [([0, 2, 3], [2]), ([0], [3]), ([0, 2], [3])]
    # In chats, special tokens that the template writes are read, and its own first token is not doubled.
    form = ChatFormat(BUILT_IN["plain"], "plain", {"eos_token": "</s>"}, (1,))
    chats = task_tokens(BpeTokenizer(model), special, form)
    assert chats.contexts(["<s> a </s>", "a"]) == [[0, 2, 1], [0, 2]]
