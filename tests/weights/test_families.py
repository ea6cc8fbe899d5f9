"""Every published family: logits, gradient and answers of transformers, and a folder that is the same again.

The fixtures are tiny checkpoints written by transformers, with what it computed from them (expected.npz, described in
scripts/published_fixtures/fixture.py). One row a fixture; a family is added with the row of its fixture.
"""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import load_pretrained, save_pretrained
from jaxtrain.config.published import settings_of
from jaxtrain.formats.safetensors import open_folder, write_safetensors
from jaxtrain.inference.decoding import generate_ids
from jaxtrain.inference.sampling import Sampling
from jaxtrain.weights.read import by_path
from jaxtrain.weights.write import floats_of, gathered, plan_tensors

PUBLISHED = Path(__file__).parent / "published"
# float32 here and there; sums of a few dozen products in another order.
TOLERANCE = 1e-4
IGNORED = -100


# Entries of expected.npz that are inputs -> how our model calls them; one entry: an array alone.
PLAIN = (("tokens", "tokens"),)
TO_TEXT = (("tokens", "tokens"), ("attention_mask", "segments"), ("decoder_tokens", "decoder_tokens"))
ENCODER = (("tokens", "tokens"), ("attention_mask", "segments"), ("token_type_ids", "token_types"))
IMAGES = (("pixel_values", "images"),)
PAIRS = (*PLAIN, *IMAGES)
ROWS = {
    **dict.fromkeys(
        ("llama", "llama31", "smollm2", "starcoder2", "mistral", "mixtral", "qwen2", "qwen2_window"), PLAIN
    ),
    **dict.fromkeys(("qwen2_yarn", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "phi3_longrope"), PLAIN),
    **dict.fromkeys(("phi", "gptj", "opt", "falcon", "falcon_7b"), PLAIN),
    **dict.fromkeys(("gpt2", "gpt_neox", "qwen2_window", "olmo2", "olmo3", "granite", "smollm3"), PLAIN),
    **dict.fromkeys(("gpt_oss", "deepseek_v3", "deepseek_v2", "llama4_text"), PLAIN),
    **dict.fromkeys(("stablelm", "stablelm_parallel", "cohere", "cohere2", "glm4", "mamba2"), PLAIN),
    **dict.fromkeys(("bert_mlm", "bert_sequence", "bert_token", "roberta_mlm", "roberta_sequence"), ENCODER),
    **dict.fromkeys(("modernbert_mlm", "modernbert_sequence", "modernbert_token"), ENCODER),
    **dict.fromkeys(("electra_mlm", "electra_sequence", "electra_token", "electra_discriminator"), ENCODER),
    **dict.fromkeys(("distilbert_mlm", "distilbert_sequence", "llama_sequence"), ENCODER),
    **dict.fromkeys(("vit_classification", "resnet_basic", "resnet_bottleneck"), IMAGES),
    **dict.fromkeys(("t5", "t5_v11"), TO_TEXT),
    **dict.fromkeys(("clip", "clip_largest_id"), PAIRS),
}


def rows(names):
    """Plain pytest proves the machinery with one family."""
    return [name if name == "llama" else pytest.param(name, marks=pytest.mark.long) for name in names]


@cache
def opened(name):
    return load_pretrained(PUBLISHED / name)


@cache
def expected(name):
    return dict(np.load(PUBLISHED / name / "expected.npz"))


def inputs_of(name):
    arrays = expected(name)
    given = {ours: jnp.asarray(arrays[theirs]) for theirs, ours in ROWS[name] if theirs in arrays}
    given = {ours: x.transpose(0, 2, 3, 1) if x.ndim == 4 else x for ours, x in given.items()}  # [B, C, H, W] there
    return next(iter(given.values())) if len(given) == 1 else given


def logits_of(outputs):
    """Of CLIP those of the texts of each image, and of the images of each text."""
    if not isinstance(outputs, dict):
        return outputs
    if "scale" not in outputs:
        return outputs["logits"]
    similarity = outputs["scale"] * outputs["image"] @ outputs["text"].T
    return jnp.stack([similarity, similarity.T])


def loss_of(model, inputs, labels):
    """params -> sum of the cross-entropies of the labels that count, and the logits."""

    def loss(params, state):
        outputs, _ = model.apply(params, state, inputs, key=None, train=False)
        logits = logits_of(outputs)
        scores = jax.nn.log_softmax(logits.astype(jnp.float32))
        chosen = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(labels == IGNORED, 0.0, chosen)), logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("name", rows(ROWS))
def test_logits_and_gradient(name):
    pretrained, wanted = opened(name), expected(name)
    compute = loss_of(pretrained.model, inputs_of(name), jnp.asarray(wanted["labels"], jnp.int32))
    (loss, logits), gradient = compute(pretrained.params, pretrained.model_state)
    # What stands at padding is nobody's answer, and the two differ in what padding sees.
    mask = wanted.get("attention_mask", np.zeros(0))
    real = mask == 1 if mask.shape == wanted["logits"].shape[:2] else ...
    atol = TOLERANCE * np.ptp(wanted["logits"])
    np.testing.assert_allclose(np.asarray(logits)[real], wanted["logits"][real], rtol=0, atol=atol)
    if "loss" in wanted:
        np.testing.assert_allclose(loss, wanted["loss"], rtol=TOLERANCE)
    family, settings = pretrained.published.family, settings_of(pretrained.config)
    held = {False: by_path(gradient), True: {}}
    for key in [key for key in wanted if key.startswith("grad:")]:
        name = key.removeprefix("grad:")
        tensors = plan_tensors(family.tensors(settings), {"": "float32"})
        tensor = tensors[name]
        parts = [gathered(*part, held) for part in tensor.parts]
        found = floats_of(tensor, parts)
        atol = TOLERANCE * (np.ptp(wanted[key]) or np.abs(wanted[key]))  # one number has no range
        np.testing.assert_allclose(found, wanted[key], rtol=0, atol=atol, err_msg=key)


# One of each way in which a cache is filled: experts, windows, local layers, layers without positions, factors, learned
# places, places after an offset, sinks, a bias of the logits, latents and two stacks, chunks, a state, two sequences.
ANSWERS = (
    *("llama", "mixtral", "qwen2_window", "gemma3_text", "phi3_longrope", "cohere2", "gpt2", "opt", "gpt_oss", "phi"),
    *("deepseek_v3", "llama4_text", "t5", "mamba2"),
)


@pytest.mark.parametrize("name", rows(ANSWERS))
def test_answers_token_for_token(name):
    pretrained, wanted = opened(name), expected(name)
    generated = wanted["generated"]
    if pretrained.model.decoder.encode is None:
        prompt, lengths = wanted["prompt"], np.full(len(wanted["prompt"]), wanted["prompt"].shape[1], np.int32)
        generated = generated[:, prompt.shape[1] :]
    else:  # the encoder reads the prompt, and what is written begins with the start token
        prompt, lengths = wanted["tokens"], wanted["attention_mask"].sum(1).astype(np.int32)
        generated = generated[:, 1:]
    new = generated.shape[1]
    sharded = jt.shard_model(pretrained.model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    prompts = [row[:length].astype(np.int32) for row, length in zip(prompt, lengths, strict=True)]
    found = generate_ids(sharded, pretrained.params, prompts, new_tokens=new, sampling=Sampling(temperature=0))
    np.testing.assert_array_equal(found, generated)


@pytest.mark.parametrize("name", rows(ROWS))
def test_comes_out_as_it_came_in(name, tmp_path):
    pretrained, folder = opened(name), tmp_path / "out"
    save_pretrained(folder, pretrained.params, model=pretrained, model_state=pretrained.model_state)
    before, after = open_folder(PUBLISHED / name), open_folder(folder)
    assert after.tensors == before.tensors
    for tensor in before.tensors:
        assert after.read(tensor).tobytes() == before.read(tensor).tobytes(), tensor
    # What was there stays; beside it stand the forms of other versions of transformers.
    assert {key: after.config.get(key) for key in before.config} == dict(before.config)
    assert after.config["torch_dtype"] == after.config["dtype"] == "float32"
    family = pretrained.published.family
    settings = family.from_published(dict(before.config))
    assert family.from_published(family.to_published(settings_of(pretrained.config))) == settings
    old = PUBLISHED / name / "config_old.json"
    if old.is_file():
        assert family.from_published(json.loads(old.read_text())) == settings


@pytest.mark.parametrize("name", rows(("gemma3_text", "llama4_text")))
def test_a_folder_that_sees_images_is_read_and_written_as_its_text_part(name, tmp_path):
    text, folder = open_folder(PUBLISHED / name), tmp_path / "images"
    folder.mkdir()
    arrays = {f"language_model.{tensor}": text.read(tensor) for tensor in text.tensors}
    arrays["vision_model.class_embedding"] = np.zeros(3, np.float32)
    kinds = {tensor: (array.shape, array.dtype) for tensor, array in arrays.items()}
    write_safetensors(folder / "model.safetensors", kinds, arrays.items())
    config = {"model_type": name.removesuffix("_text"), "text_config": dict(text.config), "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    pretrained = load_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, pretrained.params, opened(name).params)
    save_pretrained(tmp_path / "out", pretrained.params, model=pretrained)
    after = open_folder(tmp_path / "out")
    assert (after.config["model_type"], after.tensors.keys()) == (name, text.tensors.keys())
