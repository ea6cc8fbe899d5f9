"""Generation: equal to full forward passes, each row in its own way, what it compiles, and texts as they come."""

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import jaxtrain as jt
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.decoding import Generated, Writing, generate_ids, generation_pieces
from jaxtrain.inference.generate import TextStream, joined, write_texts
from jaxtrain.models.model import Decoder

GREEDY = jt.Sampling(temperature=0)
LENGTH, VOCABULARY, NEW = 64, 40, 12
# The second has all the room there is; the others are padded.
PROMPTS = [
    np.array([3, 1, 4, 1, 5], np.int32),
    np.arange(LENGTH - NEW, dtype=np.int32) % VOCABULARY,
    np.array([6, 5], np.int32),
]


def sharded_model(**settings: Any) -> jt.ShardedModel:
    sizes = dict(
        kind="transformer", num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, max_sequence_length=LENGTH
    )
    model = jt.build_model({**sizes, **settings}, input_shape=(LENGTH,), vocab_size=VOCABULARY)
    return jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))


def moved(sharded: jt.ShardedModel, by: float) -> Any:
    """Kernels so large that the logits of a greedy choice lie far apart."""
    params, _ = jax.jit(sharded.init)(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 64))
    return jax.tree.map(lambda leaf: leaf + by * jax.random.normal(next(keys), leaf.shape), params)


@pytest.fixture(scope="module")
def sharded() -> Any:
    return sharded_model()


@pytest.fixture(scope="module")
def params(sharded) -> Any:
    return moved(sharded, 0.3)


@pytest.fixture(scope="module")
def greedy(sharded, params) -> np.ndarray:
    return generate_ids(sharded, params, PROMPTS, new_tokens=NEW, sampling=GREEDY)


def test_tokens_are_those_of_the_forward_pass(sharded, params, greedy):
    text = np.zeros((len(PROMPTS), LENGTH), np.int32)
    for row, prompt in enumerate(PROMPTS):
        text[row, : len(prompt) + NEW] = [*prompt, *greedy[row]]
    logits = np.asarray(jax.jit(lambda x: sharded.model.apply(params, {}, x, key=None, train=False)[0])(text))
    for row, prompt in enumerate(PROMPTS):
        wanted = logits[row, len(prompt) - 1 : len(prompt) + NEW - 1].argmax(-1)
        np.testing.assert_array_equal(greedy[row], wanted)


def test_a_row_ends_at_its_stop_token_and_the_program_when_all_rows_have(sharded, params, greedy):
    """It would read the whole model for each token that nobody sees."""
    calls, decoder = [], sharded.model.decoder

    def decode(*args: Any) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return decoder.decode(*args)

    watched = dataclasses.replace(sharded.model, decoder=dataclasses.replace(decoder, decode=decode))
    stops = {int(greedy[0, 1]), int(greedy[1, 2]), int(greedy[2, 2])}
    watched = dataclasses.replace(sharded, model=watched)
    (ended,) = generation_pieces(watched, params, PROMPTS, Writing(NEW, GREEDY, stop_tokens=stops))
    jax.effects_barrier()
    assert len(calls) <= 2
    for row, wanted in enumerate(greedy):
        count = np.flatnonzero(np.isin(wanted, list(stops)))[0] + 1
        assert ended.counts[row] == count
        np.testing.assert_array_equal(ended.tokens[row], np.where(np.arange(NEW) < count, wanted, 0))


KINDS = [
    GREEDY,
    jt.Sampling(1.0, top_k=5),
    jt.Sampling(1.5, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5),
]


@pytest.mark.long
def test_a_row_is_what_it_is_alone(sharded, params):
    together = generate_ids(sharded, params, PROMPTS, new_tokens=NEW, sampling=KINDS, seed=[5, 6, 7])
    alone = generate_ids(sharded, params, PROMPTS[2:], new_tokens=NEW, sampling=KINDS[2], seed=7)
    np.testing.assert_array_equal(together[2], alone[0])
    turned = generate_ids(sharded, params, PROMPTS[::-1], new_tokens=NEW, sampling=KINDS[::-1], seed=[7, 6, 5])
    np.testing.assert_array_equal(turned[::-1], together)


def test_rows_of_neighbouring_seeds_have_nothing_in_common(sharded, params):
    rows = [PROMPTS[0]] * 3
    first, second = (
        generate_ids(sharded, params, rows, new_tokens=NEW, sampling=jt.Sampling(3.0), seed=s) for s in (4, 5)
    )
    assert len({tuple(row) for row in (*first.tolist(), *second.tolist())}) == 6
    writing = Writing(NEW, jt.Sampling(3.0), seed=4, first_row=1)  # a later batch of the same seed
    (later,) = generation_pieces(sharded, params, rows, writing)
    assert later.tokens[:2].tolist() == first[1:].tolist()


@pytest.mark.long
def test_pieces_are_parts_of_the_whole(sharded, params, greedy):
    ended, before = np.zeros(3, bool), 0
    for found in generation_pieces(sharded, params, PROMPTS, Writing(NEW, GREEDY, piece=5), ended):
        upto = int(found.counts[0])
        assert upto > before
        before = upto
        np.testing.assert_array_equal(found.tokens[0, :upto], greedy[0, :upto])
        ended[1] = True
    assert before == NEW
    assert found.counts.tolist() == [NEW, 1, NEW]


class Letters(ByteTokenizer):
    """The model's 40 tokens as bytes: letters from "@" on."""

    vocab_size = VOCABULARY

    def encode(self, text: str) -> np.ndarray:
        return super().encode(text) - 64

    def decode(self, ids: Any) -> str:
        return super().decode([int(i) + 64 for i in ids])


def texts_of(sharded: Any, params: Any, *prompts: str, new_tokens: int = NEW, **options: Any) -> list[str]:
    return jt.generate_text(
        sharded, params, Letters(), list(prompts), new_tokens=new_tokens, **{"sampling": GREEDY, **options}
    )


@pytest.mark.long
def test_a_stop_string_ends_a_text_and_a_second_call_compiles_nothing(sharded, params, caplog):
    whole = texts_of(sharded, params, "ABC", "DE", "F")
    stop = whole[0][7:9]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert texts_of(sharded, params, "DEFGHIJ", "A", "B", seed=1)[0].startswith("DEFGHIJ")  # of other lengths
        cut = texts_of(sharded, params, "ABC", "DE", "F", stop=["never", stop])
    assert [record.getMessage() for record in caplog.records if "ompil" in record.getMessage()] == []
    for prompt, text, found in zip(("ABC", "DE", "F"), whole, cut, strict=True):
        at = text.find(stop, len(prompt))
        assert found == (text if at < 0 else text[:at])
    assert cut[0] != whole[0]
    assert texts_of(sharded, params) == []


@pytest.mark.long
def test_padding_does_not_make_a_text_a_long_one(params):
    """Under longrope, whose other factors are for caches beyond `original_length`."""

    def text(long_factor: float) -> list[str]:
        scaling = dict(kind="longrope", original_length=20, short_factors=[1.0] * 2, long_factors=[long_factor] * 2)
        return texts_of(sharded_model(rope_scaling=scaling), params, "ABCDE", "ABCDEFGHIJ", new_tokens=8)

    assert text(1.0) == text(40.0)


@pytest.mark.long
def test_the_cache_in_fewer_bits(sharded, params, greedy):
    """Greedy tokens whose logits lie far apart stay; int8 holds a key to half of a 127th of its largest number."""
    for dtype in ("bfloat16", "int8"):
        rounded = generate_ids(sharded, params, PROMPTS, new_tokens=NEW, sampling=GREEDY, cache_dtype=dtype)
        np.testing.assert_array_equal(rounded[:, :2], greedy[:, :2])


@pytest.mark.long
def test_a_mesh_changes_no_token(params, greedy):
    """Heads over `tensor`, rows over `data` and `fsdp`."""
    for shape, rows in ((dict(tensor=2, data=2), 2), (dict(fsdp=2, tensor=2), 3)):
        mesh = jt.make_mesh(**shape, devices=jax.devices()[:4])
        spread = jt.shard_model(sharded_model().model, mesh=mesh)
        placed = jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), params, spread.abstract_params)
        found = generate_ids(spread, placed, PROMPTS[:rows], new_tokens=NEW, sampling=GREEDY)
        np.testing.assert_array_equal(found, greedy[:rows])


WRONG = {
    "an id beyond the vocabulary": (dict(encoded=[[1, 2], [3, 40]]), r"ids below 40 \(the largest is 40\)"),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_continued_is_one_line(sharded, params, wrong, words):
    given: Any = {"encoded": PROMPTS, "new_tokens": 2, "sampling": GREEDY, **wrong}
    with pytest.raises(ConfigError, match=words) as caught:
        generate_ids(sharded, params, **{**given, "encoded": [np.array(ids, np.int32) for ids in given["encoded"]]})
    assert "\n" not in str(caught.value)


def test_texts_that_the_model_cannot_read_are_refused(sharded):
    given = (sharded, sharded.abstract_params)
    with pytest.raises(ConfigError, match="use the model's own tokenizer"):
        jt.generate_text(*given, ByteTokenizer(), ["zz"], new_tokens=2, sampling=GREEDY)


def spaced() -> BpeTokenizer:
    """Words with SentencePiece's mark for a space, and bytes for what is no word."""
    words = ["<unk>", "a", "▁the", "▁cat", "s", "</s>", *(f"<0x{byte:02X}>" for byte in "é€".encode())]
    model = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(parts)  # pyright: ignore[reportAttributeAccessIssue] a setter
    return BpeTokenizer(model)


def fed(stream: TextStream, tokens) -> list[str]:
    return [*(stream.feed(token) for token in tokens), stream.finish()]


BYTES = ByteTokenizer()
ROWS = {
    "a character when its bytes are there": (BYTES, "é€".encode(), {}, ["", "é", "", "", "€", ""]),
    "a character that never ends": (BYTES, b"a\xe2\x82", {}, ["a", "", "", "\ufffd"]),
    "bytes that begin nothing do not wait": (BYTES, b"\xff" * 5, {}, ["", "", "", "\ufffd", "\ufffd", "\ufffd" * 3]),
    "a stop string": (BYTES, b"abENDc", dict(stop=["END"]), ["a", "b", "", "", "", "", ""]),
    "a stop string that is none": (BYTES, b"aENx", dict(stop=["END"]), ["a", "", "", "ENx", ""]),
    "a stop token": (BYTES, b"ab\x00c", dict(stop_tokens=[0]), ["a", "b", "", "", ""]),
    "a stop token gives out what was held": (BYTES, b"aE\x00", dict(stop=["END"], stop_tokens=[0]), ["a", "", "E", ""]),
    "spaces before words stay": (spaced(), [2, 3, 4], {}, [" the", " cat", "s", ""]),
    "bytes between words": (spaced(), [2, 6, 7, 3], {}, [" the", "", "é", " cat", ""]),
    "a byte that is wrong": (spaced(), [2, 6, 3], {}, [" the", "", "\ufffd cat", ""]),
}  # fmt: skip


@pytest.mark.parametrize(("tokenizer", "tokens", "options", "wanted"), ROWS.values(), ids=ROWS)
def test_what_each_token_gives_out(tokenizer, tokens, options, wanted):
    stream = TextStream(tokenizer, **options)
    assert fed(stream, tokens) == wanted
    ends = [chr(token) for token in options.get("stop_tokens", ())] + list(options.get("stop", ()))
    text = tokenizer.decode(list(tokens)) if tokenizer is BYTES else ""
    assert stream.stopped == any(end in text for end in ends)


def test_only_a_text_that_stands_alone_loses_its_first_space(monkeypatch):
    made = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2, "▁b": 3}, merges=[("▁", "b")]))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # pyright: ignore[reportAttributeAccessIssue] a setter
    made.decoder = decoders.Metaspace(prepend_scheme="first")  # pyright: ignore[reportAttributeAccessIssue] a setter
    found = Generated(np.full((2, 1), 3), np.ones(2, np.int32))
    monkeypatch.setattr("jaxtrain.inference.generate.generation_pieces", lambda *_, **__: iter([found]))
    decoder = Decoder(lambda *_: {}, lambda *_: None, max_length=8)
    model: Any = SimpleNamespace(model=SimpleNamespace(decoder=decoder))
    found = joined(write_texts(model, {}, BpeTokenizer(made), ["a", ""], Writing(1, GREEDY)), 2)
    assert found == ["a b", "b"]
