"""The transformer: what it may see, what its parts compute, and that a cache changes nothing.

Shapes: B batch, L sequence, D embed, H heads, K head dim, F MLP width, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.rope import RopeScaling
from jaxtrain.config.sizes import TRANSFORMER_SIZES
from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.layers import dropout
from jaxtrain.models.rotary import rotary_frequencies, rotate
from jaxtrain.models.shipped.transformer import transformer

SIZES = dict(num_layers=2, embed_dim=16, num_heads=4, vocab_size=17, max_sequence_length=8)
GPT = dict(position="learned", norm="layernorm", activation="gelu", bias=True, tie_embeddings=True, mlp_dim=24)
LLAMA = dict(num_kv_heads=2, mlp_dim=24)
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], np.int32)
ORDER = np.tile(np.arange(8, dtype=np.int32), (2, 1))
# fp32 logits of about 0.5 after two layers.
CLOSE = dict(rtol=1e-4, atol=2e-6)


class Net:
    """A model with parameters larger than at init, so that every part matters, and a jitted forward pass."""

    def __init__(self, **settings):
        self.config = TransformerConfig(**{**SIZES, **settings})
        self.model = transformer(self.config)
        shapes, _ = jax.eval_shape(self.model.init, jax.random.key(0))
        rng = np.random.default_rng(0)
        self.params = jax.tree.map(lambda s: rng.normal(0, 0.3, s.shape).astype(np.float32), shapes)
        self._forward = jax.jit(
            lambda params, inputs, key, train: self.model.apply(params, {}, inputs, key=key, train=train)[0],
            static_argnums=3,
        )

    def __call__(self, inputs, *, params=None, seed=None, train=False):
        key = None if seed is None else jax.random.key(seed)
        return np.asarray(self._forward(self.params if params is None else params, inputs, key, train))


# Each layer sees two tokens back: what stands before the last five is out of sight of two layers.
LOCAL = {**LLAMA, "sliding_window": 3, "attention_softcap": 1.5}


@pytest.fixture(scope="module", params=[GPT, LLAMA, LOCAL], ids=["gpt", "llama", "window and softcap"])
def net(request):
    return Net(**request.param)


def test_a_token_changes_nothing_before_it(net):
    changed = TOKENS.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 17
    before, after = net(TOKENS), net(changed)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    # And everything from there on.
    assert np.all(np.max(np.abs(before - after)[:, 4:], axis=-1) > 1e-4)


def test_a_window_ends_and_an_encoder_sees_ahead():
    local, changed = Net(**LOCAL), TOKENS.copy()
    changed[:, 2] = (changed[:, 2] + 1) % 17
    difference = np.max(np.abs(local(TOKENS) - local(changed)), axis=-1)
    # Two layers of two tokens back.
    assert np.all(difference[:, 2:7] > 1e-4)
    assert np.all(difference[:, 7:] == 0)
    encoder = Net(**GPT, causal=False)
    assert np.all(np.max(np.abs(encoder(TOKENS) - encoder(changed)), axis=-1) > 1e-4)
    assert encoder.model.decoder is None


def test_softcap_bounds_what_attention_can_tell_apart():
    """Capped near zero, every score is the same, whatever the queries and keys."""
    flat = Net(**LLAMA, attention_softcap=1e-6)
    query = jax.tree.map(lambda leaf: leaf * 2, flat.params["blocks"]["attention"]["query"])
    params = {**flat.params, "blocks": {**flat.params["blocks"]}}
    params["blocks"]["attention"] = {**params["blocks"]["attention"], "query": query}
    np.testing.assert_allclose(flat(TOKENS, params=params), flat(TOKENS), **CLOSE)
    plain = Net(**LLAMA)
    assert np.max(np.abs(plain(TOKENS, params=params) - plain(TOKENS))) > 1e-2


def test_positions_given_are_the_default(net):
    np.testing.assert_array_equal(net({"tokens": TOKENS, "positions": ORDER}), net(TOKENS))
    np.testing.assert_array_equal(net({"tokens": TOKENS}), net(TOKENS))


def test_packed_documents_do_not_see_each_other(net):
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1, 1, 1]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 1, 2]], np.int32)
    packed = net({"tokens": TOKENS, "segments": segments, "positions": positions})
    for row in range(2):
        for segment in range(segments[row].max() + 1):
            here = np.flatnonzero(segments[row] == segment)
            alone = net(np.pad(TOKENS[row, here], (0, 8 - len(here)))[None])[0, : len(here)]
            np.testing.assert_allclose(packed[row, here], alone, **CLOSE)


def test_a_longer_sequence_than_learned_positions_is_refused():
    net = Net(**GPT)
    with pytest.raises(ConfigError) as caught:
        net(np.zeros((1, 9), np.int32))
    assert str(caught.value) == "sequence length 9 exceeds model.max_sequence_length=8"


def test_grouped_heads_are_full_heads_with_repeated_keys_and_values():
    grouped = Net(**LLAMA)
    full = Net(**{**LLAMA, "num_kv_heads": 4})
    params = jax.tree.map(lambda leaf: leaf, grouped.params)
    for name in ("key", "value"):
        # Query head h reads group h // 2: [layers, D, groups, K] -> [layers, D, heads, K].
        kernel = np.repeat(grouped.params["blocks"]["attention"][name]["kernel"], 2, axis=2)
        params["blocks"]["attention"][name]["kernel"] = kernel
    np.testing.assert_allclose(full(TOKENS, params=params), grouped(TOKENS), **CLOSE)


def test_rotary_attention_depends_on_distances_only():
    net = Net(**LLAMA)
    moved = net({"tokens": TOKENS, "positions": ORDER + 100})
    # Angles of up to 108 radians carry 4e-6 of fp32 rounding each.
    np.testing.assert_allclose(moved, net(TOKENS), rtol=1e-3, atol=5e-5)
    stretched = net({"tokens": TOKENS, "positions": ORDER * 2})
    assert np.max(np.abs(stretched - net(TOKENS))) > 1e-2


def test_rotation_of_a_vector_by_hand():
    frequencies = rotary_frequencies(4, 100.0, None)
    np.testing.assert_allclose(frequencies, [1.0, 0.1], rtol=1e-6)  # 100^(-2i / 4), one fp32 power
    x = np.array([1.0, 2.0, 3.0, 4.0], np.float32).reshape(1, 1, 1, 4)
    found = np.asarray(rotate(x, np.array([[2]], np.int32), frequencies)).ravel()
    # Dim 0 turns with dim 2 by 2 radians, dim 1 with dim 3 by 0.2.
    expected = [
        np.cos(2) - 3 * np.sin(2),
        2 * np.cos(0.2) - 4 * np.sin(0.2),
        3 * np.cos(2) + np.sin(2),
        4 * np.cos(0.2) + 2 * np.sin(0.2),
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # fp32 sine and cosine


@pytest.mark.parametrize("size", ["llama3.1_8b", "llama3.2_1b"])
def test_rope_scaling_of_llama(size):
    row = TRANSFORMER_SIZES[size]
    head_dim, scaling = row["embed_dim"] // row["num_heads"], row["rope_scaling"]
    expected = []
    # Dubey et al. 2024 and the reference code published with the weights, a frequency at a time, in float64.
    for pair in range(head_dim // 2):
        frequency = row["rope_theta"] ** (-2 * pair / head_dim)
        wavelength = 2 * np.pi / frequency
        if wavelength < scaling["original_length"] / scaling["high_frequency_factor"]:
            expected.append(frequency)
        elif wavelength > scaling["original_length"] / scaling["low_frequency_factor"]:
            expected.append(frequency / scaling["factor"])
        else:
            low, high = scaling["low_frequency_factor"], scaling["high_frequency_factor"]
            smooth = (scaling["original_length"] / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    found = rotary_frequencies(head_dim, row["rope_theta"], RopeScaling(**scaling))
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # fp32 powers of 5e5
    # All three bands are there.
    plain = np.asarray(rotary_frequencies(head_dim, row["rope_theta"], None))
    ratios = np.asarray(found) / plain
    assert ratios[0] == 1
    assert ratios[-1] == pytest.approx(1 / scaling["factor"])
    assert np.any((ratios > 1.01 / scaling["factor"]) & (ratios < 0.99))


# Lengths of the chunks that 8 tokens are fed in.
@pytest.mark.parametrize("chunks", [[8], [3, 4, 1], [1] * 8], ids=["at once", "chunks", "one by one"])
def test_decoding_with_a_cache_is_the_forward_pass(net, chunks):
    decode = jax.jit(net.model.decoder.decode)
    cache, start, found = net.model.decoder.init_cache(2, 10, jnp.float32), 0, []
    for length in chunks:
        here = slice(start, start + length)
        logits, cache = decode(net.params, TOKENS[:, here], ORDER[:, here], cache)
        found.append(logits)
        start += length
    np.testing.assert_allclose(np.concatenate(found, 1), net(TOKENS), **CLOSE)


def test_rows_decode_at_positions_of_their_own(net):
    decode = jax.jit(net.model.decoder.decode)
    lengths = np.array([3, 6])
    # Prompts padded on the right: the padding's entries must never be seen.
    prompts = np.where(np.arange(6) < lengths[:, None], TOKENS[:, :6], 16).astype(np.int32)
    _, cache = decode(net.params, prompts, ORDER[:, :6], net.model.decoder.init_cache(2, 8, jnp.float32))
    full = net(TOKENS)
    for step in range(2):
        at = lengths + step
        tokens = TOKENS[[0, 1], at][:, None]
        logits, cache = decode(net.params, tokens, at[:, None].astype(np.int32), cache)
        np.testing.assert_allclose(logits[:, 0], full[[0, 1], at], **CLOSE)


def test_the_cache_keeps_its_dtype_and_logits_are_float32(net):
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), net.params)
    cache = net.model.decoder.init_cache(2, 8, jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        logits, after = jax.eval_shape(net.model.decoder.decode, params, TOKENS, ORDER, cache)
    assert logits.dtype == jnp.float32
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)


def numpy_gpt(params, tokens, heads):
    """GPT-2 (Radford et al. 2019) in float64, written from the paper: one layer, one head at a time."""

    def norm(x, p):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p["scale"] + p["bias"]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    length = tokens.shape[1]
    for layer in range(params["blocks"]["mlp"]["up"]["kernel"].shape[0]):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        y, attention = norm(x, block["attention_norm"]), block["attention"]
        out = np.zeros_like(x)
        for head in range(heads):
            q, k, v = (
                y @ attention[n]["kernel"][:, head] + attention[n]["bias"][head] for n in ("query", "key", "value")
            )
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out += weights @ v @ attention["output"]["kernel"][head]
        x = x + out + attention["output"]["bias"]
        y, mlp = norm(x, block["mlp_norm"]), block["mlp"]
        x = x + gelu(y @ mlp["up"]["kernel"] + mlp["up"]["bias"]) @ mlp["down"]["kernel"] + mlp["down"]["bias"]
    return norm(x, params["output_norm"]) @ params["embedding"].T


def test_gpt_against_numpy():
    net = Net(**GPT)
    # fp32 against float64 over two layers.
    np.testing.assert_allclose(net(TOKENS), numpy_gpt(net.params, TOKENS, 4), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("norm", "bias"), [("layernorm", True), ("layernorm", False), ("rmsnorm", True), ("rmsnorm", False)]
)
def test_biases_are_there_when_asked_for(norm, bias):
    params = Net(norm=norm, bias=bias).params
    assert ("bias" in params["blocks"]["mlp"]["up"]) == bias
    assert ("bias" in params["output_norm"]) == (bias and norm == "layernorm")


def test_initial_parameters_are_gpt_2s():
    config = TransformerConfig(**{**SIZES, **GPT, "embed_dim": 64, "num_layers": 2, "mlp_dim": 256})
    params, _ = jax.jit(transformer(config).init)(jax.random.key(0, impl="unsafe_rbg"))  # compiles faster
    blocks = params["blocks"]
    # 0.02, residual outputs smaller by sqrt(2 x layers); 5 % is five standard errors of 8,192 numbers and more.
    for kernel, stddev in [
        (blocks["attention"]["query"]["kernel"], 0.02),
        (blocks["attention"]["output"]["kernel"], 0.01),
        (blocks["mlp"]["up"]["kernel"], 0.02),
        (blocks["mlp"]["down"]["kernel"], 0.01),
    ]:
        assert np.std(kernel) == pytest.approx(stddev, rel=0.05)
    # Layers draw numbers of their own.
    assert not np.array_equal(blocks["mlp"]["up"]["kernel"][0], blocks["mlp"]["up"]["kernel"][1])


def test_dropout_only_in_training_and_different_in_every_layer():
    net = Net(**GPT, dropout=0.5)
    plain = Net(**GPT)
    np.testing.assert_array_equal(net(TOKENS, seed=1), plain(TOKENS))
    assert not np.array_equal(net(TOKENS, seed=1, train=True), net(TOKENS, seed=2, train=True))
    # Two equal layers whose MLP adds a constant 1 to every entry and whose attention adds nothing: without norms in
    # between, what arrives is the number of masks that kept an entry, so one mask for both would give 0 or 2 kept.
    params = jax.tree.map(np.zeros_like, net.params)
    params["blocks"]["mlp"]["down"]["bias"] = np.ones_like(params["blocks"]["mlp"]["down"]["bias"])
    params["output_norm"]["scale"] = np.ones_like(params["output_norm"]["scale"])
    params["embedding"] = np.eye(17, 16, dtype=np.float32)
    sums = net(TOKENS, params=params, seed=3, train=True)[..., :16]
    # Normalised, three counts (0, 1, 2) stay three values in each row; tokens add to an entry of their own.
    assert np.mean([len(np.unique(np.round(row, 4))) >= 3 for row in sums.reshape(-1, 16)]) > 0.9


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_the_mean(rate):
    x = jnp.ones((100, 100))
    found = dropout(x, rate, jax.random.key(0))
    assert set(np.unique(found).tolist()) == {0.0, float(np.float32(1 / (1 - rate)))}
    # Five standard deviations of a mean of 10,000.
    assert abs(float(found.mean()) - 1) < 5 * np.sqrt(rate / (1 - rate) / 1e4)
    assert dropout(x, rate, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x
