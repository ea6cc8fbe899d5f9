"""Folders that bitsandbytes quantized to nf4: read as floats, read as they are, and refused where they are others."""

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
from jaxtrain.interop.load import by_path
from jaxtrain.interop.weights import open_published
from jaxtrain.published.bitsandbytes import QuantizedSource
from jaxtrain.published.safetensors import map_tensor, read_header, write_safetensors

FOLDER = Path(__file__).parent / "published_nf4"
UP = "model.layers.1.mlp.up_proj.weight"


def start(folder: Path, *, double: bool = True, **degrees: int) -> tuple[Any, dict[str, Any]]:
    """A step on an nf4 base that is read from a folder, and its parameters by path."""
    model = jt.adapt(
        jt.load_pretrained(folder).model, lora=jt.LoraConfig(rank=4), base="nf4", double_quantization=double
    )
    step = jt.make_train_step(model, jt.language_modeling(), optax.adam(1e-3), mesh=jt.make_mesh(**degrees))
    params = step.init(0, params=str(folder)).params
    return step, {"": params, **by_path(params)}


def changed(tmp_path: Path, *, config: dict[str, Any] | None = None, **tensors: np.ndarray | None) -> Path:
    """The folder with other values in quantization_config, and other tensors (None: without them)."""
    folder = tmp_path / "changed"
    shutil.copytree(FOLDER, folder)
    found = json.loads((folder / "config.json").read_text())
    found["quantization_config"] |= config or {}
    (folder / "config.json").write_text(json.dumps(found))
    held = {name: np.array(map_tensor(one)) for name, one in read_header(FOLDER / "model.safetensors").items()}
    held |= {f"{UP}{part.replace('__', '.', 1)}": value for part, value in tensors.items() if value is not None}
    for part in (part for part, value in tensors.items() if value is None):
        del held[f"{UP}{part.replace('__', '.', 1)}"]
    shapes = {name: (one.shape, one.dtype) for name, one in held.items()}
    write_safetensors(folder / "model.safetensors", shapes, held.items())
    return folder


def described(**changes: Any) -> np.ndarray:
    held = read_header(FOLDER / "model.safetensors")[f"{UP}.quant_state.bitsandbytes__nf4"]
    state = json.loads(bytes(map_tensor(held))) | changes
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def test_read_as_floats_it_gives_the_logits_of_transformers():
    """The same weights to the last bit; logits up to 0.3 in float32, summed in another order."""
    expected = np.load(FOLDER / "expected.npz")
    pretrained = jt.load_pretrained(FOLDER)
    apply = jax.jit(lambda params, x: pretrained.model.apply(params, {}, x, key=None, train=False)[0])
    logits = apply(pretrained.params, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5)


@pytest.mark.long
def test_read_as_a_base_it_is_taken_as_it_is():
    """Codes and scales of the file, also on a mesh, and the logits of the floats."""
    step, params = start(FOLDER, fsdp=2, tensor=2)
    source = open_published(FOLDER).source
    assert isinstance(source, QuantizedSource)
    packed = source.packed(UP)
    base = "blocks/mlp/up/kernel/base"
    np.testing.assert_array_equal(params[f"{base}/codes"][1], packed.codes.T)
    np.testing.assert_array_equal(params[f"{base}/absmax"][1], packed.absmax.T)
    np.testing.assert_array_equal(params[f"{base}/nested_absmax"][1], packed.nested_absmax)
    assert float(params[f"{base}/offset"][1]) == packed.offset
    expected = np.load(FOLDER / "expected.npz")

    def forward(params: Any, tokens: np.ndarray) -> jax.Array:
        return step.sharded_model.apply(params, {}, tokens, key=None, train=False)[0]

    np.testing.assert_allclose(jax.jit(forward)(params[""], expected["tokens"]), expected["logits"], atol=1e-5)


@pytest.mark.long
def test_scales_are_taken_as_float32_where_the_base_has_them_so():
    _, params = start(FOLDER, double=False)
    source = open_published(FOLDER).source
    assert isinstance(source, QuantizedSource)
    np.testing.assert_array_equal(params["blocks/mlp/up/kernel/base/absmax"][1], source.packed(UP).magnitudes.T)


@pytest.mark.long
@pytest.mark.parametrize("degrees", [{"fsdp": 4, "tensor": 2}, {"pipe": 2, "fsdp": 2}], ids=str)
def test_a_float_folder_gives_the_same_integers_on_every_mesh(degrees, tmp_path):
    """Also as the arrays of that folder: the published folder is quantized layer by layer, the arrays whole."""
    pretrained = jt.load_pretrained(FOLDER)
    folder = jt.save_pretrained(tmp_path / "floats", pretrained.params, model=pretrained, dtype="float32")
    _, alone = start(folder)
    step, params = start(folder, **degrees)
    given = by_path(step.init(0, params=pretrained.params).params)
    for path, leaf in by_path(alone[""]).items():
        np.testing.assert_array_equal(params[path], leaf, err_msg=path)
        np.testing.assert_array_equal(given[path], leaf, err_msg=path)


CONFIGS = {
    "8 bits": ({"load_in_4bit": False, "_load_in_4bit": False, "load_in_8bit": True}, "quantized as 8-bit of bitsand"),
    "fp4": ({"bnb_4bit_quant_type": "fp4"}, "quantized as 4-bit fp4 of bitsandbytes; nf4 of bitsandbytes is read"),
    "another method": ({"quant_method": "gptq"}, "quantized as gptq"),
    "another storage": ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bfloat16' is not read"),
}


@pytest.mark.parametrize(("config", "said"), CONFIGS.values(), ids=CONFIGS)
def test_other_quantizations_are_refused(config, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        open_published(changed(tmp_path, config=config))


TENSORS = {
    "other blocks": ({"__quant_state.bitsandbytes__nf4": described(blocksize=128)}, "in blocks of 128"),
    "no JSON": ({"__quant_state.bitsandbytes__nf4": np.zeros(4, np.uint8)}, "is no description of a quantized tensor"),
    "no scales": ({"__absmax": None}, r"up_proj\.weight\.absmax is missing; nf4 wants uint8\[128\] there"),
    "other scales": (
        {"__nested_absmax": np.ones(3, np.float32)},
        r"nested_absmax is float32\[3\]; nf4 wants float32\[1\]",
    ),
    "other levels": ({"__quant_map": np.ones(16, np.float32)}, "holds other levels than those of nf4"),
}


@pytest.mark.parametrize(("tensors", "said"), TENSORS.values(), ids=TENSORS)
def test_damaged_tensors_are_named(tensors, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        open_published(changed(tmp_path, **tensors)).source.read(UP)
