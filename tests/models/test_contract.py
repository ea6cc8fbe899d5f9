"""What every model keeps, shipped or somebody's own."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxtrain.config.model import MLPConfig, ResNetConfig, TransformerConfig
from jaxtrain.config.schema import Remat
from jaxtrain.layout.rules import table_row
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.from_nnx import from_nnx
from jaxtrain.models.model import Model
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.shipped.images import resnet
from jaxtrain.models.shipped.mlp import mlp
from jaxtrain.models.shipped.transformer import transformer
from jaxtrain.models.tasks import classification, language_modeling
from jaxtrain.models.wrap import from_functions, from_linen
from jaxtrain.precision.policy import cast_floats

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
        x = nnx.relu(self.norm(self.first(x)))
        self.sow(nnx.Intermediate, "seen", x)  # which is no state
        return self.last(self.dropout(x))


class OwnLinen(linen.Module):
    """The same in Linen."""

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Dense(8)(x)
        x = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = linen.Dropout(0.5, deterministic=not train)(x)
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


GPT = dict(position="learned", norm="layernorm", activation="gelu", bias=True, tie_embeddings=True)
LLAMA = dict(num_kv_heads=1, mlp_dim=12)


def transformer_of(remat="none", **settings):
    return transformer(TransformerConfig(**{**SMALL, **settings}), remat=Remat(policy=remat))


def resnet_of(**settings):
    return resnet(ResNetConfig(stage_blocks=(1, 2), width=4, num_classes=3, **settings), input_shape=(8, 8, 3))


MAKERS = {
    "gpt with dropout, full remat": lambda: Case(transformer_of("full", dropout=0.5, **GPT), TOKENS, random=True),
    "resnet": lambda: Case(resnet_of(stem="small"), IMAGES, stateful=True),
    "mlp with dropout": lambda: Case(
        mlp(MLPConfig(hidden_dims=(32, 16), num_outputs=3, dropout=0.5), input_shape=(6,)), ROWS, random=True
    ),
    "from_nnx": lambda: Case(from_nnx(OwnNNX), ROWS, random=True, stateful=True),
    "from_linen": lambda: Case(from_linen(OwnLinen(), ROWS), ROWS, random=True, stateful=True),
    "from_functions": lambda: Case(own_functions(), ROWS),
}


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def nodes(tree, path=()):
    yield path, tree
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from nodes(child, (*path, key))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")  # outside nnx.capture, as old modules do
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if "remat" in name else ()) for name in MAKERS]
)
def test_a_model_is_two_pure_functions(name):
    case = MAKERS[name]()
    model, inputs = case.model, case.inputs
    init = jax.jit(model.init)
    params, state = init(jax.random.key(3, impl=FAST))
    for tree in (params, state):
        assert type(tree) is dict
        for path, node in nodes(tree):
            assert type(node) is dict or isinstance(node, jax.Array), path
            assert all(type(key) is str for key in path)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert bool(state) == case.stateful
    # Initial values depend on the key alone.
    assert_same(init(jax.random.key(3, impl=FAST)), (params, state))
    assert not same(init(jax.random.key(4, impl=FAST))[0], params)

    @functools.partial(jax.jit, static_argnums=3)
    def run(params, state, seed, train):
        def loss(params):
            outputs, after = model.apply(params, state, inputs, key=jax.random.key(seed), train=train)
            weights = jnp.arange(outputs.size, dtype=jnp.float32).reshape(outputs.shape)
            return jnp.sum(jnp.sin(outputs + weights)), (outputs, after)

        return jax.grad(loss, has_aux=True)(params) if train else (None, loss(params)[1])

    before = jax.tree.map(np.array, (params, state))
    gradients, (outputs, trained) = first = run(params, state, 5, True)
    assert_same(run(params, state, 5, True), first)
    assert_same((params, state), before)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, params)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))
    # Keys matter only where there is dropout and only in training, state changes only there.
    assert np.array_equal(outputs, run(params, state, 6, True)[1][0]) != case.random
    assert jax.tree.map(lambda x: (x.shape, x.dtype), trained) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert same(trained, state) != case.stateful
    evaluated, after = run(params, trained, 5, False)[1]
    assert_same(after, trained)
    np.testing.assert_array_equal(evaluated, run(params, trained, 6, False)[1][0])


def built(**settings):
    return build_model(settings, input_shape=(8, 8, 3) if "num_classes" in settings else (6,), vocab_size=13)


GEMMA = {"block": "sandwich", "norm_offset": True, "qk_norm": True, "attention_softcap": 30.0, "logits_softcap": 20.0}
YARN = {"kind": "yarn", "factor": 2.0, "original_length": 4}
# Shipped models and inputs.
STRICT = {
    "mlp": (lambda: mlp(MLPConfig(hidden_dims=(5, 4), num_outputs=3, dropout=0.1), input_shape=(6,)), ROWS),
    "resnet with bottlenecks": (lambda: resnet_of(bottleneck=True), IMAGES),
    "vit": (
        lambda: built(kind="vit", num_layers=1, embed_dim=8, num_heads=2, patch_size=4, image_size=8, num_classes=3),
        IMAGES,
    ),
    "gpt": (lambda: transformer_of(dropout=0.1, **GPT), TOKENS),
    "gemma": (lambda: transformer_of(**GEMMA), TOKENS),
    "llama with experts": (lambda: transformer_of(rope_scaling=YARN, experts={"num_experts": 4}, **LLAMA), TOKENS),
    "relative positions": (lambda: transformer_of(position="relative"), TOKENS),
    "encoder-decoder": (
        lambda: built(kind="encoder_decoder", dropout=0.1, **{**SMALL, "vocab_size": 13}),
        {"tokens": TOKENS, "decoder_tokens": TOKENS},
    ),
}


@pytest.mark.parametrize("kind", STRICT)
def test_dtypes_and_ranks_are_written_out(kind):
    """In bfloat16 under strict promotion, where jax refuses arrays of fewer dims beside arrays of more too."""
    make, inputs = STRICT[kind]
    model = make()
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    inputs = cast_floats(jax.tree.map(jnp.asarray, inputs), jnp.bfloat16)

    def loss(params, state):
        params = cast_floats(params, jnp.bfloat16)
        outputs, state = model.apply(params, state, inputs, key=jax.random.key(0), train=True)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs
        task = language_modeling() if logits.ndim == 3 else classification()
        targets = jnp.zeros(logits.shape[:-1], jnp.int32)
        total, weight, _ = task.loss(logits, {"inputs": inputs, "targets": targets})
        return total / weight, (logits, state)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        _, (logits, after) = jax.eval_shape(jax.grad(loss, has_aux=True), params, state)
    assert logits.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} <= {np.dtype(np.float32)}


def parameter_shapes(*models):
    found = {}
    for model in models:
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        found.update({path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)})
    return found


ENCODERS: tuple[dict[str, Any], ...] = (
    dict(
        causal=False,
        head=dict(kind="masked_language_model"),
        norm="layernorm",
        bias=True,
        embedding_norm=True,
        token_types=2,
    ),
    dict(
        causal=False,
        head=dict(kind="sequence", hidden="tanh", num_labels=3),
        position="relative",
        qk_norm=True,
    ),
)


def test_every_parameter_has_a_row_of_its_rank_in_the_table_of_axes():
    models = [transformer_of(**settings) for settings in (GPT, {**LLAMA, "bias": True}, *ENCODERS)]
    models.append(built(kind="encoder_decoder", norm="layernorm", bias=True, **SMALL))
    for model in (*models, resnet_of(bottleneck=True)):
        for path, shape in parameter_shapes(model).items():
            row = table_row(path, model.axes)
            if model.name != "resnet":
                assert row, f"{path} has no row"
            assert row is None or len(row) == len(shape), path


@pytest.mark.parametrize("kind", ["vit", "encoder-decoder", "masked language model"])
def test_kernels_of_blocks_alone_may_be_stored_in_8_bits(kind):
    """Neither patches nor heads nor tables."""
    model = transformer_of(**ENCODERS[0]) if kind == "masked language model" else STRICT[kind][0]()
    kernels = [path for path in parameter_shapes(model) if path.endswith("/kernel")]
    assert set(model.linears) == {path for path in kernels if "blocks/" in path}
    assert len(model.linears) < len(kernels) or kind == "encoder-decoder"
