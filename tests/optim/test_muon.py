"""Muon: which parameters are matrices, the orthogonal update against an SVD, AdamW for the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config.model import ResNetConfig, TransformerConfig
from jaxtrain.config.optimizers import AdamWConfig, MuonConfig
from jaxtrain.config.rope import LatentConfig
from jaxtrain.models.model import parameter_shapes
from jaxtrain.models.shipped.build import build_model
from jaxtrain.optim.muon import newton_schulz
from jaxtrain.optim.optimizers import build_optimizer
from jaxtrain.optim.rules import Matrix, as_matrix, complete_axes

RATE = 0.5
EXPERTS = TransformerConfig(num_layers=2, embed_dim=32, num_heads=4, experts={"num_experts": 4, "experts_per_token": 2})


def matrix_paths(config, **options):
    model = build_model(config, **options)
    shapes = parameter_shapes(model)
    found = {path: as_matrix(path, leaf.shape, model.axes) for path, leaf in shapes.items()}
    return {path: matrix for path, matrix in found.items() if matrix is not None}, set(shapes)


def test_matrices_of_a_transformer_with_experts():
    found, everything = matrix_paths(EXPERTS, input_shape=(16,), vocab_size=64)
    assert found == {
        "blocks/attention/query/kernel": Matrix((0,), (1,), (2, 3)),
        "blocks/attention/key/kernel": Matrix((0,), (1,), (2, 3)),
        "blocks/attention/value/kernel": Matrix((0,), (1,), (2, 3)),
        "blocks/attention/output/kernel": Matrix((0,), (1, 2), (3,)),
        "blocks/mlp/up/kernel": Matrix((0, 1), (2,), (3,)),
        "blocks/mlp/gate/kernel": Matrix((0, 1), (2,), (3,)),
        "blocks/mlp/down/kernel": Matrix((0, 1), (2,), (3,)),
    }
    # Embedding, output layer, router and norms are for AdamW.
    assert {"embedding", "output", "blocks/mlp/router/kernel", "blocks/mlp_norm/scale"} <= everything


def test_matrices_of_latents_and_of_a_state_space():
    latent = dict(query_rank=8, key_value_rank=8, nope_dim=6, rope_dim=4, value_dim=8)
    found, _ = matrix_paths(
        EXPERTS.model_copy(update={"latent": LatentConfig(**latent)}), input_shape=(16,), vocab_size=64
    )
    assert {f"blocks/attention/{name}/kernel" for name in ("query_latent", "key_value_latent", "query")} <= set(found)
    sizes = dict(num_layers=2, embed_dim=32, num_heads=4, position="none", state_space={"groups": 2})
    found, _ = matrix_paths(TransformerConfig.model_validate(sizes), input_shape=(16,), vocab_size=64)
    names = ("query", "key", "value", "gate", "step", "output")
    assert set(found) == {f"blocks/attention/{name}/kernel" for name in names}


def test_matrices_of_the_other_models():
    found, _ = matrix_paths(
        ResNetConfig(stage_blocks=(1, 2), width=16, stem="small"), input_shape=(8, 8, 1), num_outputs=10
    )
    assert found["stage1_first/convs/0/kernel"] == Matrix((), (0, 1, 2), (3,))
    assert found["stage1_rest/convs/0/kernel"] == Matrix((0,), (1, 2, 3), (4,))
    assert not {"head_kernel", "stem/kernel", "stem_norm/scale"} & set(found)


# Parameters of a model without a table: path, shape, whether it is for Muon.
UNNAMED = [
    ("Dense_0/kernel", (8, 16), True),
    ("blocks/up/kernel", (3, 8, 16), True),
    ("blocks/norm/scale", (3, 8), False),
    ("blocks/attention/output/kernel", (3, 8, 16), True),
    ("blocks/attention/query/bias", (3, 4, 8), False),
    ("Embed_0/embedding", (64, 16), False),
    ("positions", (64, 16), False),
    ("output/kernel", (16, 64), False),
    ("lm_head/kernel", (16, 64), False),
    ("Dense_0/bias", (16,), False),
    ("Conv_0/kernel", (3, 3, 8, 16), False),  # without names of its dims
    ("Dense_0/kernel", (1, 16), False),  # a single row
]


def test_without_a_table():
    for path, shape, wanted in UNNAMED:
        axes = complete_axes({path: shape}, {}, "blocks")
        assert (as_matrix(path, shape, axes) is not None) == wanted, path


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 3, 8, 24)])
def test_singular_values_come_near_one(shape):
    """Directions stay, sizes go: Jordan et al. give 0.7 to 1.2 for singular values that are not tiny."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    orthogonal = jax.jit(lambda x: newton_schulz(x, 5))
    found = orthogonal(x)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    kept = np.linalg.svd(found, compute_uv=False)
    assert np.all((kept > 0.5) & (kept < 1.25))
    # The same directions: what is found, seen along them, is a diagonal.
    seen = np.swapaxes(u, -1, -2) @ np.asarray(found, np.float64) @ np.swapaxes(vt, -1, -2)
    np.testing.assert_allclose(seen * (1 - np.eye(seen.shape[-1])), 0, atol=1e-4)
    assert s.max() / s.min() > 1.5, "singular values that were equal before would prove nothing"
    # What gets no gradient fades out with its momentum.
    np.testing.assert_array_equal(orthogonal(jnp.zeros(shape)), 0)
    for size in (1e-20, 1e-25, 1e-40):
        assert np.max(np.abs(orthogonal(x * size))) < 1e-5


def reference(gradients, momentum, columns):
    """One kernel [embed, heads, head_dim] by the paper's recipe in numpy, float64."""
    buffer, value = np.zeros_like(gradients[0]), 0
    for g in gradients:
        buffer = momentum * buffer + (1 - momentum) * g
        x = (momentum * buffer + (1 - momentum) * g).reshape(-1, columns)
        turned = x.shape[0] > x.shape[1]
        x = x.T if turned else x
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if turned else x
        value = value - RATE * 0.2 * np.sqrt(max(x.shape)) * x.reshape(g.shape)
    return value


def test_updates_are_those_of_the_paper():
    axes = {"query": ("layers", "embed", "heads", "head_dim"), "output": ("embed", "vocab")}
    rng = np.random.default_rng(0)
    gradients = [{"query": rng.standard_normal((2, 24, 4, 2)), "output": rng.standard_normal((8, 16))} for _ in "ab"]
    found = {}
    for name, config in (("muon", MuonConfig()), ("adamw", AdamWConfig())):
        optimizer = build_optimizer(config, optax.constant_schedule(RATE), axes=axes)
        params = jax.tree.map(lambda g: jnp.zeros(g.shape), gradients[0])
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for gradient in gradients:
            updates, state = update(jax.tree.map(np.float32, gradient), state, params)
            params = optax.apply_updates(params, updates)
        found[name] = params
    for layer in range(2):
        wanted = reference([g["query"][layer] for g in gradients], 0.95, 8)
        # Five iterations in fp32, each of which amplifies what is small by up to 3.4: 3.4^5 x 2^-24.
        np.testing.assert_allclose(found["muon"]["query"][layer], wanted, rtol=1e-3, atol=1e-4)
    # The same arithmetic but for the order in which it is written.
    np.testing.assert_allclose(found["muon"]["output"], found["adamw"]["output"], rtol=1e-5)
    # The size of AdamW's: 0.2 of the learning rate an element.
    assert 0.15 < np.sqrt(np.mean((found["muon"]["query"] / RATE / 2) ** 2)) < 0.25
