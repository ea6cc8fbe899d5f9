"""Folders that bitsandbytes quantized to nf4: read as floats, read as they are, written as they were."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.interop.formats.nf4 import pack_floats, packed_parts
from jaxtrain.interop.formats.safetensors import map_tensor, open_folder, read_header, write_safetensors
from jaxtrain.interop.load import by_path
from jaxtrain.interop.weights import open_published
from jaxtrain.precision.kernels import is_kernel
from jaxtrain.precision.low_rank import LowRankKernel
from jaxtrain.run.export import export_folder

FOLDER = Path(__file__).parent / "published_nf4"
UP = "model.layers.1.mlp.up_proj.weight"


def start(folder: Path, **degrees: int) -> tuple[Any, dict[str, Any]]:
    """A step on an nf4 base that is read from a folder, and its parameters by path."""
    model = jt.adapt(jt.load_pretrained(folder).model, lora=jt.LoraConfig(rank=4), base="nf4", double_quantization=True)
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
def test_a_float_folder_gives_the_same_integers_on_a_mesh(tmp_path):
    """Also as the arrays of that folder: the published folder is quantized layer by layer, the arrays whole."""
    pretrained = jt.load_pretrained(FOLDER)
    folder = jt.save_pretrained(tmp_path / "floats", pretrained.params, model=pretrained, dtype="float32")
    _, alone = start(folder)
    step, params = start(folder, pipe=2, fsdp=2, tensor=2)
    given = by_path(step.init(0, params=pretrained.params).params)
    for path, leaf in by_path(alone[""]).items():
        np.testing.assert_array_equal(params[path], leaf, err_msg=path)
        np.testing.assert_array_equal(given[path], leaf, err_msg=path)


CONFIGS = {
    "fp4": ({"bnb_4bit_quant_type": "fp4"}, "quantized as .*fp4.*; floats and nf4 of bitsandbytes"),
    "another method": ({"quant_method": "gptq"}, "quantized as .*gptq"),
}


@pytest.mark.parametrize(("config", "said"), CONFIGS.values(), ids=CONFIGS)
def test_other_quantizations_are_refused(config, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        open_published(changed(tmp_path, config=config))


TENSORS = {
    "other blocks": ({"__quant_state.bitsandbytes__nf4": described(blocksize=128)}, "in blocks of .128"),
    "other levels": ({"__quant_map": np.ones(16, np.float32)}, "holds other levels than those of nf4"),
}


@pytest.mark.parametrize(("tensors", "said"), TENSORS.values(), ids=TENSORS)
def test_damaged_tensors_are_named(tensors, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        open_published(changed(tmp_path, **tensors)).source.read(UP)


PUBLISHED = Path(__file__).parent / "published"
LLAMA = PUBLISHED / "llama"


def stored(folder: Path) -> dict[str, tuple[Any, bytes]]:
    """Name -> shape and dtype, and bytes, of every tensor in the files of a folder."""
    opened = open_folder(folder)
    return {name: (kind, opened.read(name).tobytes()) for name, kind in opened.tensors.items()}


def bases(params: Any) -> Any:
    """The kernels below adapters."""

    def one(leaf: Any) -> Any:
        return leaf.base if isinstance(leaf, LowRankKernel) else leaf

    return jax.tree.map(one, params, is_leaf=is_kernel)


def test_kernels_that_bitsandbytes_quantized_are_read_and_written_as_they_were(tmp_path):
    """Codes and scales of the file, on a mesh."""
    _, params = start(FOLDER, fsdp=2, tensor=2)
    source: Any = open_published(FOLDER).source
    packed, base = source.packed(UP), "blocks/mlp/up/kernel/base"
    np.testing.assert_array_equal(params[f"{base}/codes"][1], packed.codes.T)
    np.testing.assert_array_equal(params[f"{base}/absmax"][1], packed.absmax.T)
    np.testing.assert_array_equal(params[f"{base}/nested_absmax"][1], packed.nested_absmax)
    assert float(params[f"{base}/offset"][1]) == packed.offset
    jt.save_pretrained(tmp_path / "out", bases(params[""]), model=jt.load_pretrained(FOLDER), base="nf4")
    assert stored(tmp_path / "out") == stored(FOLDER)
    said, wanted = (
        json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (tmp_path / "out", FOLDER)
    )
    assert said.items() <= wanted.items()


def test_a_folder_in_nf4_is_written_again_as_it_is(tmp_path):
    """Codes would stay, and scales be rounded to 8 bits a second time; blocks of the second folder run over rows."""
    pretrained = jt.load_pretrained(LLAMA)
    small = jt.save_pretrained(tmp_path / "small", pretrained.params, model=pretrained, base="nf4")
    for folder in (FOLDER, small):
        again = export_folder(folder, tmp_path / "again" / folder.name, base="nf4")
        assert stored(again) == stored(folder)


def test_floats_are_rounded_and_then_quantized_in_blocks_that_run_on(tmp_path):
    """Rows of 16 weights do not divide by 64. Shards hold all parts of a tensor."""
    pretrained = jt.load_pretrained(LLAMA)
    given = {"model": pretrained, "dtype": "bfloat16"}
    jt.save_pretrained(tmp_path / "floats", pretrained.params, **given)
    jt.save_pretrained(tmp_path / "nf4", pretrained.params, base="nf4", **given)
    jt.save_pretrained(tmp_path / "shards", pretrained.params, base="nf4", max_shard_size="2KB", **given)
    floats, found = open_folder(tmp_path / "floats"), stored(tmp_path / "nf4")
    assert found == stored(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    packed = pack_floats(floats.read(UP), double=True)
    for name, array in packed_parts(UP, packed, floats.tensors[UP][0], "bfloat16"):
        assert found[name] == ((array.shape, array.dtype), array.tobytes())
    assert {name for name in floats.tensors if name not in found} == set()
    norm = "model.norm.weight"
    assert found[norm][1] == floats.read(norm).tobytes()
    # Numbers of 2 and 4 bytes lie where other readers can map them.
    for tensor in open_folder(tmp_path / "nf4").stored.values():
        assert tensor.start % tensor.dtype.itemsize == 0


@pytest.mark.long
def test_kernels_that_share_a_tensor_are_written_with_scales_in_float32(tmp_path):
    """A tensor of Phi-3 holds query, key and value, or gate and up."""
    draw = np.random.default_rng(0)
    pretrained = jt.load_pretrained(PUBLISHED / "phi3")
    group = pretrained.config.model_copy(update={"embed_dim": 64, "mlp_dim": 128, "head_dim": 16})
    model = jt.build_model(group, input_shape=(8,))
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.1 * draw.normal(size=leaf.shape), jnp.float32),
        jax.eval_shape(model.init, jax.random.key(0))[0],
    )
    small = quantized(params, model)
    origin = dataclasses.replace(pretrained, config=group, model=model)
    jt.save_pretrained(tmp_path / "out", small, model=origin, base="nf4")
    found = stored(tmp_path / "out")
    assert found["model.layers.0.self_attn.qkv_proj.weight.absmax"][0][1] == np.float32
    assert found["model.layers.0.self_attn.o_proj.weight.absmax"][0][1] == np.uint8
    # The codes and scales of the kernels, dequantized in NumPy and in jax.
    read = by_path(jt.load_pretrained(tmp_path / "out").params)
    wanted = by_path(jax.jit(lambda small: jt.merge_adapters(small, jt.adapt(model, base="nf4")))(small))
    for path, leaf in wanted.items():
        np.testing.assert_allclose(read[path], leaf, rtol=1e-6, atol=1e-7, err_msg=path)


def quantized(params: Any, model: Any) -> Any:
    return jax.jit(lambda params: jt.quantize(params, model, "nf4"))(params)


@pytest.mark.parametrize(
    ("name", "base", "said"),
    [
        ("gpt2", "nf4", r"c_attn\.weight .* cannot be written in nf4 .*\(a Conv1D"),
        ("resnet_basic", "nf4", "is for linear layers, and the model has none"),
    ],
)
def test_what_cannot_be_written_is_refused(name, base, said, tmp_path):
    pretrained = jt.load_pretrained(PUBLISHED / name)
    state = pretrained.model_state
    with pytest.raises(ConfigError, match=said):
        jt.save_pretrained(tmp_path / "out", pretrained.params, model=pretrained, model_state=state, base=base)
    assert list(tmp_path.iterdir()) == []
