"""Remat policies: the same gradients, fewer kept activations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.model import TransformerConfig
from jaxtrain.config.schema import Remat
from jaxtrain.errors import ConfigError
from jaxtrain.models.shipped.transformer import transformer
from jaxtrain.remat.policy import KEEP_ALL, scan_blocks

CONFIG = TransformerConfig(num_layers=3, embed_dim=16, num_heads=2, vocab_size=32, max_sequence_length=8)
TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8)

POLICIES = {
    "none": Remat(policy="none"),
    "full": Remat(policy="full"),
    "dots": Remat(policy="dots"),
    "one name": Remat(policy="names", names=("attention_projection",)),
    # Three layers are one segment of two and a rest of one.
    "sqrt": Remat(policy="sqrt"),
    "block inputs offloaded": Remat(policy="full", offload=("block_input",)),
    "one name offloaded, one kept": Remat(policy="names", names=("attention_output",), offload=("mlp_hidden",)),
}


@pytest.fixture(scope="module")
def params():
    shapes, _ = jax.eval_shape(transformer(CONFIG).init, jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda shape: rng.normal(0, 0.1, shape.shape).astype(np.float32), shapes)


def loss(remat):
    model = transformer(CONFIG, remat=remat)

    def run(params):
        logits, _ = model.apply(params, {}, TOKENS, key=None, train=True)
        return jnp.mean(jnp.square(logits))

    return run


@pytest.fixture(scope="module")
def reference(params):
    return jax.jit(jax.grad(loss(KEEP_ALL)))(params)


def kept_bytes(remat, params):
    """Bytes of what the forward pass hands to the backward pass."""
    _, pullback = jax.eval_shape(lambda params: jax.vjp(loss(remat), params), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))


# Of keeping nothing, segments, names and tensors in host memory one each.
PLAIN = ("sqrt", "one name offloaded, one kept")
LONG = ("full", "dots", "block inputs offloaded")


@pytest.mark.parametrize("name", [*PLAIN, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_gradients_do_not_change(name, params, reference):
    found = jax.jit(jax.grad(loss(POLICIES[name])))(params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True):
        # The same operations, fused differently: fp32 rounding, relative to the largest entry.
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * float(jnp.max(jnp.abs(other))))


def test_policies_keep_less():
    shapes, _ = jax.eval_shape(transformer(CONFIG).init, jax.random.key(0))
    kept = {name: kept_bytes(remat, shapes) for name, remat in POLICIES.items()}
    assert kept["full"] < kept["one name"] < kept["none"]
    assert kept["full"] < kept["dots"] < kept["none"]
    assert kept["sqrt"] < kept["full"]
    # One tensor [layers, batch, length, width] in fp32 more than the block inputs.
    assert kept["one name"] - kept["full"] == 3 * 2 * 8 * 16 * 4


def test_segments_give_what_a_plain_scan_gives():
    """The last carry, the outputs of every layer in order, and gradients: the same operations.

    Bit for bit on jax 0.10.2; newer compilers fuse, and so round, the two programs otherwise. Layers of a gain near 1
    do not amplify that.
    """
    count = 7  # a segment of four and a rest of three
    rng = np.random.default_rng(0)
    carry, layers = (0.35 * rng.normal(size=shape).astype(np.float32) for shape in ((4, 8), (count, 8, 8)))

    def block(x, w):
        x = jnp.tanh(x @ w)
        return x, jnp.sum(x)

    def run(remat, carry, layers):
        last, outputs = scan_blocks(remat, block, carry, layers)
        return jnp.sum(last * last) + jnp.sum(outputs * jnp.arange(1.0, count + 1)), (last, outputs)

    found, wanted = (
        jax.jit(jax.grad(partial(run, remat), argnums=(0, 1), has_aux=True))(carry, layers)
        for remat in (Remat(policy="sqrt"), Remat(policy="none"))
    )
    # A few roundings of 6e-8 of values up to 10.
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6), found, wanted)


def test_sqrt_takes_memory_of_sqrt_n():
    """Temporaries of the compiled program, in block inputs, from 16 layers to 64: 8 more, and 48 more under full."""
    x = jax.ShapeDtypeStruct((512, 64), np.float32)

    def block(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w), None

    def temporaries(policy, count):
        def loss(x, layers):
            return jnp.sum(scan_blocks(Remat(policy=policy), block, x, layers)[0])

        layers = jax.ShapeDtypeStruct((count, 64, 64), np.float32)
        memory = jax.jit(jax.grad(loss)).lower(x, layers).compile().memory_analysis()
        return memory.temp_size_in_bytes / (x.size * 4)

    more = {policy: temporaries(policy, 64) - temporaries(policy, 16) for policy in ("full", "sqrt")}
    # Weights, an eighth of an input each, are kept too by neither.
    assert more["full"] == pytest.approx(48, abs=1)
    assert more["sqrt"] == pytest.approx(8, abs=1)


def test_offloaded_tensors_cross_to_the_host_and_back(params):
    """On CPU the compiled program holds no transfers, because both memories are one: they are read off the trace."""
    kept, moved = (
        str(jax.make_jaxpr(jax.grad(loss(remat)))(params))
        for remat in (
            Remat(policy="names", names=("mlp_hidden",)),
            Remat(policy="names", names=("attention_output",), offload=("mlp_hidden",)),
        )
    )
    assert "device_put" not in kept
    # One tensor of one scan: out in the forward loop, back in the backward loop.
    assert moved.count("device_put[") == 2
    assert "<host>" in moved


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (dict(policy="some"), "Remat: policy is 'some', not one of none, full, dots, sqrt, names"),
        (dict(policy="names", names=("mlp",)), "Remat: names is 'mlp', not one of query, key, value, attention_output"),
        (dict(policy="dots", offload=("mlp_hidden",)), "Remat: remat.offload needs remat.policy=full or names"),
        (
            dict(policy="names", names=("query",), offload=("query",)),
            "Remat: remat.policy=names needs remat.names, none of them in",
        ),
    ],
    ids=["policy", "name", "a policy without names", "kept twice"],
)
def test_wrong_policies(remat, message):
    with pytest.raises(ConfigError) as caught:
        Remat(**remat)
    assert str(caught.value).startswith(message)
