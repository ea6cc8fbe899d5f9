"""The residual network, the vision transformer and the MLP by hand: statistics, convolutions, patches, shapes.

Shapes: B batch, H height, W width, C channels, L patches and class token, D model width.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.model import MLPConfig, ResNetConfig, ViTConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.from_nnx import from_nnx
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.shipped.images import BatchNorm, Conv, resnet
from jaxtrain.models.shipped.mlp import mlp
from jaxtrain.models.shipped.shapes import ConvShape

IMAGES = np.random.default_rng(0).normal(2.0, 3.0, (4, 5, 6, 3)).astype(np.float32)


SCALE, BIAS = np.array([1.0, 2.0, 3.0], np.float32), np.array([0.5, 0.0, -0.5], np.float32)
RUNNING_MEAN, RUNNING_VARIANCE = np.array([1.0, 2.0, 3.0], np.float32), np.array([4.0, 5.0, 6.0], np.float32)


def run(inputs, *, train):
    """A batch norm over three channels with the numbers above."""
    model = from_nnx(lambda rngs: BatchNorm(3), call=lambda m, x, key, train: m(x, train=train))
    params, state = {"scale": SCALE, "bias": BIAS}, {"mean": RUNNING_MEAN, "variance": RUNNING_VARIANCE}
    return jax.jit(lambda p, s, x: model.apply(p, s, x, key=None, train=train))(params, state, inputs)


def test_training_normalises_by_the_batch_and_moves_the_running_statistics():
    momentum = 0.9
    outputs, state = run(IMAGES, train=True)
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


@pytest.mark.parametrize(("size", "stride"), [(1, 2), (3, 1), (7, 2)])
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


# config, image, side that the head averages over
SHAPES = {
    "imagenet stem": (dict(stem="imagenet", stage_blocks=(1, 2, 1), bottleneck=True), (64, 64, 3), 4),
    "small stem, odd image": (dict(stem="small", stage_blocks=(1, 1)), (7, 7, 1), 4),
}


@pytest.mark.parametrize(("settings", "image", "side"), SHAPES.values(), ids=SHAPES)
def test_shapes(settings, image, side):
    config = ResNetConfig(width=4, num_classes=5, **settings)
    model = resnet(config, input_shape=image)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    inputs = jax.ShapeDtypeStruct((2, *image), jnp.float32)
    jaxpr, (outputs, after) = jax.make_jaxpr(
        lambda p, s, x: model.apply(p, s, x, key=None, train=True), return_shape=True
    )(params, state, inputs)
    assert outputs.shape == (2, 5)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    channels = 4 * 2 ** (len(config.stage_blocks) - 1) * (4 if config.bottleneck else 1)
    assert f"f32[2,{side},{side},{channels}]" in str(jaxpr)
    assert f"f32[2,{side // 2},{side // 2},{channels}]" not in str(jaxpr)


def test_blocks_start_as_the_identity():
    config = ResNetConfig(width=4, num_classes=5, stem="small", stage_blocks=(3,))
    model = resnet(config, input_shape=(8, 8, 3))
    params, state = jax.jit(model.init)(jax.random.key(0, impl="unsafe_rbg"))  # compiles faster
    assert not np.any(params["stage0_first"]["norms"]["1"]["scale"])
    assert np.all(params["stage0_first"]["norms"]["0"]["scale"] == 1)
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    logits = jax.jit(lambda params: model.apply(params, state, x, key=None, train=False)[0])
    # Whatever the kernels of the blocks are, they add nothing.
    rest = params["stage0_rest"]
    doubled = {**params, "stage0_rest": {**rest, "convs": jax.tree.map(lambda kernel: 2 * kernel, rest["convs"])}}
    np.testing.assert_array_equal(logits(params), logits(doubled))


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


def test_convolutions_in_the_loop_over_blocks_are_those_that_cpus_are_fast_at():
    """XLA brings the dims of a convolution into the order of its fast form outside of loops only."""
    config = {"kind": "resnet", "stage_blocks": [3], "width": 8, "stem": "small"}
    model = build_model(config, input_shape=(8, 8, 1), num_outputs=10, remat=None)
    inputs = np.zeros((2, 8, 8, 1), np.float32)

    def total(params, model_state):
        return model.apply(params, model_state, inputs, key=None, train=True)[0].sum()

    program = jax.jit(jax.grad(total)).lower(*jax.eval_shape(model.init, jax.random.key(0))).compile().as_text() or ""
    in_loops = [line for line in program.splitlines() if " convolution(" in line and "while/body" in line]
    # Two in a block forward; of each, the gradients of its images and of its kernel.
    assert len(in_loops) == 6
    assert {found for line in in_loops for found in re.findall(r"dim_labels=(\S+?),", line)} == {"b01f_01io->b01f"}


SIZES = dict(num_layers=2, embed_dim=16, num_heads=2, patch_size=2)
SHAPE = (4, 4, 3)
SQUARES = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(np.float32)
# float32 logits of about 1 after two layers.
CLOSE = dict(rtol=1e-4, atol=1e-5)


def built(**settings):
    """A model with parameters larger than at init, so that every part matters."""
    model = build_model(ViTConfig(**{**SIZES, **settings}), input_shape=SHAPE, num_outputs=5)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(1)
    return model, jax.tree.map(lambda s: rng.normal(0, 0.3, s.shape).astype(np.float32), shapes)


def carry(model, params, images):
    rest = {name: value for name, value in params.items() if name != "blocks"}
    return np.asarray(jax.jit(lambda rest, x: model.parts.embed(rest, x, key=None, train=False))(rest, images))


def test_each_patch_is_multiplied_with_the_same_kernel_after_the_class_token():
    model, params = built()
    found = carry(model, params, SQUARES)
    kernel, bias = params["patches"]["kernel"], params["patches"]["bias"]
    for row in range(2):
        for column in range(2):
            patch_BP = SQUARES[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].reshape(2, -1)
            at = 1 + 2 * row + column
            expected = patch_BP @ kernel + bias + params["positions"][at]
            np.testing.assert_allclose(found[:, at], expected, **CLOSE)
    np.testing.assert_allclose(found[:, 0], np.tile(params["class_token"] + params["positions"][0], (2, 1)), **CLOSE)


def test_the_mean_of_the_patches_needs_no_class_token_and_is_blind_to_their_order_without_positions():
    model, params = built(pooling="mean")
    assert "class_token" not in params
    assert params["positions"].shape == (4, 16)
    params["positions"] = params["positions"] * 0
    turned = SQUARES.reshape(2, 2, 2, 4, 3)[:, ::-1].reshape(SQUARES.shape)  # the rows of patches swapped
    forward = jax.jit(lambda images: model.apply(params, {}, images, key=None, train=False)[0])
    np.testing.assert_allclose(forward(turned), forward(SQUARES), **CLOSE)


def test_what_a_vit_cannot_take_is_refused():
    for settings, shape in (({}, (4, 6, 3)), (dict(patch_size=3), SHAPE), (dict(image_size=8), SHAPE)):
        with pytest.raises(ConfigError, match=r"square images that divide into patches of model\.patch_size"):
            build_model(ViTConfig(**{**SIZES, **settings}), input_shape=shape, num_outputs=5)
