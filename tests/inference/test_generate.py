"""Generation: equal to full forward passes, each row in its own way, what it compiles, beams, and prompts."""

import dataclasses
import itertools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import CHAT, TOKENIZER
from tokenizers import Tokenizer, models

import jaxtrain as jt
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference import generate
from jaxtrain.inference.beam import beam_search
from jaxtrain.inference.decoding import generate_ids, generation_pieces
from jaxtrain.inference.server.bodies import PromptReader, RefusedError, embedding_call
from jaxtrain.models.shipped import transformer
from jaxtrain.precision.policy import POLICIES

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


def generate_rows(*arguments: Any, **options: Any) -> Any:
    """What was generated; a test knows which of its parts are there."""
    return generate.generate_rows(*arguments, **options)


@pytest.fixture(scope="module")
def sharded() -> Any:
    return sharded_model()


@pytest.fixture(scope="module")
def params(sharded) -> Any:
    return moved(sharded, 0.3)


@pytest.fixture(scope="module")
def found(sharded, params) -> Any:
    return generate_rows(sharded, params, PROMPTS, new_tokens=NEW, sampling=GREEDY, top=3)


@pytest.fixture(scope="module")
def greedy(found) -> np.ndarray:
    return found.tokens


def test_tokens_and_their_log_probabilities_are_those_of_the_forward_pass(sharded, params, found):
    text = np.zeros((len(PROMPTS), LENGTH), np.int32)
    for row, prompt in enumerate(PROMPTS):
        text[row, : len(prompt) + NEW] = [*prompt, *found.tokens[row]]
    logits = jax.jit(lambda x: sharded.model.apply(params, {}, x, key=None, train=False)[0])(text)
    wanted = np.asarray(jax.nn.log_softmax(logits))
    # float32: sums over keys in another order, of logits of up to about 10.
    close: dict[str, Any] = dict(rtol=0, atol=1e-4)
    for row, prompt in enumerate(PROMPTS):
        log = wanted[row, len(prompt) - 1 : len(prompt) + NEW - 1]
        np.testing.assert_array_equal(found.tokens[row], log.argmax(-1))
        np.testing.assert_allclose(found.log_probabilities[row], log.max(-1), **close)
        np.testing.assert_array_equal(found.top_ids[row], np.argsort(-log)[:, :3])
        np.testing.assert_allclose(found.top_log_probabilities[row], -np.sort(-log)[:, :3], **close)


def test_a_row_ends_at_its_stop_token_and_the_program_when_all_rows_have(sharded, params, greedy):
    """It would read the whole model for each token that nobody sees."""
    calls, decoder = [], sharded.model.decoder

    def decode(*args: Any) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return decoder.decode(*args)

    watched = dataclasses.replace(sharded.model, decoder=dataclasses.replace(decoder, decode=decode))
    stops = {int(greedy[0, 1]), int(greedy[1, 2]), int(greedy[2, 2])}
    ended = generate_rows(
        dataclasses.replace(sharded, model=watched), params, PROMPTS, new_tokens=NEW, sampling=GREEDY, stop_tokens=stops
    )
    jax.effects_barrier()
    assert len(calls) <= 2
    for row, wanted in enumerate(greedy):
        count = np.flatnonzero(np.isin(wanted, list(stops)))[0] + 1
        assert ended.counts[row] == count
        np.testing.assert_array_equal(ended.tokens[row], np.where(np.arange(NEW) < count, wanted, 0))


KINDS = [
    GREEDY,
    jt.Sampling(1.0, top_k=5),
    jt.Sampling(1.5, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={7: 2.0}),
]


@pytest.mark.long
def test_a_row_is_what_it_is_alone(sharded, params):
    together = generate_ids(sharded, params, PROMPTS, new_tokens=NEW, sampling=KINDS, seed=[5, 6, 7])
    alone = generate_ids(sharded, params, PROMPTS[2:], new_tokens=NEW, sampling=KINDS[2], seed=7)
    np.testing.assert_array_equal(together[2], alone[0])
    turned = generate_ids(sharded, params, PROMPTS[::-1], new_tokens=NEW, sampling=KINDS[::-1], seed=[7, 6, 5])
    np.testing.assert_array_equal(turned[::-1], together)


@pytest.mark.long
def test_pieces_are_parts_of_the_whole(sharded, params, greedy):
    ended, before = np.zeros(3, bool), 0
    options: dict[str, Any] = dict(new_tokens=NEW, sampling=GREEDY, piece=5, ended_B=ended)
    for found in generation_pieces(sharded, params, PROMPTS, **options):
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
def test_a_policy_of_ones_own_is_the_one_that_generates(sharded, params):
    """Under a name that is in the table of policies."""
    policy, dtypes = dataclasses.replace(POLICIES["bf16"], name="fp32"), []
    placed = jt.shard_model(sharded.model, mesh=sharded.mesh, policy=policy)
    decoder = placed.model.decoder

    def init_cache(batch: int, length: int, dtype: Any) -> Any:
        dtypes.append(dtype)
        return decoder.init_cache(batch, length, dtype)

    watched = dataclasses.replace(placed.model, decoder=dataclasses.replace(decoder, init_cache=init_cache))
    assert len(texts_of(dataclasses.replace(placed, model=watched), params, "A", new_tokens=2)[0]) == 3
    assert dtypes == [jnp.bfloat16]


@pytest.mark.long
def test_padding_does_not_make_a_text_a_long_one(params):
    """Under longrope, whose other factors are for caches beyond `original_length`."""

    def text(long_factor: float) -> list[str]:
        scaling = dict(kind="longrope", original_length=20, short_factors=[1.0] * 2, long_factors=[long_factor] * 2)
        return texts_of(sharded_model(rope_scaling=scaling), params, "ABCDE", "ABCDEFGHIJ", new_tokens=8)

    assert text(1.0) == text(40.0)


@pytest.mark.long
def test_the_cache_in_fewer_bits(sharded, params, found):
    """Greedy tokens whose logits lie far apart stay; int8 holds a key to half of a 127th of its largest number."""
    for dtype in ("bfloat16", "int8"):
        rounded = generate_rows(sharded, params, PROMPTS, new_tokens=NEW, sampling=GREEDY, cache_dtype=dtype, top=3)
        # The first token is chosen from what the whole prompt was read into.
        np.testing.assert_allclose(rounded.log_probabilities[:, 0], found.log_probabilities[:, 0], atol=0.1)
        np.testing.assert_array_equal(rounded.tokens[:, :2], found.tokens[:, :2])
        assert not np.array_equal(rounded.log_probabilities, found.log_probabilities), "the cache has its full dtype"


@pytest.mark.long
def test_a_prompt_in_chunks_is_the_prompt(sharded, params, monkeypatch):
    prompts = [np.arange(length, dtype=np.int32) for length in (17, 9, 8)]
    whole = generate_ids(sharded, params, prompts, new_tokens=NEW, sampling=GREEDY)
    monkeypatch.setattr(transformer, "PREFILL_CHUNK", 8)
    again = dataclasses.replace(sharded, model=dataclasses.replace(sharded.model))
    np.testing.assert_array_equal(generate_ids(again, params, prompts, new_tokens=NEW, sampling=GREEDY), whole)


@pytest.mark.long
def test_a_mesh_changes_no_token(params, greedy):
    """Heads over `tensor`, rows over `data` and `fsdp`."""
    for shape, rows in ((dict(tensor=2, data=2), 2), (dict(fsdp=2, tensor=2), 3)):
        mesh = jt.make_mesh(**shape, devices=jax.devices()[:4])
        spread = jt.shard_model(sharded_model().model, mesh=mesh)
        placed = jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), params, spread.abstract_params)
        found = generate_ids(spread, placed, PROMPTS[:rows], new_tokens=NEW, sampling=GREEDY)
        np.testing.assert_array_equal(found, greedy[:rows])


FEW, BEGINNINGS, STOP = 5, [np.array([1, 2, 3], np.int32), np.array([0, 2], np.int32)], 4


@pytest.fixture(scope="module")
def few() -> Any:
    """A model of five tokens, and its parameters."""
    sizes = dict(kind="transformer", num_layers=1, embed_dim=8, num_heads=2, max_sequence_length=16)
    model = jt.build_model(sizes, input_shape=(16,), vocab_size=FEW)
    sharded = jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    return sharded, moved(sharded, 0.5)


def all_continuations(sharded: Any, params: Any, prompt: Any, new: int) -> list[tuple[float, tuple[int, ...]]]:
    """(score, tokens) of everything that ends at STOP or has so many tokens, the best first."""
    texts = [*itertools.product(range(FEW), repeat=new)]
    rows = jnp.array([[*prompt, *text] for text in texts])
    logits = jax.jit(lambda rows: sharded.model.apply(params, {}, rows, key=None, train=False)[0])(rows)
    log = np.asarray(jax.nn.log_softmax(logits))[:, len(prompt) - 1 : -1]
    found = {}
    for row, text in enumerate(texts):
        count = text.index(STOP) + 1 if STOP in text else new
        found[text[:count]] = sum(log[row, at, text[at]] for at in range(count)) / count
    return sorted(((score, text) for text, score in found.items()), reverse=True)


@pytest.mark.long
def test_as_many_beams_as_beginnings_find_the_best_of_all(few):
    found = beam_search(*few, BEGINNINGS, beams=FEW**2, new_tokens=3, stop_tokens={STOP}, length_penalty=1.0)
    for row, prompt in enumerate(BEGINNINGS):
        for place, (score, text) in enumerate(all_continuations(*few, prompt, 3)[:3]):
            assert tuple(found.tokens[row, place, : found.counts[row, place]].tolist()) == text
            # float32: three log-probabilities of about -2, summed in another order.
            assert found.scores[row, place] == pytest.approx(score, abs=1e-5)


WRONG = {
    "an id beyond the vocabulary": ([[1, 2], [3, 40]], "token 40, but the model's vocabulary has 40"),
    "an empty prompt": ([[1], []], "at least one prompt and token"),
}


@pytest.mark.parametrize(("prompts", "said"), WRONG.values(), ids=WRONG)
def test_no_prompt_is_read_as_another(sharded, prompts, said):
    encoded = [np.array(ids, np.int32) for ids in prompts]
    with pytest.raises(ConfigError, match=said):
        generate_ids(sharded, sharded.abstract_params, encoded, new_tokens=2, sampling=GREEDY)
    with pytest.raises(ConfigError, match=said):
        beam_search(sharded, sharded.abstract_params, encoded, beams=2, new_tokens=2)


def test_texts_that_the_model_cannot_read_are_refused(sharded):
    given = (sharded, sharded.abstract_params)
    with pytest.raises(ConfigError, match="use the tokenizer that it was trained with"):
        jt.generate_text(*given, ByteTokenizer(), ["zz"], new_tokens=2, sampling=GREEDY)
    # An argument of the command line that is not UTF-8 is such a text; the tokenizers library raises a TypeError.
    tokenizer = BpeTokenizer(Tokenizer(models.BPE({"a": 0}, [])))
    with pytest.raises(ConfigError, match=r"the prompt 'a\\udcff' holds what is no character; give text in UTF-8"):
        jt.generate_text(*given, tokenizer, ["a\udcff"], new_tokens=2, sampling=GREEDY)
    reader = PromptReader(TOKENIZER, CHAT, vocab_size=100)
    for given in ("zz", [122]):
        with pytest.raises(RefusedError, match="input holds 122, which is no token id; use 0 to 99"):
            embedding_call({"model": "m", "input": given}, reader, served="m", length=8)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(sampling=[GREEDY]), "sampling has 1 entries for 3 prompts"),
        (dict(seed=[1, 2]), "seed has 2 entries for 3 prompts"),
        (dict(cache_dtype="int4"), "cache_dtype"),
    ],
    ids=["samplings", "seeds", "a dtype"],
)
def test_rows_that_mean_nothing_are_one_line(sharded, params, wrong, words):
    with pytest.raises(ConfigError, match=words) as caught:
        generate_ids(sharded, params, PROMPTS, **{**dict(new_tokens=2, sampling=GREEDY), **wrong})
    assert "\n" not in str(caught.value)
