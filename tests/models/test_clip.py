"""CLIP by hand: what stands for a text, the activation, the norm before the blocks of a ViT, the loss, refusals.

The whole model is compared with transformers in tests/weights/test_families.py. Shapes: B batch, P of embeddings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.config.kinds import check_kinds
from jaxtrain.config.model import ViTConfig
from jaxtrain.errors import ConfigError
from jaxtrain.families.table import read_settings
from jaxtrain.models.layers import ACTIVATIONS
from jaxtrain.models.shipped.build import build_model

TOWER = dict(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=12)
SMALL = dict(
    kind="clip", projection_dim=6, text=dict(TOWER, vocab_size=20, max_sequence_length=7),
    image=dict(TOWER, patch_size=2, image_size=4, channels=1),
)  # fmt: skip
IMAGES = np.random.default_rng(0).normal(size=(2, 4, 4, 1)).astype(np.float32)
CLOSE = dict(rtol=1e-5, atol=1e-6)  # float32 sums of a few numbers in another order


def drawn(model):
    """Parameters larger than at init, so that every part matters."""
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: rng.normal(0.2, 0.4, s.shape).astype(np.float32), shapes)


def embeddings(tokens, **settings):
    model = build_model({**SMALL, **settings}, input_shape=())
    inputs = {"images": IMAGES, "tokens": np.array(tokens, np.int32)}
    return jax.jit(lambda params: model.apply(params, {}, inputs, key=None, train=False)[0])(drawn(model))


def test_a_text_is_what_stands_at_its_end():
    """The end is the first end_token, or the first of the largest id; what follows it changes nothing."""
    first = embeddings([[4, 9, 15, 3, 3], [4, 15, 3, 15, 3]], end_token=15)["text"]
    again = embeddings([[4, 9, 15, 19, 15, 1], [4, 15, 19, 9, 8, 7]], end_token=15)["text"]
    np.testing.assert_allclose(first, again, **CLOSE)
    np.testing.assert_allclose(first, embeddings([[4, 9, 15, 3, 3], [4, 15, 3, 15, 3]])["text"], **CLOSE)
    assert np.abs(first - embeddings([[4, 9, 15, 19, 3], [4, 15, 3, 15, 19]])["text"]).max() > 0.01


def test_embeddings_have_norm_one_and_the_scale_is_that_of_the_paper():
    model = build_model(SMALL, input_shape=())
    inputs = {"images": IMAGES, "tokens": np.ones((2, 5), np.int32)}
    outputs = jax.jit(lambda key: model.apply(model.init(key)[0], {}, inputs, key=None, train=False)[0])
    found = outputs(jax.random.key(0))
    np.testing.assert_allclose(found["scale"], 1 / 0.07, rtol=1e-5)
    for side in ("image", "text"):
        np.testing.assert_allclose(np.linalg.norm(found[side], axis=-1), 1, rtol=1e-5)


def test_quick_gelu_is_its_formula():
    x = np.linspace(-5, 5, 11)
    np.testing.assert_allclose(ACTIVATIONS["quick_gelu"](jnp.asarray(x)), x / (1 + np.exp(-1.702 * x)), rtol=1e-5)


def test_a_vit_may_normalize_its_embeddings_and_have_no_biases_outside_its_blocks():
    config = ViTConfig(**TOWER, patch_size=2, embedding_norm=True, outer_bias=False)
    model = build_model(config, input_shape=(4, 4, 1), num_outputs=3)
    params = drawn(model)
    assert set(params["patches"]) == set(params["head"]["output"]) == {"kernel"}
    rest = {name: value for name, value in params.items() if name != "blocks"}
    found = jax.jit(lambda rest: model.parts.embed(rest, IMAGES, key=None, train=False))(rest)
    patch_BP = IMAGES[:, :2, 2:].reshape(2, -1)
    x = patch_BP @ params["patches"]["kernel"] + params["positions"][2]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm_epsilon)
    norm = params["embedding_norm"]
    np.testing.assert_allclose(found[:, 2], x * norm["scale"] + norm["bias"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [7.0, 300.0])
def test_the_loss_is_the_mean_of_both_directions(scale):
    image, text = np.random.default_rng(2).normal(size=(2, 4, 3)).astype(np.float32) / 20
    outputs = {"image": image, "text": text, "scale": np.float32(scale)}
    losses, metrics = jax.jit(lambda outputs: jt.contrastive().loss(outputs, {}))(outputs)
    z = min(scale, 100) * image @ text.T
    to_text = -np.diag(z - np.log(np.exp(z).sum(1, keepdims=True)))
    to_image = -np.diag(z - np.log(np.exp(z).sum(0, keepdims=True)))
    np.testing.assert_allclose(losses, (to_text + to_image) / 2, rtol=1e-4)
    right = [(z.argmax(axis) == np.arange(4)) for axis in (0, 1)]
    np.testing.assert_array_equal(metrics["accuracy"], np.mean(right, axis=0))


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        ConfigError, match=r"takes a dict of images, floats \[B, 4, 4, 1\].* tokens \(an array int32\[2, 9"
    ):
        embeddings(np.ones((2, 9)))
    with pytest.raises(ConfigError, match=r"contrastive needs image \[B, P\].* set model.kind=clip"):
        jt.contrastive().loss(np.ones((2, 3)), {})
    with pytest.raises(ConfigError, match=r"clip takes images with their texts, not the tokens of data.kind=text; set"):
        check_kinds(load_config({"model": SMALL, "task": "contrastive"}).config)
    config = load_config({"model": SMALL, "data": {"call": "rows:make"}}).config
    with pytest.raises(ConfigError, match=r"task=language_modeling with model\.kind=clip; task=contrastive"):
        check_kinds(config)
    with pytest.raises(ConfigError, match="image_size 5 is not a multiple of patch_size 2"):
        load_config({"model": {**SMALL, "image": dict(TOWER, patch_size=2, image_size=5)}})


def test_a_size_gives_the_keys_of_a_tower_that_are_not_set():
    model = load_config({"model": {"kind": "clip", "size": "clip_vit_l14", "text": {"num_layers": 2}}}).config.model
    assert (model.text.num_layers, model.text.embed_dim, model.image.num_layers) == (2, 768, 24)


REFUSED = {
    "activations": (
        {"vision_config": {"hidden_act": "gelu"}},
        "another activation in vision_config than in text_config",
    ),
    "ends": ({"text_config": {"eos_token_id": [5, 6]}}, r"eos_token_id: \[5, 6\], which is not supported"),
    "no end": ({"text_config": {"eos_token_id": None}}, "eos_token_id: None, which is not supported"),
    "classes": ({"architectures": ["CLIPForImageClassification"]}, "architectures: CLIPForImageClassification"),
    "dropout": (
        {"text_config": {"attention_dropout": 0.1}},
        "attention_dropout: 0.1, which the family clip_text_model",
    ),
    "key": ({"vision_config_dict": {"registers": 4}}, r"key registers \(value 4\), which the family clip_vision_model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_config_json_says_and_ours_cannot(name):
    config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        read_settings({"model_type": "clip", **config})
