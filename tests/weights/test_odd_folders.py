"""Published folders that say too little, too much or something else than their tensors."""

import json
import math
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.fits import check_fits
from jaxtrain.config.load import load_config
from jaxtrain.config.published import settings_in, settings_of
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.families.table import family_of, read_settings
from jaxtrain.formats.safetensors import SINGLE, open_folder, write_safetensors
from jaxtrain.inference.export import export_run
from jaxtrain.models.layers import rotary_factor
from jaxtrain.run.import_run import import_run

PUBLISHED = Path(__file__).parent / "published"


def folder_of(folder, *, name="llama", cast=lambda name, array: array, without=(), **config):
    """A fixture whose tensors pass through `cast`, with other keys in its config.json."""
    source = open_folder(PUBLISHED / name)
    arrays = {one: np.asarray(cast(one, np.array(source.read(one)))) for one in source.tensors}
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / SINGLE, {one: (a.shape, a.dtype) for one, a in arrays.items()}, arrays.items())
    said = {key: value for key, value in {**source.config, **config}.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_values_of_another_kind_are_named():
    config = json.loads((PUBLISHED / "gemma2" / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"^[^\n]*the family gemma2 cannot read[^\n]*$"):
        settings_in("m", read_settings({**config, "hidden_size": "abc"}))


def _norms_apart(name, array):
    return array if "norm" in name else array.astype(ml_dtypes.bfloat16)


DTYPES = {
    "bfloat16, unsaid": (lambda name, array: array.astype(ml_dtypes.bfloat16), {"without": ("dtype", "torch_dtype")}),
    "norms in float32": (_norms_apart, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize(("cast", "more"), DTYPES.values(), ids=DTYPES)
def test_tensors_come_out_in_the_dtypes_they_had(cast, more, tmp_path):
    source = folder_of(tmp_path / "in", cast=cast, **more)
    (source / "tokenizer.model").write_bytes(b"\x00\xff")
    pretrained = jt.load_pretrained(source)
    jt.save_pretrained(tmp_path / "out", pretrained.params, model=pretrained)
    before, after = open_folder(tmp_path / "in"), open_folder(tmp_path / "out")
    assert after.tensors == before.tensors
    for name in before.tensors:
        assert after.read(name).tobytes() == before.read(name).tobytes(), name
    assert before.files.items() <= after.files.items()
    most = before.tensors["model.embed_tokens.weight"][1].name
    assert after.config["dtype"] == after.config["torch_dtype"] == most


def test_no_form_of_a_key_contradicts_the_model(tmp_path):
    """A rope_scaling that only the published config has must not come back beside a model without one."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    source = folder_of(tmp_path / "in", name="gemma3_text", rope_scaling=scaling)
    pretrained = jt.load_pretrained(source, model={"rope_scaling": None})
    jt.save_pretrained(tmp_path / "out", pretrained.params, model=pretrained)
    assert jt.load_pretrained(tmp_path / "out").config.model_dump()["rope_scaling"] is None


def test_other_arrays_are_refused_before_anything_is_compiled():
    path = str(PUBLISHED / "llama")
    with pytest.raises(ConfigError, match=r"model\.num_layers=1 does not fit the weights"):
        check_fits(load_config({"model": {"from": path, "num_layers": 1}}).config.model)
    keys = {"dropout": 0.1, "max_sequence_length": 32, "rope_theta": 5.0}
    check_fits(load_config({"model": {"from": path, **keys}}).config.model)


@pytest.mark.long
def test_a_run_outlives_the_folder_it_was_made_of(tmp_path):
    """Its config names the folder, which is gone; and the output layer that its config.json hid is kept."""
    source = folder_of(tmp_path / "in", tie_word_embeddings=True)
    tensors = {name: np.array(open_folder(source).read(name)) for name in open_folder(source).tensors}
    with pytest.raises(CheckpointError, match=r"set model\.tie_embeddings=false"):
        import_run(source, tmp_path / "run")
    import_run(source, tmp_path / "run", overrides=["model.tie_embeddings=false"])
    shutil.rmtree(source)
    run = jt.open_run(tmp_path / "run")
    assert jax.tree.leaves(run.params)
    exported = open_folder(export_run(tmp_path / "run", tmp_path / "out"))
    for name, array in tensors.items():
        np.testing.assert_array_equal(exported.read(name), array, err_msg=name)
    assert exported.config["tie_word_embeddings"] is False


PHI3 = Path(__file__).parent / "published" / "phi3_longrope"
FILE = json.loads((PHI3 / "config.json").read_text())
# Phi-3's formula: 64 positions of a model that was first trained with 16.
FACTOR = math.sqrt(1 + math.log(64 / 16) / math.log(16))


def longrope(**keys):
    return jt.load_config({"model": {"kind": "transformer", "from": str(PHI3), **keys}}).config.model


def test_the_factor_of_longrope_outlives_another_length_and_is_written_where_the_lengths_do_not_say_it():
    for length in (64, 16, 128):
        model = longrope(max_sequence_length=length)
        assert rotary_factor(model.rope_scaling, max_length=model.max_sequence_length) == FACTOR
    family = family_of("phi3")
    same = family.to_published(settings_of(longrope()))
    assert "attention_factor" not in same["rope_scaling"] | same["rope_parameters"]
    shorter = settings_of(longrope(max_sequence_length=32))
    written = family.to_published(shorter)
    for key in ("rope_scaling", "rope_parameters"):
        assert written[key]["attention_factor"] == FACTOR
    assert family.from_published(written)["rope_scaling"] == shorter["rope_scaling"]
