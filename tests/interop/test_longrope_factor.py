"""The factor of cos and sin under longrope, which follows from the lengths of the published file."""

import json
import math
from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain.interop.settings import settings_of
from jaxtrain.models.rotary import rotary_factor
from jaxtrain.published.families.table import family_of

PHI3 = Path(__file__).parent / "published" / "phi3_longrope"
FILE = json.loads((PHI3 / "config.json").read_text())
# Phi-3's formula: 64 positions of a model that was first trained with 16.
FACTOR = math.sqrt(1 + math.log(64 / 16) / math.log(16))


def loaded(**keys):
    return jt.load_config({"model": {"kind": "transformer", "from": str(PHI3), **keys}}).config.model


@pytest.mark.parametrize("length", [64, 16, 128])
def test_another_length_of_the_run_does_not_change_it(length):
    model = loaded(max_sequence_length=length)
    assert rotary_factor(model.rope_scaling, max_length=model.max_sequence_length) == FACTOR


def test_it_is_written_where_the_lengths_do_not_say_it():
    family = family_of("phi3")
    same = family.to_published(settings_of(loaded()))
    assert "attention_factor" not in same["rope_scaling"] | same["rope_parameters"]
    shorter = settings_of(loaded(max_sequence_length=32))
    written = family.to_published(shorter)
    for key in ("rope_scaling", "rope_parameters"):
        assert written[key]["attention_factor"] == FACTOR
    assert family.from_published(written)["rope_scaling"] == shorter["rope_scaling"]


def test_a_factor_of_the_file_stays():
    rope = FILE["rope_parameters"] | {"attention_factor": 1.5}
    family = family_of("phi3")
    read = family.from_published(FILE | {"rope_parameters": rope})
    assert read["rope_scaling"]["attention_factor"] == 1.5
    group = jt.load_config({"model": {**read, "kind": "transformer"}}).config.model
    assert family.to_published(settings_of(group))["rope_parameters"]["attention_factor"] == 1.5


def test_a_model_of_ours_without_one_is_written_as_before():
    scaling = dict(kind="longrope", short_factors=[1.0] * 2, long_factors=[2.0] * 2, original_length=8)
    sizes = dict(kind="transformer", num_layers=1, embed_dim=8, num_heads=2, max_sequence_length=32, vocab_size=8)
    group = jt.load_config({"model": {**sizes, "rope_scaling": scaling}}).config.model
    written = family_of("phi3").to_published(settings_of(group))
    assert "attention_factor" not in written["rope_parameters"]
    assert family_of("phi3").from_published(written)["rope_scaling"] == settings_of(group)["rope_scaling"]


@pytest.mark.parametrize("factor", [round(FACTOR, 11), math.nextafter(FACTOR, 2)], ids=["rounded", "next"])
def test_a_factor_beside_the_usual_one_is_written(factor):
    family = family_of("phi3")
    read = family.from_published(FILE | {"rope_parameters": FILE["rope_parameters"] | {"attention_factor": factor}})
    assert family.from_published(family.to_published(settings_of(loaded()) | read)) == read


@pytest.mark.parametrize("original", [0, 1])
def test_a_wrong_original_length_is_named(original, tmp_path):
    keys = json.loads(json.dumps(FILE))
    for group in (keys, keys.get("rope_parameters") or {}, keys.get("rope_scaling") or {}):
        if "original_max_position_embeddings" in group:
            group["original_max_position_embeddings"] = original
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(jt.ConfigError, match=r"^model\.rope_scaling\.original_length is "):
        jt.load_config({"model": {"kind": "transformer", "from": str(tmp_path)}})
