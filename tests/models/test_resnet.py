"""The residual network: batch statistics, shapes and a convolution by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.models import MLPConfig, ResNetConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.from_nnx import from_nnx
from jaxtrain.models.shipped.mlp import mlp
from jaxtrain.models.shipped.resnet import BatchNorm, Conv, resnet
from jaxtrain.models.shipped.shapes import ConvShape

IMAGES = np.random.default_rng(0).normal(2.0, 3.0, (4, 5, 6, 3)).astype(np.float32)


SCALE, BIAS = np.array([1.0, 2.0, 3.0], np.float32), np.array([0.5, 0.0, -0.5], np.float32)
RUNNING_MEAN, RUNNING_VARIANCE = np.array([1.0, 2.0, 3.0], np.float32), np.array([4.0, 5.0, 6.0], np.float32)


def run(inputs, *, train, momentum=0.9):
    """A batch norm over three channels with the numbers above."""
    model = from_nnx(lambda rngs: BatchNorm(3, momentum=momentum), call=lambda m, x, key, train: m(x, train=train))
    params, state = {"scale": SCALE, "bias": BIAS}, {"mean": RUNNING_MEAN, "variance": RUNNING_VARIANCE}
    return jax.jit(lambda p, s, x: model.apply(p, s, x, key=None, train=train))(params, state, inputs)


@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
def test_training_normalises_by_the_batch_and_moves_the_running_statistics(momentum):
    outputs, state = run(IMAGES, train=True, momentum=momentum)
    x = IMAGES.astype(np.float64)
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    # fp32 means of 120 values.
    np.testing.assert_allclose(outputs, (x - mean) / np.sqrt(variance + 1e-5) * SCALE + BIAS, atol=1e-5)
    np.testing.assert_allclose(state["mean"], momentum * RUNNING_MEAN + (1 - momentum) * mean, rtol=1e-5)
    # The running variance is the unbiased one, as in torch.
    unbiased = x.var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(state["variance"], momentum * RUNNING_VARIANCE + (1 - momentum) * unbiased, rtol=1e-5)


def test_evaluation_normalises_by_the_running_statistics():
    outputs, state = run(IMAGES, train=False)
    expected = (IMAGES - RUNNING_MEAN) / np.sqrt(RUNNING_VARIANCE + 1e-5) * SCALE + BIAS
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)  # fp32 arithmetic
    np.testing.assert_array_equal(state["mean"], RUNNING_MEAN)
    np.testing.assert_array_equal(state["variance"], RUNNING_VARIANCE)


def test_statistics_are_float32_under_bf16():
    outputs, state = run(jnp.asarray(IMAGES, jnp.bfloat16), train=True)
    assert outputs.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {np.dtype(np.float32)}
    rounded = np.asarray(jnp.asarray(IMAGES, jnp.bfloat16), np.float64)
    expected = 0.9 * RUNNING_MEAN + 0.1 * rounded.mean((0, 1, 2))
    np.testing.assert_allclose(state["mean"], expected, rtol=1e-5)  # no rounding after the inputs'


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_convolution_by_hand(size, stride):
    kernel = np.random.default_rng(1).normal(size=(size, size, 3, 2)).astype(np.float32)
    pad = (size - 1) // 2
    padded = np.pad(IMAGES.astype(np.float64), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    height, width = (-(-side // stride) for side in (5, 6))
    expected = np.zeros((4, height, width, 2))
    for row, column in np.ndindex(height, width):
        patch = padded[:, row * stride : row * stride + size, column * stride : column * stride + size]
        expected[:, row, column] = np.einsum("bhwi,hwio->bo", patch, kernel)
    model = from_nnx(lambda rngs: Conv(ConvShape(size, 3, 2, stride), rngs=rngs))
    found, _ = jax.jit(lambda x: model.apply({"kernel": kernel}, {}, x, key=None, train=True))(IMAGES)
    # fp32 sums of up to 147 products of about 3.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)


# config, image, shape that reaches the head
SHAPES = {
    "imagenet stem": (dict(stem="imagenet", stage_blocks=(1, 2, 1, 1)), (64, 64, 3), 2),
    "small stem": (dict(stem="small", stage_blocks=(1, 2, 1)), (8, 8, 1), 2),
    "odd image": (dict(stem="small", stage_blocks=(1, 1)), (7, 7, 1), 4),
    "imagenet stem, odd image": (dict(stem="imagenet", stage_blocks=(1,)), (33, 33, 3), 9),
}


@pytest.mark.parametrize("bottleneck", [False, True], ids=["plain", "bottleneck"])
@pytest.mark.parametrize(("settings", "image", "side"), SHAPES.values(), ids=SHAPES)
def test_shapes(settings, image, side, bottleneck):
    config = ResNetConfig(width=4, num_classes=5, bottleneck=bottleneck, **settings)
    model = resnet(config, input_shape=image)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    inputs = jax.ShapeDtypeStruct((2, *image), jnp.float32)
    jaxpr, (outputs, after) = jax.make_jaxpr(
        lambda p, s, x: model.apply(p, s, x, key=None, train=True), return_shape=True
    )(params, state, inputs)
    assert outputs.shape == (2, 5)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    # What the head averages over.
    channels = 4 * 2 ** (len(config.stage_blocks) - 1) * (4 if bottleneck else 1)
    assert f"f32[2,{side},{side},{channels}]" in str(jaxpr)
    assert f"f32[2,{side // 2},{side // 2},{channels}]" not in str(jaxpr)


def test_blocks_start_as_the_identity():
    config = ResNetConfig(width=4, num_classes=5, stem="small", stage_blocks=(3,))
    model = resnet(config, input_shape=(8, 8, 3))
    params, state = jax.jit(model.init)(jax.random.key(0, impl="unsafe_rbg"))  # compiles faster
    assert not np.any(params["stage0_first"]["norms"]["1"]["scale"])
    assert np.all(params["stage0_first"]["norms"]["0"]["scale"] == 1)
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)

    def logits(params):
        return model.apply(params, state, x, key=None, train=False)[0]

    # Whatever the kernels of the blocks are, they add nothing.
    rest = params["stage0_rest"]
    doubled = {**params, "stage0_rest": {**rest, "convs": jax.tree.map(lambda kernel: 2 * kernel, rest["convs"])}}
    np.testing.assert_array_equal(logits(params), logits(doubled))


def test_tokens_are_refused_by_an_mlp():
    model = mlp(MLPConfig(num_outputs=2), input_shape=(3,))
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    with pytest.raises(ConfigError, match=r"^model\.kind=mlp takes floats, but the data gives integers"):
        jax.eval_shape(lambda p, x: model.apply(p, {}, x, key=None, train=True), params, tokens)


def test_an_mlp_by_hand():
    model = mlp(MLPConfig(hidden_dims=(4, 5), num_outputs=2), input_shape=(3, 2))
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)
    x = rng.normal(size=(7, 3, 2)).astype(np.float32)
    expected = x.reshape(7, 6)
    for layer in ("0", "1"):
        expected = np.maximum(expected @ params["layers"][layer]["kernel"] + params["layers"][layer]["bias"], 0)
    expected = expected @ params["output"]["kernel"] + params["output"]["bias"]
    found, _ = jax.jit(lambda p: model.apply(p, {}, x, key=None, train=True))(params)
    # fp32 sums of 6 products, three layers deep.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
