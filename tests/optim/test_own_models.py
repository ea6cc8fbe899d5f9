"""Models of one's own, without an axes table: names and shapes say what Muon, weight decay and Adafactor do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxtrain as jt
from jaxtrain.layout.sharding import path_name
from jaxtrain.optim.rules import factored_dims
from jaxtrain.train.assemble import build_step

ROWS = np.zeros((1, 6, 16), np.float32)
CONFIG = {
    "data": {"kind": "synthetic"},
    "task": "regression",
    "optimizer": {"schedule": {"kind": "constant"}},
    "train": {"steps": 9},
}


class Attention(linen.Module):
    """Attention with biases and attention without, an embedding, a convolution and an output layer."""

    @linen.compact
    def __call__(self, x):
        x = x + linen.Embed(32, 16)(jnp.zeros(x.shape[:2], jnp.int32))
        x = linen.MultiHeadDotProductAttention(num_heads=4, name="biased")(linen.LayerNorm()(x))
        x = linen.MultiHeadDotProductAttention(num_heads=4, use_bias=False, name="plain")(x)
        x = linen.DenseGeneral((3, 4, 8), name="qkv")(x).reshape(*x.shape[:2], -1)
        return linen.Dense(5, name="head")(linen.Conv(16, (3,))(x))


class Mapped(nnx.Module):
    """A stack of as many layers as each has inputs, and a matrix of another name beside it."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=16)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs):
            return nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs))

        self.stack, self.mixer = layers(rngs), nnx.Param(jnp.ones((8, 12)))
        self.table = nnx.Embed(32, 16, rngs=rngs)


class EquinoxBlock(eqx.Module):
    """Without biases; the weights of norms and of layers have one name."""

    norm: eqx.nn.RMSNorm
    up: eqx.nn.Linear

    def __init__(self, key):
        self.norm, self.up = eqx.nn.RMSNorm(16, use_bias=False), eqx.nn.Linear(16, 8, use_bias=False, key=key)


class Equinox(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    blocks: EquinoxBlock
    biased: eqx.nn.Linear
    convolution: eqx.nn.Conv1d
    wte: eqx.nn.Embedding

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(4, 16, key=key)
        self.blocks = eqx.filter_vmap(EquinoxBlock)(jax.random.split(key, 3))
        self.biased = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 8, key=key))(jax.random.split(key, 3))
        self.convolution = eqx.nn.Conv1d(16, 8, 3, key=key)
        self.wte = eqx.nn.Embedding(32, 16, key=key)


FLAX_ATTENTION = {f"{part}/kernel" for part in ("query", "key", "value", "out")}
# model, parameters that Muon updates, further ones that decay, beginnings of the paths of stacks
MODELS = {
    "linen attention": (
        lambda: jt.from_linen(Attention(), ROWS),
        {f"{one}/{part}" for one in ("biased", "plain") for part in FLAX_ATTENTION} | {"qkv/kernel"},
        {"Embed_0/embedding", "Conv_0/kernel", "head/kernel"},
        (),
    ),
    "nnx vmap": (
        lambda: jt.from_nnx(Mapped, call=lambda module, x: x),
        {"stack/layers/0/kernel", "mixer"},
        {"table/embedding"},
        ("stack/",),
    ),
    "equinox": (
        lambda: jt.from_equinox(Equinox),
        {f"attention/{part}_proj/weight" for part in ("query", "key", "value", "output")}
        | {"blocks/up/weight", "biased/weight"},
        {"convolution/weight", "wte/weight"},
        ("blocks/", "biased/"),
    ),
}


def optimizer_of(model, **settings):
    config = jt.load_config({**CONFIG, "optimizer": {**CONFIG["optimizer"], "learning_rate": 1.0, **settings}}).config
    return build_step(config, input_shape=(6, 16), model=model, devices=jax.devices()[:1]).optimizer


def by_path(tree):
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(("make", "muon", "decays", "stacks"), MODELS.values(), ids=MODELS)
def test_one_rule_for_muon_decay_and_adafactor(make, muon, decays, stacks):
    """What each optimizer keeps tells how it updates; numbers of updates are in the tests of each."""
    model = make()
    shapes = jax.eval_shape(model.init, jax.random.key(0))[0]
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    paths = by_path(params)

    kept = by_path(jax.eval_shape(optimizer_of(model, kind="muon").init, params))
    second = {path.partition("/nu/")[2] for path in kept if "/nu/" in path}
    assert set(paths) - second == muon, "AdamW alone has a second moment"

    sgd = optimizer_of(model, kind="sgd", weight_decay=0.5)
    zeros = jax.tree.map(np.zeros_like, params)
    updates = jax.jit(lambda zeros, params: sgd.update(zeros, sgd.init(params), params)[0])(zeros, params)
    assert {path for path, update in by_path(updates).items() if np.any(update)} == muon | decays

    adafactor = optimizer_of(model, kind="adafactor", min_dim_size_to_factor=2)
    state = by_path(jax.eval_shape(adafactor.init, params))
    for path, leaf in paths.items():
        counting = (0,) if path.startswith(stacks) else ()
        dims = factored_dims(leaf.shape, counting, 2)
        wanted = (1,) if dims is None else (*leaf.shape[: dims[1]], *leaf.shape[dims[1] + 1 :])
        assert state[f"0/v_row/{path}"].shape == wanted, path
