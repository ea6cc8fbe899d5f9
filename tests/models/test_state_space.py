"""State spaces (Mamba 2): chunks against the recurrence, packed documents, generation, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.inference.decoding import generate_ids
from jaxtrain.inference.sampling import Sampling
from jaxtrain.ops.state_space import StateInputs, document_numbers, state_space

SIZES: dict[str, Any] = dict(kind="transformer", num_layers=2, embed_dim=12, num_heads=4, head_dim=6)
SIZES |= dict(position="none", vocab_size=40, state_space=dict(state_dim=5, groups=2, conv_width=3, chunk=8))
TOLERANCE = 2e-5  # float32: sums in another order


def drawn(groups, length, dtype=jnp.float32, steps=(-4, 0)):
    rng = np.random.default_rng(0)
    shapes = ((2, length, groups, 5), (2, length, groups, 5), (2, length, 4, 3))
    query, key, value = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    step, decay = np.exp(rng.uniform(*steps, (2, length, 4))), -rng.uniform(0.5, 4, 4)
    return StateInputs(query, key, value, jnp.asarray(step, jnp.float32), jnp.asarray(decay, jnp.float32))


def reference_state_space(given, documents_BL):
    """The recurrence, token by token: float32 [B, L, H, K]."""
    batch, _, groups, state_dim = given.key.shape
    heads, width = given.value.shape[2:]
    same_BL = documents_BL == jnp.pad(documents_BL, ((0, 0), (1, 0)), mode="edge")[:, :-1]

    def advance(state, token):
        query, key, value, step, same = token
        keep = jnp.exp(given.decay * step) * same[:, None]
        written = (step[..., None] * value).reshape(batch, groups, -1, width)
        state = state * keep.reshape(batch, groups, -1)[..., None, None]
        state = state + jnp.einsum("bgn,bgrk->bgrkn", key, written)
        return state, jnp.einsum("bgn,bgrkn->bgrk", query, state).reshape(batch, heads, width)

    floats = [x.astype(jnp.float32) for x in (given.query, given.key, given.value, given.step)]
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (*floats, same_BL))
    start = jnp.zeros((batch, groups, heads // groups, width, state_dim), jnp.float32)
    return jnp.moveaxis(jax.lax.scan(advance, start, tokens)[1], 0, 1)


@pytest.mark.parametrize(("groups", "chunk", "length"), [(1, 4, 13), (2, 8, 32), (4, 256, 20)])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_are_the_recurrence(groups, chunk, length, packed):
    given, rng = drawn(groups, length), np.random.default_rng(1)
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, length)), axis=1)) if packed else None
    documents, weights = document_numbers(segments, 2, length), rng.standard_normal((2, length, 4, 3))

    def gradients(function):
        return jax.jit(jax.value_and_grad(lambda given: jnp.sum(function(given) * weights)))(given)

    wanted, wanted_gradient = gradients(lambda given: reference_state_space(given, documents))
    found, gradient = gradients(lambda given: state_space(given, documents, chunk=chunk)[0])
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE)
    for name, one, other in zip(StateInputs._fields, gradient, wanted_gradient, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * np.abs(other).max(), err_msg=name)


def test_large_steps_do_not_round_small_ones():
    given = drawn(1, 512, steps=(-4, 4))
    documents = document_numbers(None, 2, 512)
    wanted = np.asarray(reference_state_space(given, documents))
    found = np.asarray(state_space(given, documents, chunk=256)[0])
    assert np.abs(found - wanted).max() < 1e-6 * np.abs(wanted).max()


def test_sixteen_bits_keep_a_long_state():
    given = drawn(1, 4096, jnp.bfloat16)._replace(decay=jnp.full(4, -1e-3, jnp.float32))
    documents = document_numbers(None, 2, 4096)
    wanted = np.asarray(reference_state_space(given, documents))
    found = np.asarray(state_space(given, documents, chunk=256)[0], np.float32)
    assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()  # bf16 rounds by 0.004


def test_a_decay_that_is_trained_beside_adapters_is_no_folder_of_peft(tmp_path, model):
    base = jt.load_pretrained(jt.save_pretrained(tmp_path / "base", model[1], model=SIZES))
    lora = jt.LoraConfig(rank=2, targets=("output",), train_also=("*/log_decay",))
    adapted = jt.adapt(base.model, lora=lora)
    with pytest.raises(ConfigError, match="--merge"):
        jt.save_adapter(tmp_path / "adapter", adapted.init(jax.random.key(0))[0], model=adapted, base=base)


@pytest.fixture(scope="module")
def model():
    """A model, and parameters whose kernels are large, so that the logits say much of the state."""
    model = jt.build_model(SIZES, input_shape=(24,))
    return model, jax.tree.map(lambda x: x * 20 if x.ndim > 2 else x, model.init(jax.random.key(0))[0])


def logits_of(model, tokens, **others):
    apply = jax.jit(lambda params, inputs: model[0].apply(params, {}, inputs, key=None, train=False)[0])
    return np.asarray(apply(model[1], dict(tokens=tokens, **others)))


def test_a_document_sees_itself_alone(model):
    tokens = np.random.default_rng(0).integers(0, 40, (1, 24)).astype(np.int32)
    packed = logits_of(model, tokens, segments=np.repeat([0, 1, 2, 0], [3, 9, 8, 4])[None].astype(np.int32))
    for start, stop in ((3, 12), (12, 20)):
        alone = logits_of(model, tokens[:, start:stop])
        np.testing.assert_allclose(packed[:, start:stop], alone, rtol=0, atol=TOLERANCE * np.ptp(alone))
    assert np.abs(logits_of(model, tokens)[:, 12:20] - packed[:, 12:20]).max() > 0.01 * np.ptp(packed)


def test_generates_what_whole_texts_say(model):
    """Prompts of several lengths at once, and one slot of an engine that is read, gone on with, and begun again."""
    prompts = [np.random.default_rng(0).integers(0, 40, length).astype(np.int32) for length in (1, 2, 9, 30)]
    wanted, greedy, mesh = [], Sampling(temperature=0), jt.make_mesh(devices=jax.devices()[:1])
    for prompt in prompts:
        text = np.pad(prompt, (0, 40 - len(prompt)))[None]
        for at in range(len(prompt), len(prompt) + 6):
            text[0, at] = logits_of(model, text)[0, at - 1].argmax()
        wanted.append(text[0, len(prompt) : len(prompt) + 6].tolist())
    sharded, params = jt.shard_model(model[0], mesh=mesh), model[1]
    np.testing.assert_array_equal(generate_ids(sharded, params, prompts, new_tokens=6, sampling=greedy), wanted)
    goes_on = ([*prompts[-1], *wanted[-1][:3]], wanted[-1][3:])
    with jt.Engine(sharded, params, slots=1, length=64, chunk=8) as engine:
        for prompt, answer in [*zip(prompts, wanted, strict=True), goes_on, (prompts[-1], wanted[-1])]:
            request = jt.Request(tuple(map(int, prompt)), new_tokens=len(answer), sampling=greedy)
            assert [emitted.token for emitted in engine.submit(request)] == answer
    with pytest.raises(ConfigError, match="cache_dtype='int8'"):
        generate_ids(sharded, params, prompts, new_tokens=6, sampling=greedy, cache_dtype="int8")


@pytest.mark.parametrize("changed", [dict(position="rotary"), dict(sliding_window=8), dict(mlp_dim=48)], ids=str)
def test_keys_of_attention_are_refused(changed):
    with pytest.raises(ConfigError, match=f"state_space has no attention and no MLP; set {next(iter(changed))}: n"):
        jt.build_model(SIZES | changed, input_shape=(24,))
