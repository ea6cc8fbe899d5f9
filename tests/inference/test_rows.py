"""Rows of one batch that are generated each in its own way, where they end, and what is reported of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference import generate
from jaxtrain.inference.generate import generate_ids
from jaxtrain.inference.pieces import generation_pieces
from jaxtrain.models.shipped import transformer

GREEDY = jt.Sampling(temperature=0)
PROMPTS = [np.array(ids, np.int32) for ids in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5])]
NEW = 12


def sharded_model(**settings: Any) -> jt.ShardedModel:
    sizes = dict(kind="transformer", num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, max_sequence_length=64)
    model = jt.build_model({**sizes, **settings}, input_shape=(64,), vocab_size=40)
    return jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))


def generate_rows(*arguments: Any, **options: Any) -> Any:
    """What was generated; a test knows which of its parts are there."""
    return generate.generate_rows(*arguments, **options)


@pytest.fixture(scope="module")
def sharded() -> Any:
    return sharded_model()


@pytest.fixture(scope="module")
def params(sharded) -> Any:
    """Kernels so large that the logits of a greedy choice lie far apart."""
    params, _ = jax.jit(sharded.init)(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 64))
    return jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(next(keys), leaf.shape), params)


@pytest.fixture(scope="module")
def greedy(sharded, params) -> np.ndarray:
    return generate_ids(sharded, params, PROMPTS, new_tokens=NEW, sampling=GREEDY)


def test_a_row_ends_at_its_stop_token_and_the_others_go_on(sharded, params, greedy):
    stop = int(greedy[0, 3])
    found = generate_rows(sharded, params, PROMPTS, new_tokens=NEW, sampling=GREEDY, stop_tokens={stop, 39})
    for row, wanted in enumerate(greedy):
        at = np.flatnonzero(np.isin(wanted, [stop, 39]))
        count = at[0] + 1 if len(at) else NEW
        assert found.counts[row] == count
        np.testing.assert_array_equal(found.tokens[row], np.where(np.arange(NEW) < count, wanted, 0))


def test_the_program_ends_when_all_rows_have(sharded, params, greedy):
    """It would read the whole model for each token that nobody sees."""
    calls = []
    decoder = sharded.model.decoder

    def decode(*args: Any) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return decoder.decode(*args)

    watched = dataclasses.replace(sharded.model, decoder=dataclasses.replace(decoder, decode=decode))
    stops = set(greedy[:, 2].tolist())
    generate_ids(
        dataclasses.replace(sharded, model=watched), params, PROMPTS, new_tokens=NEW, sampling=GREEDY, stop_tokens=stops
    )
    jax.effects_barrier()
    assert len(calls) <= 2


KINDS = [
    GREEDY,
    jt.Sampling(1.0, top_k=5),
    jt.Sampling(1.5, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={7: 2.0}),
]


def test_a_row_is_what_it_is_alone(sharded, params):
    together = generate_ids(sharded, params, PROMPTS, new_tokens=NEW, sampling=KINDS, seed=[5, 6, 7])
    for row, kind in enumerate(KINDS):
        alone = generate_ids(sharded, params, PROMPTS[row : row + 1], new_tokens=NEW, sampling=kind, seed=5 + row)
        np.testing.assert_array_equal(together[row], alone[0], err_msg=str(kind))
    moved = generate_ids(sharded, params, PROMPTS[::-1], new_tokens=NEW, sampling=KINDS[::-1], seed=[7, 6, 5])
    np.testing.assert_array_equal(moved[::-1], together)


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


def test_log_probabilities_are_those_of_the_forward_pass(sharded, params, greedy):
    found = generate_rows(sharded, params, PROMPTS, new_tokens=NEW, sampling=GREEDY, top=3)
    np.testing.assert_array_equal(found.tokens, greedy)
    text = np.concatenate([PROMPTS[0], greedy[0]])[None]
    logits, _ = sharded.model.apply(params, {}, jnp.asarray(text), key=None, train=False)
    wanted = jax.nn.log_softmax(logits)[0, len(PROMPTS[0]) - 1 : -1]
    # float32: sums over keys in another order, of logits of up to about 10.
    close: dict[str, Any] = dict(rtol=0, atol=1e-4)
    np.testing.assert_allclose(found.log_probabilities[0], wanted[np.arange(NEW), greedy[0]], **close)
    np.testing.assert_array_equal(found.top_ids[0], jnp.argsort(-wanted)[:, :3])
    np.testing.assert_allclose(found.top_log_probabilities[0, :, 0], wanted.max(-1), **close)


def test_a_stop_string_ends_a_text(sharded, params):
    """The model's 40 tokens as bytes: letters from "@" on."""

    class Letters(ByteTokenizer):
        vocab_size = 40

        def encode(self, text: str) -> np.ndarray:
            return super().encode(text) - 64

        def decode(self, ids: Any) -> str:
            return super().decode([int(i) + 64 for i in ids])

    def texts(**options: Any) -> list[str]:
        return jt.generate_text(sharded, params, Letters(), ["ABC", "DE"], new_tokens=40, sampling=GREEDY, **options)

    whole = texts()
    stop = whole[0][23:25]
    cut = texts(stop=["never", stop])
    for prompt, text, found in zip(("ABC", "DE"), whole, cut, strict=True):
        at = text.find(stop, len(prompt))
        assert found == (text if at < 0 else text[:at])
    assert cut[0] != whole[0]


@pytest.mark.long
def test_the_cache_in_fewer_bits(sharded, params, greedy):
    """Greedy tokens whose logits lie far apart stay; int8 holds a key to half of a 127th of its largest number."""
    wanted = generate_rows(sharded, params, PROMPTS, new_tokens=NEW, sampling=GREEDY, top=3)
    for dtype in ("bfloat16", "int8"):
        found = generate_rows(sharded, params, PROMPTS, new_tokens=NEW, sampling=GREEDY, cache_dtype=dtype, top=3)
        # The first token is chosen from what the whole prompt was read into.
        np.testing.assert_allclose(found.log_probabilities[:, 0], wanted.log_probabilities[:, 0], atol=0.1)
        np.testing.assert_array_equal(found.tokens[:, :2], greedy[:, :2])
        assert not np.array_equal(found.log_probabilities, wanted.log_probabilities), "the cache has its full dtype"


@pytest.mark.long
@pytest.mark.parametrize("length", [17, 24], ids=lambda n: f"{n} tokens in chunks of 8")
def test_a_prompt_in_chunks_is_the_prompt(sharded, params, monkeypatch, length):
    prompts = [np.arange(length, dtype=np.int32) % 40, np.arange(9, dtype=np.int32), np.arange(8, dtype=np.int32)]
    whole = generate_ids(sharded, params, prompts, new_tokens=NEW, sampling=GREEDY)
    monkeypatch.setattr(transformer, "PREFILL_CHUNK", 8)
    again = dataclasses.replace(sharded, model=dataclasses.replace(sharded.model))
    np.testing.assert_array_equal(generate_ids(again, params, prompts, new_tokens=NEW, sampling=GREEDY), whole)


@pytest.mark.long
def test_a_mesh_changes_no_token(params, greedy):
    """Heads over `tensor`, rows over `data` and `fsdp`."""
    for shape, rows in ((dict(tensor=2, data=2), 2), (dict(fsdp=2, tensor=2), 3)):
        model = sharded_model().model
        mesh = jt.make_mesh(**shape, devices=jax.devices()[:4])
        spread = jt.shard_model(model, mesh=mesh)
        placed = jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), params, spread.abstract_params)
        found = generate_ids(spread, placed, PROMPTS[:rows], new_tokens=NEW, sampling=GREEDY)
        np.testing.assert_array_equal(found, greedy[:rows])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(sampling=[GREEDY]), "sampling has 1 entries for 3 prompts"),
        (dict(seed=[1, 2]), "seed has 2 entries for 3 prompts"),
        (dict(cache_dtype="int4"), "cache_dtype"),
        (dict(sampling=jt.Sampling(logit_bias={99: 1.0})), "token 99"),
    ],
    ids=["samplings", "seeds", "a dtype", "a bias"],
)
def test_rows_that_mean_nothing_are_one_line(sharded, params, wrong, words):
    with pytest.raises(ConfigError, match=words) as caught:
        generate_ids(sharded, params, PROMPTS, **{**dict(new_tokens=2, sampling=GREEDY), **wrong})
    assert "\n" not in str(caught.value)
