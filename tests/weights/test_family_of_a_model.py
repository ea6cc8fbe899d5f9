"""A model that came from no folder is written as the first family that can say all of it, and that can be opened."""

import json
from pathlib import Path

import pytest

from jaxtrain.config.fits import family_for
from jaxtrain.config.published import parse_settings, settings_of
from jaxtrain.errors import ConfigError
from jaxtrain.families.table import family_of
from jaxtrain.formats.safetensors import open_folder
from jaxtrain.weights.pretrained import load_pretrained, save_pretrained

PUBLISHED = Path(__file__).resolve().parent / "published"


def config_of(name):
    return json.loads((PUBLISHED / name / "config.json").read_text(encoding="utf-8"))


def settings(name):
    config = config_of(name)
    return settings_of(parse_settings(family_of(config["model_type"]).from_published(config)))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("bert_mlm", "bert"),
        ("distilbert_mlm", "distilbert"),  # a BERT without token types, which transformers cannot run as a BERT
        ("gemma3_text", "gemma3_text"),
        ("phi3", "llama"),  # the same model, in other words
        ("phi3_longrope", "phi3"),  # whose factors belong to part of a head: no other family can say it
        ("qwen2", "qwen2"),  # attention_bias: qkv would be no words of Llama's
        ("t5", "t5"),
    ],
)
def test_the_family_that_a_model_is_written_as(name, family):
    assert family_for(settings(name)).name == family


def test_a_scaling_of_rotary_positions_that_no_family_can_say_beside_the_rest_is_refused():
    # Of the families that know a rotary_fraction, transformers opens phi3 with longrope alone.
    group = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "vocab_size": 67, "max_sequence_length": 24}
    group |= {"rope_scaling": {"kind": "linear", "factor": 2.0}, "rotary_fraction": 0.5}
    model = settings_of(parse_settings({"kind": "transformer", **group}))
    with pytest.raises(ConfigError, match="no published family fits this model"):
        family_for(model)
    with pytest.raises(ConfigError, match=r"from phi3, which cannot express model\.rope_scaling="):
        family_for(model, model_type="phi3")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gpt2", {"sliding_window": 8}, "gpt2, which cannot express model.sliding_window=8"),
        ("llama31", {"activation": "gelu"}, "llama, which cannot express model.activation is gelu"),
        ("t5", {"attention_scale": None}, "t5, which cannot express model.attention_scale=None"),
    ],
)
def test_a_model_that_no_family_can_say_is_refused_by_the_nearest_of_its_kind(name, change, says):
    with pytest.raises(ConfigError) as caught:
        family_for(settings(name) | change)
    assert str(caught.value).startswith(f"no published family fits this model; the nearest is {says}")


def with_one_choice(name):
    model = settings(name)
    return model | {"experts": model["experts"] | {"experts_per_token": 1, "normalize_weights": False}}


def test_losses_of_routers_are_of_no_published_config():
    model = settings("mixtral")
    model["experts"] |= {"load_balance_weight": 0.0, "router_z_weight": 0.0}
    assert family_for(model).name == "mixtral"


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_one_expert_per_token_has_the_weight_one_or_its_probability(name):
    # transformers divides the weight by itself in these families, and where norm_topk_prob says so.
    assert family_of(name).from_published(config_of(name) | {"num_experts_per_tok": 1})["experts"]["normalize_weights"]
    model = with_one_choice("qwen3_moe")
    written = family_for(model).to_published(model)
    assert (written["model_type"], written["norm_topk_prob"]) == ("qwen3_moe", False)
    with pytest.raises(ConfigError, match="which cannot express"):
        family_for(with_one_choice(name), model_type=name)


def test_gemma_without_windows_names_one():
    # transformers makes the mask of a window whether a layer takes it or not, and fails without a size.
    name = "gemma3_text"
    model = settings(name) | {"local_layers": None}
    written = family_of(name).to_published(model)
    assert set(written["layer_types"]) == {"full_attention"}
    assert isinstance(written["sliding_window"], int)
    assert family_for(model).name == name


def test_numbers_that_rounding_changes_stay_float32_in_sixteen_bits(tmp_path):
    pretrained = load_pretrained(PUBLISHED / "deepseek_v3")
    save_pretrained(tmp_path / "model", pretrained.params, model=pretrained, dtype="bfloat16")
    kinds = {name: str(dtype) for name, (_, dtype) in open_folder(tmp_path / "model").tensors.items()}
    kept = {name for name, kind in kinds.items() if kind == "float32"}
    assert kept == {name for name in kinds if name.endswith("e_score_correction_bias")} != set()
