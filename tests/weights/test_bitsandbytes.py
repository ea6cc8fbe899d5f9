"""Folders that bitsandbytes quantized to nf4: read as floats, and read as they are."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.formats.safetensors import map_tensor, open_folder, read_header, write_safetensors
from jaxtrain.inference.export import export_folder
from jaxtrain.weights.read import by_path, open_published

FOLDER = Path(__file__).parent / "published_nf4"
UP = "model.layers.1.mlp.up_proj.weight"


def start(folder: Path, **degrees: int) -> tuple[Any, dict[str, Any]]:
    """A step on an nf4 base that is read from a folder, and its parameters by path."""
    model = jt.adapt(jt.load_pretrained(folder).model, lora=jt.LoraConfig(rank=4), base="nf4", double_quantization=True)
    step = jt.make_train_step(model, jt.language_modeling(), optax.adam(1e-3), mesh=jt.make_mesh(**degrees))
    params = step.init(0, jt.load_weights(step, str(folder))).params
    return step, {"": params, **by_path(params)}


def changed(tmp_path: Path, *, config: dict[str, Any] | None = None, **tensors: np.ndarray) -> Path:
    """The folder with other values in quantization_config, and other tensors."""
    folder = tmp_path / "changed"
    shutil.copytree(FOLDER, folder)
    found = json.loads((folder / "config.json").read_text())
    found["quantization_config"] |= config or {}
    (folder / "config.json").write_text(json.dumps(found))
    held = {name: np.array(map_tensor(one)) for name, one in read_header(FOLDER / "model.safetensors").items()}
    held |= {f"{UP}{part.replace('__', '.', 1)}": value for part, value in tensors.items()}
    shapes = {name: (one.shape, one.dtype) for name, one in held.items()}
    write_safetensors(folder / "model.safetensors", shapes, held.items())
    return folder


def test_read_as_floats_it_gives_the_logits_of_transformers():
    """The same weights to the last bit; logits up to 0.3 in float32, summed in another order."""
    expected = np.load(FOLDER / "expected.npz")
    pretrained = jt.load_pretrained(FOLDER)
    apply = jax.jit(lambda params, x: pretrained.model.apply(params, {}, x, key=None, train=False)[0])
    logits = apply(pretrained.params, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5)


@pytest.mark.long
def test_a_float_folder_gives_the_same_integers_on_a_mesh(tmp_path):
    """Also as the arrays of that folder: the published folder is quantized layer by layer, the arrays whole."""
    pretrained = jt.load_pretrained(FOLDER)
    folder = jt.save_pretrained(tmp_path / "floats", pretrained.params, model=pretrained, dtype="float32")
    _, alone = start(folder)
    step, params = start(folder, pipe=2, fsdp=2, tensor=2)
    given = by_path(step.init(0, jt.load_weights(step, pretrained.params)).params)
    for path, leaf in by_path(alone[""]).items():
        np.testing.assert_array_equal(params[path], leaf, err_msg=path)
        np.testing.assert_array_equal(given[path], leaf, err_msg=path)


def test_other_quantizations_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"quantized as .*fp4.*, but only floats and nf4 of bitsandbytes"):
        open_published(changed(tmp_path, config={"bnb_4bit_quant_type": "fp4"}))


def test_damaged_tensors_are_named(tmp_path):
    folder = changed(tmp_path, __quant_map=np.ones(16, np.float32))
    with pytest.raises(CheckpointError, match="and its own levels"):
        open_published(folder).source.read(UP)


def test_kernels_that_bitsandbytes_quantized_are_read_as_they_are():
    """Codes and scales of the file, on a mesh."""
    _, params = start(FOLDER, fsdp=2, tensor=2)
    source: Any = open_published(FOLDER).source
    packed, base = source.packed(UP), "blocks/mlp/up/kernel/base"
    np.testing.assert_array_equal(params[f"{base}/codes"][1], packed.codes.T)
    np.testing.assert_array_equal(params[f"{base}/absmax"][1], packed.absmax.T)
    np.testing.assert_array_equal(params[f"{base}/nested_absmax"][1], packed.nested_absmax)
    assert float(params[f"{base}/offset"][1]) == packed.offset


def test_a_folder_in_nf4_is_written_in_floats(tmp_path):
    floats = open_folder(export_folder(FOLDER, tmp_path / "floats"))
    assert floats.read(UP).tobytes() == open_published(FOLDER).source.read(UP).tobytes()
