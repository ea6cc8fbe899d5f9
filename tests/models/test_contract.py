"""What every model keeps, shipped or somebody's own."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxtrain.config.encoder_decoder import EncoderDecoderConfig
from jaxtrain.config.models import MLPConfig, ResNetConfig, TransformerConfig
from jaxtrain.layout.rules import table_row
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.from_functions import from_functions
from jaxtrain.models.from_linen import from_linen
from jaxtrain.models.from_nnx import from_nnx
from jaxtrain.models.model import Model
from jaxtrain.models.shipped.axes import ENCODER_DECODER, RESNET, TRANSFORMER
from jaxtrain.models.shipped.encoder_decoder import encoder_decoder
from jaxtrain.models.shipped.mlp import mlp
from jaxtrain.models.shipped.resnet import resnet
from jaxtrain.models.shipped.transformer import transformer
from jaxtrain.precision.policy import cast_floats
from jaxtrain.remat.policy import Remat

SMALL = dict(num_layers=2, embed_dim=8, num_heads=2, vocab_size=13, max_sequence_length=6)
# Inits for these keys compile five times faster than for the default kind.
FAST = "unsafe_rbg"
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6)
IMAGES = np.linspace(-1, 1, 2 * 8 * 8 * 3, dtype=np.float32).reshape(2, 8, 8, 3)
ROWS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)


class OwnNNX(nnx.Module):
    """Dropout and batch statistics, as a user writes them."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs, momentum=0.9)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


class OwnLinen(linen.Module):
    """The same in Linen."""

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Dense(8)(x)
        x = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(3)(x)


class PlainLinen(linen.Module):
    """No `train`, no state."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x)


def own_functions():
    return from_functions(
        lambda key: {"layer": {"w": jax.random.normal(key, (6, 3)), "b": jnp.zeros(3)}},
        lambda params, x: x @ params["layer"]["w"] + params["layer"]["b"],
    )


@dataclass(frozen=True)
class Case:
    """A model, inputs for it, and whether a step draws random numbers or changes its state."""

    model: Model
    inputs: Any
    random: bool = False
    stateful: bool = False
    casts: bool = True  # whether it computes in the dtype of its parameters


def transformer_case(remat="none", **settings):
    model = transformer(TransformerConfig(**{**SMALL, **settings}), remat=Remat(remat))
    return Case(model, TOKENS, random=settings.get("dropout", 0) > 0)


GPT = dict(position="learned", norm="layernorm", activation="gelu", bias=True, tie_embeddings=True)
LLAMA = dict(num_kv_heads=1, mlp_dim=12)
VARIANTS = {
    "gpt": lambda: transformer_case(**GPT),
    "llama": lambda: transformer_case(**LLAMA),
    "llama with biases": lambda: transformer_case(bias=True, **LLAMA),
}
MAKERS = {
    "gpt with dropout, full remat": lambda: transformer_case("full", dropout=0.5, **GPT),
    "llama": lambda: transformer_case(**LLAMA),
    "resnet": lambda: Case(
        resnet(ResNetConfig(stage_blocks=(1, 2), width=4, stem="small", num_classes=3), input_shape=(8, 8, 3)),
        IMAGES,
        stateful=True,
    ),
    "resnet with bottlenecks": lambda: Case(
        resnet(ResNetConfig(stage_blocks=(2,), width=4, bottleneck=True, num_classes=3), input_shape=(8, 8, 3)),
        IMAGES,
        stateful=True,
    ),
    "mlp": lambda: Case(mlp(MLPConfig(hidden_dims=(5, 4), num_outputs=3), input_shape=(6,)), ROWS),
    "mlp with dropout": lambda: Case(
        mlp(MLPConfig(hidden_dims=(32, 16), num_outputs=3, dropout=0.5), input_shape=(6,)), ROWS, random=True
    ),
    # Flax's own layers have dtypes of their own: their norms promote to float32.
    "from_nnx": lambda: Case(from_nnx(OwnNNX), ROWS, random=True, stateful=True, casts=False),
    "from_linen": lambda: Case(from_linen(OwnLinen(), ROWS), ROWS, random=True, stateful=True, casts=False),
    "from_linen without state": lambda: Case(from_linen(PlainLinen(), ROWS), ROWS, casts=False),
    "from_functions": lambda: Case(own_functions(), ROWS),
}


@dataclass(frozen=True)
class Built:
    """A case with its variables and a jitted apply(params, state, inputs, seed, train)."""

    case: Case
    params: Any
    state: Any
    run: Any


# Further forms of models of which plain pytest runs another.
LONG = ("resnet with bottlenecks", "mlp with dropout", "from_linen without state")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in MAKERS]
)
def built(request):
    case = MAKERS[request.param]()
    params, state = jax.jit(case.model.init)(jax.random.key(3, impl=FAST))

    def run(params, state, inputs, seed, train):
        key = None if seed is None else jax.random.key(seed)
        return case.model.apply(params, state, inputs, key=key, train=train)

    return Built(case, params, state, jax.jit(run, static_argnums=4))


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def nodes(tree, path=()):
    yield path, tree
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from nodes(child, (*path, key))


def test_variables_are_plain_dicts_of_float32_arrays(built):
    for tree in (built.params, built.state):
        assert type(tree) is dict
        for path, node in nodes(tree):
            assert type(node) is dict or isinstance(node, jax.Array), path
            assert all(type(key) is str for key in path)
    assert {leaf.dtype for leaf in jax.tree.leaves(built.params)} == {np.dtype(np.float32)}
    assert bool(built.state) == built.case.stateful


def test_init_depends_on_the_key_alone(built):
    init = jax.jit(built.case.model.init)
    assert_same(init(jax.random.key(3, impl=FAST)), (built.params, built.state))
    assert not same(init(jax.random.key(4, impl=FAST))[0], built.params)


def test_apply_is_pure(built):
    before = jax.tree.map(np.array, (built.params, built.state))
    first = built.run(built.params, built.state, built.case.inputs, 5, True)
    assert_same(built.run(built.params, built.state, built.case.inputs, 5, True), first)
    assert_same((built.params, built.state), before)


def test_state_keeps_its_structure_and_changes_only_in_training(built):
    _, trained = built.run(built.params, built.state, built.case.inputs, 5, True)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), trained) == jax.tree.map(
        lambda x: (x.shape, x.dtype), built.state
    )
    assert same(trained, built.state) != built.case.stateful
    _, evaluated = built.run(built.params, trained, built.case.inputs, None, False)
    assert_same(evaluated, trained)


def test_keys_matter_only_where_there_is_dropout_and_only_in_training(built):
    outputs = {
        (seed, train): np.asarray(built.run(built.params, built.state, built.case.inputs, seed, train)[0])
        for seed in (5, 6)
        for train in (True, False)
    }
    assert np.array_equal(outputs[5, True], outputs[6, True]) != built.case.random
    np.testing.assert_array_equal(outputs[5, False], outputs[6, False])


def test_gradients_reach_every_parameter(built):
    def loss(params):
        outputs, _ = built.case.model.apply(
            params, built.state, built.case.inputs, key=jax.random.key(0), train=not built.case.random
        )
        return jnp.sum(jnp.sin(outputs.astype(jnp.float32) + jnp.arange(outputs.size).reshape(outputs.shape)))

    shapes = jax.tree.map(jnp.shape, built.params)
    gradients = jax.jit(jax.grad(loss))(built.params)
    assert jax.tree.map(jnp.shape, gradients) == shapes
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))


def test_bf16_in_bf16_out_without_promotion(built):
    if not built.case.casts:
        pytest.skip("layers of Flax choose their own dtypes")
    params, inputs = (
        cast_floats(jax.tree.map(jnp.asarray, tree), jnp.bfloat16) for tree in (built.params, built.case.inputs)
    )
    with jax.numpy_dtype_promotion("strict"):
        outputs, state = jax.eval_shape(lambda: built.run(params, built.state, inputs, 5, True))
        evaluated, _ = jax.eval_shape(lambda: built.run(params, built.state, inputs, None, False))
    assert outputs.dtype == evaluated.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {np.dtype(np.float32)}


def parameter_shapes(*models):
    found = {}
    for model in models:
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        found.update({path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)})
    return found


def hidden(count):
    return mlp(MLPConfig(hidden_dims=(4,) * count, num_outputs=2), input_shape=(3,))


# Between them they have every parameter that no decoder of `VARIANTS` has.
ENCODERS: tuple[dict[str, Any], ...] = (
    dict(
        causal=False,
        head=dict(kind="masked_language_model"),
        norm="layernorm",
        bias=True,
        embedding_norm=True,
        token_types=2,
        **SMALL,
    ),
    dict(
        causal=False,
        head=dict(kind="sequence", hidden="tanh", num_labels=3),
        position="relative",
        qk_norm=True,
        **SMALL,
    ),
)
TABLES = {
    "transformer": lambda: (
        TRANSFORMER,
        [*(make().model for make in VARIANTS.values()), *(transformer(TransformerConfig(**one)) for one in ENCODERS)],
    ),
    "encoder_decoder": lambda: (
        ENCODER_DECODER,
        [
            encoder_decoder(EncoderDecoderConfig(**SMALL)),
            encoder_decoder(EncoderDecoderConfig(norm="layernorm", bias=True, **SMALL)),
        ],
    ),
    "resnet": lambda: (RESNET, [MAKERS["resnet"]().model, MAKERS["resnet with bottlenecks"]().model]),
    "mlp": lambda: (hidden(3).axes, [hidden(3)]),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_of_a_table_belongs_to_a_parameter_of_its_rank(table):
    axes, models = table()
    shapes = parameter_shapes(*models)
    owners = {path: table_row(path, {pattern: pattern for pattern in axes}) for path in shapes}
    for pattern, row in axes.items():
        owned = [path for path in shapes if owners[path] == pattern]
        assert owned, f"{pattern} answers for no parameter of any variant"
        assert {len(shapes[path]) for path in owned} == {len(row)}, pattern


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_of_a_transformer_has_a_row(make):
    model = make().model
    for path in parameter_shapes(model):
        assert table_row(path, model.axes), path
