"""The transformer: what it may see, what its parts compute, and that a cache changes nothing.

Shapes: B batch, L sequence, D embed, H heads, K head dim, F MLP width, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.model import TransformerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.layers import dropout
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
        if self.model.decoder is not None:
            self.decode = jax.jit(self.model.decoder.decode)

    def __call__(self, inputs, *, params=None, seed=None, train=False):
        key = None if seed is None else jax.random.key(seed)
        return np.asarray(self._forward(self.params if params is None else params, inputs, key, train))


# Each layer sees two tokens back: what stands before the last five is out of sight of two layers.
LOCAL = {**LLAMA, "sliding_window": 3, "attention_softcap": 1.5}
NETS = {"gpt": GPT, "llama": LLAMA, "window and softcap": LOCAL}


@pytest.fixture(scope="module")
def nets():
    return {name: Net(**settings) for name, settings in NETS.items()}


@pytest.fixture(params=NETS)
def net(request, nets):
    return nets[request.param]


def test_a_token_changes_nothing_before_it(net):
    changed = TOKENS.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 17
    before, after = net(TOKENS), net(changed)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    # And everything from there on.
    assert np.all(np.max(np.abs(before - after)[:, 4:], axis=-1) > 1e-4)


def test_a_window_ends_and_an_encoder_sees_ahead(nets):
    local, changed = nets["window and softcap"], TOKENS.copy()
    changed[:, 2] = (changed[:, 2] + 1) % 17
    difference = np.max(np.abs(local(TOKENS) - local(changed)), axis=-1)
    # Two layers of two tokens back.
    assert np.all(difference[:, 2:7] > 1e-4)
    assert np.all(difference[:, 7:] == 0)
    encoder = Net(**GPT, causal=False)
    assert np.all(np.max(np.abs(encoder(TOKENS) - encoder(changed)), axis=-1) > 1e-4)
    assert encoder.model.decoder is None


def test_packed_documents_do_not_see_each_other(net):
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1, 1, 1]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 1, 2]], np.int32)
    packed = net({"tokens": TOKENS, "segments": segments})
    given = net({"tokens": TOKENS, "segments": segments, "positions": positions})
    np.testing.assert_allclose(given, packed, **CLOSE)
    for row in range(2):
        for segment in range(segments[row].max() + 1):
            here = np.flatnonzero(segments[row] == segment)
            alone = net(np.pad(np.tile(TOKENS[row, here], (2, 1)), ((0, 0), (0, 8 - len(here)))))[0, : len(here)]
            np.testing.assert_allclose(packed[row, here], alone, **CLOSE)


def test_packed_texts_of_an_encoder_with_local_layers_give_what_they_give_alone():
    local = dict(pattern=(0, 1), window=3, rope_theta=100.0)
    encoder = Net(**LLAMA, num_layers=3, causal=False, embedding_norm="first_layer", local_layers=local)
    segments = np.array([[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 2, 0, 0]], np.int32)
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 0, 0]], np.int32)
    packed = encoder({"tokens": TOKENS, "segments": segments, "positions": positions})
    for row, segment in ((0, 1), (0, 2), (1, 1), (1, 2)):
        here = segments[row] == segment
        np.testing.assert_allclose(packed[row, here], encoder(TOKENS[row : row + 1, here])[0], **CLOSE)


def test_norms_and_widths_of_embeddings_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"embedding_norm=first_layer is a norm of .* set block: pre"):
        Net(embedding_norm="first_layer", block="post")
    with pytest.raises(
        ConfigError, match=r"embeddings of embedding_width are no output layer .* tie_embeddings: false"
    ):
        Net(embedding_width=8, tie_embeddings=True)


def test_positions_that_there_are_not_are_refused(nets):
    with pytest.raises(ConfigError, match=r"sequence length 9 exceeds model\.max_sequence_length=8"):
        nets["gpt"](np.zeros((1, 9), np.int32))
    with pytest.raises(ConfigError, match="pairs of dims, not 3; set an even head_dim"):
        Net(head_dim=3)


def test_rotary_attention_depends_on_distances_only(nets):
    net = nets["llama"]
    np.testing.assert_allclose(net({"tokens": TOKENS, "positions": ORDER}), net(TOKENS), **CLOSE)
    moved = net({"tokens": TOKENS, "positions": ORDER + 100})
    # Angles of up to 108 radians carry 4e-6 of fp32 rounding each.
    np.testing.assert_allclose(moved, net(TOKENS), rtol=1e-3, atol=5e-5)
    stretched = net({"tokens": TOKENS, "positions": ORDER * 2})
    assert np.max(np.abs(stretched - net(TOKENS))) > 1e-2


def test_rows_decode_at_positions_of_their_own(net):
    lengths = np.array([3, 6])
    # Prompts padded on the right: the padding's entries must never be seen.
    prompts = np.where(np.arange(6) < lengths[:, None], TOKENS[:, :6], 16).astype(np.int32)
    _, cache = net.decode(net.params, prompts, ORDER[:, :6], net.model.decoder.init_cache(2, 8, jnp.float32))
    full = net(TOKENS)
    for step in range(2):
        at = lengths + step
        tokens = TOKENS[[0, 1], at][:, None]
        logits, cache = net.decode(net.params, tokens, at[:, None].astype(np.int32), cache)
        np.testing.assert_allclose(logits[:, 0], full[[0, 1], at], **CLOSE)


@pytest.mark.long
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
    assert not np.array_equal(net(TOKENS, seed=1, train=True), net(TOKENS, seed=2, train=True))
    np.testing.assert_array_equal(net(TOKENS, seed=1), net(TOKENS))
    # Two equal layers whose MLP adds a constant 1 to every entry and whose attention adds nothing: without norms in
    # between, what arrives is the number of masks that kept an entry, so one mask for both would give 0 or 2 kept.
    params = jax.tree.map(np.zeros_like, net.params)
    params["blocks"]["mlp"]["down"]["bias"] = np.ones_like(params["blocks"]["mlp"]["down"]["bias"])
    params["output_norm"]["scale"] = np.ones_like(params["output_norm"]["scale"])
    params["embedding"] = np.eye(17, 16, dtype=np.float32)
    sums = net(TOKENS, params=params, seed=3, train=True)[..., :16]
    # Normalised, three counts (0, 1, 2) stay three values in each row; tokens add to an entry of their own.
    assert np.mean([len(np.unique(np.round(row, 4))) >= 3 for row in sums.reshape(-1, 16)]) > 0.9


def test_dropout_keeps_the_mean():
    x, rate = jnp.ones((100, 100)), 0.1
    found = np.asarray(jax.jit(lambda x: dropout(x, rate, jax.random.key(0)))(x))
    assert set(np.unique(found).tolist()) == {0.0, float(np.float32(1 / (1 - rate)))}
    # Five standard deviations of a mean of 10,000.
    assert abs(float(found.mean()) - 1) < 5 * np.sqrt(rate / (1 - rate) / 1e4)
    assert dropout(x, rate, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_longrope_takes_one_text_per_row_beyond_its_original_length():
    scaling = dict(kind="longrope", short_factors=(1.0, 1.1), long_factors=(3.0, 5.0), original_length=6)
    longrope = Net(rope_scaling=scaling)
    assert longrope(TOKENS).shape == (2, 8, 17)
    packed = {"tokens": TOKENS, "segments": np.ones_like(TOKENS)}
    assert longrope({name: value[:, :6] for name, value in packed.items()}).shape == (2, 6, 17)
    with pytest.raises(ConfigError, match=r"packed or padded rows of 8 tokens .* original_length=6"):
        longrope(packed)
