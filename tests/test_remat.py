"""Remat policies: the same gradients, fewer kept activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.models import TransformerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.transformer import transformer
from jaxtrain.remat import TENSOR_NAMES, Remat

CONFIG = TransformerConfig(num_layers=3, embed_dim=16, num_heads=2, vocab_size=32, max_sequence_length=8)
TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8)

POLICIES = {
    "none": Remat("none"),
    "full": Remat("full"),
    "dots": Remat("dots"),
    "one name": Remat("names", ("attention_projection",)),
    "every name": Remat("names", TENSOR_NAMES),
    # Three layers are one segment of two and a rest of one.
    "sqrt": Remat("sqrt"),
    "block inputs offloaded": Remat("full", offload=("block_input",)),
    "one name offloaded, one kept": Remat("names", ("attention_output",), ("mlp_hidden",)),
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
    return jax.jit(jax.grad(loss(Remat())))(params)


def kept_bytes(remat, params):
    """Bytes of what the forward pass hands to the backward pass."""
    _, pullback = jax.eval_shape(lambda params: jax.vjp(loss(remat), params), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))


@pytest.mark.parametrize("remat", [r for r in POLICIES.values() if r.policy != "none"], ids=list(POLICIES)[1:])
def test_gradients_do_not_change(remat, params, reference):
    found = jax.jit(jax.grad(loss(remat)))(params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True):
        # The same operations, fused differently: fp32 rounding, relative to the largest entry.
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * float(jnp.max(jnp.abs(other))))


def test_policies_keep_less():
    shapes, _ = jax.eval_shape(transformer(CONFIG).init, jax.random.key(0))
    kept = {name: kept_bytes(remat, shapes) for name, remat in POLICIES.items()}
    assert kept["full"] < kept["one name"] < kept["every name"] < kept["none"]
    assert kept["full"] < kept["dots"] < kept["none"]
    assert kept["sqrt"] < kept["full"]
    # One tensor [layers, batch, length, width] in fp32 more than the block inputs.
    assert kept["one name"] - kept["full"] == 3 * 2 * 8 * 16 * 4


KNOWN = "query, key, value, attention_output, attention_projection, mlp_hidden, mlp_output"


@pytest.mark.parametrize(
    ("policy", "names", "message"),
    [
        pytest.param("some", (), "unknown remat.policy 'some'; known: none, full, dots, sqrt, names", id="policy"),
        pytest.param("names", ("mlp",), f"remat.names: no tensor 'mlp'; known: {KNOWN}", id="name"),
        pytest.param("names", (), f"remat.policy=names needs remat.names; known: {KNOWN}", id="no names"),
    ],
)
def test_wrong_policies(policy, names, message):
    with pytest.raises(ConfigError) as caught:
        Remat(policy, names)
    assert str(caught.value) == message
