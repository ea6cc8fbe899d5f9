"""Which parameters decay and which are trained."""

import jax
import numpy as np
import pytest

from jaxtrain.config.model import ResNetConfig, TransformerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.shipped.images import resnet
from jaxtrain.models.shipped.transformer import transformer
from jaxtrain.optim.optimizers import decay_mask, trainable_predicate
from jaxtrain.optim.rules import complete_axes

SMALL = dict(num_layers=2, embed_dim=8, num_heads=2, vocab_size=11, max_sequence_length=6)


def gpt():
    return transformer(
        TransformerConfig(
            **SMALL, position="learned", norm="layernorm", activation="gelu", bias=True, tie_embeddings=True
        )
    )


def small_resnet():
    return resnet(ResNetConfig(stage_blocks=(1, 3), width=4, stem="small", num_classes=3), input_shape=(8, 8, 1))


def shapes(model):
    return jax.eval_shape(model.init, jax.random.key(0))[0]


@pytest.mark.parametrize(("make", "count"), [(gpt, 8), (small_resnet, 9)])
def test_matrices_decay_and_nothing_else(make, count):
    model = make()
    mask = decay_mask(model.axes)(shapes(model))
    decays = {path_name(path): decays for path, decays in jax.tree_util.tree_leaves_with_path(mask)}
    names = ("kernel", "head_kernel", "embedding", "positions")
    assert decays == {path: path.rsplit("/", 1)[-1] in names for path in decays}
    assert sum(decays.values()) == count


# path -> shape, row of the table, whether it decays
OWN = {
    "matrix": ("kernel", (4, 4), None, True),
    "vector": ("gain", (4,), None, False),
    "bias of two dims": ("query/bias", (4, 4), ("heads", "head_dim"), False),
    "scale of two dims": ("norm/scale", (4, 4), None, False),
    "scalar": ("temperature", (), None, False),
    "vector of the stack": ("blocks/gamma", (3, 4), None, False),
    "matrix of the stack": ("blocks/mixer", (3, 4, 4), None, True),
    "number of the stack": ("blocks/temperature", (3,), None, False),
    "vector of the stack, layers unnamed": ("blocks/gamma", (3, 4), (None, "embed"), False),
    "vector for each expert": ("blocks/gamma", (3, 2, 4), ("layers", "experts", "mlp"), False),
    "matrix beside the stack": ("blocks_out/gamma", (3, 4), None, True),
}


def test_parameters_of_somebodys_own():
    for name, (path, shape, row, decays) in OWN.items():
        params = jax.ShapeDtypeStruct(shape, np.float32)
        for part in reversed(path.split("/")):
            params = {part: params}
        mask = decay_mask(complete_axes({path: shape}, {} if row is None else {path: row}, "blocks"))
        assert jax.tree.leaves(mask(params)) == [decays], name


PATHS = ["embedding", "blocks/attention/query/kernel", "blocks/mlp/up/kernel", "output"]


def test_frozen_parameters():
    for freeze, trained in (
        (("embedding",), PATHS[1:]),
        (("blocks/*",), ["embedding", "output"]),
        (("*/kernel", "output"), ["embedding"]),
    ):
        predicate = trainable_predicate(freeze, PATHS)
        assert [path for path in PATHS if predicate(path)] == trained
    assert trainable_predicate((), PATHS) is None


def test_wrong_patterns():
    with pytest.raises(ConfigError, match=r"optimizer\.freeze: 'block/\*' matches no parameter; the nearest are "):
        trainable_predicate(("embedding", "block/*"), PATHS)
    with pytest.raises(ConfigError, match=r"optimizer\.freeze matches every parameter"):
        trainable_predicate(("*",), PATHS)
