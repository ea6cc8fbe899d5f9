"""State spaces (Mamba 2): chunks against the recurrence, packed documents, generation, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.model import TransformerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.inference.decoding import generate_ids
from jaxtrain.inference.sampling import Sampling
from jaxtrain.models.shipped.transformer import transformer
from jaxtrain.ops.state_space import StateInputs, document_numbers, reference_state_space, state_space

VOCABULARY = 40
SIZES: dict[str, Any] = dict(
    num_layers=2, embed_dim=12, num_heads=4, head_dim=6, position="none", vocab_size=VOCABULARY,
    state_space=dict(state_dim=5, groups=2, conv_width=3, chunk=8),
)  # fmt: skip
# float32: sums in another order.
TOLERANCE = 2e-5
GREEDY = Sampling(temperature=0)


def drawn(groups: int, length: int, dtype: Any = jnp.float32) -> StateInputs:
    """Inputs whose steps are from 0.02 to 1, so that some heads forget at once and some keep."""
    rng = np.random.default_rng(0)
    shapes = ((2, length, groups, 5), (2, length, groups, 5), (2, length, 4, 3))
    query, key, value = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    step, decay = np.exp(rng.uniform(-4, 0, (2, length, 4))), -rng.uniform(0.5, 4, 4)
    return StateInputs(query, key, value, jnp.asarray(step, jnp.float32), jnp.asarray(decay, jnp.float32))


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


def test_sixteen_bits_keep_the_state_in_float32():
    # 4096 tokens that forget little: a state of 8 bits of mantissa would stop to grow. The rest is rounding of inputs.
    given = drawn(1, 4096, jnp.bfloat16)._replace(decay=jnp.full(4, -1e-3, jnp.float32))
    documents = document_numbers(None, 2, 4096)
    wanted = np.asarray(reference_state_space(given, documents))
    found, state = state_space(given, documents, chunk=256)
    assert state.dtype == jnp.float32
    assert np.abs(np.asarray(found, np.float32) - wanted).max() < 0.01 * np.abs(wanted).max()


@pytest.fixture(scope="module")
def model():
    return transformer(TransformerConfig(**SIZES))


@pytest.fixture(scope="module")
def params(model):
    params = model.init(jax.random.key(0))[0]
    # Kernels of a new model are small, so that its logits are alike and say little of its state.
    return jax.tree.map(lambda x: x * 20 if x.ndim > 2 else x, params)


def logits_of(model, params, tokens, **others):
    apply = jax.jit(lambda params, inputs: model.apply(params, {}, inputs, key=None, train=False)[0])
    return np.asarray(apply(params, dict(tokens=tokens, **others)))


def test_a_document_sees_itself_alone(model, params):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, 24)).astype(np.int32)
    segments = np.repeat([0, 1, 2, 0], [3, 9, 8, 4])[None].astype(np.int32)
    packed = logits_of(model, params, tokens, segments=segments)
    for start, stop in ((3, 12), (12, 20)):
        alone = logits_of(model, params, tokens[:, start:stop])
        np.testing.assert_allclose(packed[:, start:stop], alone, rtol=0, atol=TOLERANCE * np.ptp(alone))
    assert np.abs(logits_of(model, params, tokens)[:, 12:20] - packed[:, 12:20]).max() > 0.01 * np.ptp(packed)


def test_generates_what_whole_texts_say(model, params):
    """Prompts of several lengths in one batch, and an engine whose one slot is read, gone on with, and begun again."""
    rng, new = np.random.default_rng(0), 6
    prompts = [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in (1, 2, 9, 30)]
    wanted = []
    for prompt in prompts:
        text = np.zeros((1, 40), np.int32)
        text[0, : len(prompt)] = prompt
        for at in range(len(prompt), len(prompt) + new):
            text[0, at] = logits_of(model, params, text)[0, at - 1].argmax()
        wanted.append(text[0, len(prompt) : len(prompt) + new].tolist())
    sharded = jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    np.testing.assert_array_equal(generate_ids(sharded, params, prompts, new_tokens=new, sampling=GREEDY), wanted)
    with jt.Engine(sharded, params, slots=1, length=64, chunk=8) as engine:
        longest = [*prompts[-1].tolist(), *wanted[-1][:3]]
        for prompt, answer in [
            *zip(prompts, wanted, strict=True),
            (longest, wanted[-1][3:]),
            (prompts[-1], wanted[-1]),
        ]:
            request = jt.Request(tuple(map(int, prompt)), new_tokens=len(answer), sampling=GREEDY)
            assert [emitted.token for emitted in engine.submit(request)] == answer
    with pytest.raises(ConfigError, match="cache_dtype='int8'"):
        generate_ids(sharded, params, prompts, new_tokens=new, sampling=GREEDY, cache_dtype="int8")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(position="rotary"), "no attention and no MLP; set position: none"),
        (dict(sliding_window=8), "set sliding_window: null"),
        (dict(mlp_dim=48), "set mlp_dim: null"),
        (dict(causal=False), "set causal: true"),
        (dict(state_space=dict(groups=3)), "num_heads 4 is not a multiple of state_space.groups 3"),
    ],
)
def test_keys_of_attention_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(**SIZES | changed)
