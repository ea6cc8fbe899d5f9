"""The vision transformer: its patches, what stands for an image, and what it refuses.

Shapes: B batch, H height, W width, C channels, L patches and class token, D model width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.vit import ViTConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import parameter_shapes
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.shipped.shapes import model_tensors

SIZES = dict(num_layers=2, embed_dim=16, num_heads=2, patch_size=2)
SHAPE = (4, 4, 3)
IMAGES = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(np.float32)
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
    return np.asarray(model.parts.embed(rest, jnp.asarray(images), key=None, train=False))


def test_each_patch_is_multiplied_with_the_same_kernel_after_the_class_token():
    model, params = built()
    found = carry(model, params, IMAGES)
    kernel, bias = params["patches"]["kernel"], params["patches"]["bias"]
    for row in range(2):
        for column in range(2):
            patch_BP = IMAGES[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].reshape(2, -1)
            at = 1 + 2 * row + column
            expected = patch_BP @ kernel + bias + params["positions"][at]
            np.testing.assert_allclose(found[:, at], expected, **CLOSE)
    np.testing.assert_allclose(found[:, 0], np.tile(params["class_token"] + params["positions"][0], (2, 1)), **CLOSE)


def test_the_mean_of_the_patches_needs_no_class_token_and_is_blind_to_their_order_without_positions():
    model, params = built(pooling="mean")
    assert "class_token" not in params
    assert params["positions"].shape == (4, 16)
    params["positions"] = params["positions"] * 0
    turned = IMAGES.reshape(2, 2, 2, 4, 3)[:, ::-1].reshape(IMAGES.shape)  # the rows of patches swapped
    forward = jax.jit(lambda images: model.apply(params, {}, images, key=None, train=False)[0])
    np.testing.assert_allclose(forward(turned), forward(IMAGES), **CLOSE)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_the_shapes_are_those_of_the_model(pooling):
    config = ViTConfig(**SIZES, pooling=pooling)
    model = build_model(config, input_shape=SHAPE, num_outputs=5)
    tensors = model_tensors(config, input_shape=SHAPE, vocab_size=None, num_outputs=5)
    assert tensors.params == {path: leaf.shape for path, leaf in parameter_shapes(model).items()}
    assert model.num_outputs == 5
    assert model.decoder is None


# settings, shape of a row, outputs of the data, what the line says
WRONG = {
    "no images": ({}, (7,), 5, "takes square images [height, width, channels]"),
    "no square": ({}, (4, 6, 3), 5, "takes square images [height, width, channels]"),
    "patches that do not divide": (dict(patch_size=3), SHAPE, 5, "do not divide into patches of model.patch_size=3"),
    "images of another size": (dict(image_size=8), SHAPE, 5, "or set model.image_size=4"),
    "images of other channels": (dict(channels=1), SHAPE, 5, "or set model.channels=3"),
    "no classes": ({}, SHAPE, None, "set model.num_classes"),
}


@pytest.mark.parametrize(("settings", "shape", "outputs", "says"), WRONG.values(), ids=WRONG)
def test_what_it_cannot_take_is_refused_in_one_line(settings, shape, outputs, says):
    with pytest.raises(ConfigError) as caught:
        build_model(ViTConfig(**{**SIZES, **settings}), input_shape=shape, num_outputs=outputs)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
