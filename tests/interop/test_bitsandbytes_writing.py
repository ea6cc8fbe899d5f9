"""Folders that are written in nf4 as bitsandbytes writes them, and what is read of them again.

That transformers and bitsandbytes read them, and that bitsandbytes quantizes floats to the same bytes, is checked with
the program `scripts/check_nf4_folders.py`; here a folder that bitsandbytes wrote comes out as it was.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_bitsandbytes import FOLDER, UP, start

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.interop.load import by_path
from jaxtrain.interop.weights import open_published
from jaxtrain.precision.kernels import is_kernel
from jaxtrain.precision.low_rank import LowRankKernel
from jaxtrain.published.bitsandbytes_writing import pack_floats, packed_parts
from jaxtrain.published.folder import open_folder
from jaxtrain.run.import_run import export_folder

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


@pytest.mark.parametrize("degrees", [{}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.long)], ids=str)
def test_kernels_that_bitsandbytes_quantized_are_written_as_they_were(degrees, tmp_path):
    _, params = start(FOLDER, **degrees)
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
def test_a_published_folder_is_written_again_and_starts_a_run_on_the_same_bytes(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pretrained = jt.load_pretrained(FOLDER)
    jt.save_pretrained("floats", pretrained.params, model=pretrained, dtype="float32")
    assert cli("export", "floats", "-o", "nf4", "--base", "nf4").code == 0
    assert cli("import", "nf4", "finetune.base=nf4", "finetune.lora.rank=2", "-o", "run").code == 0
    params = by_path(jt.open_run("run").params)
    source: Any = open_published("nf4").source
    packed = source.packed(UP)
    base = "blocks/mlp/up/kernel/base"
    np.testing.assert_array_equal(params[f"{base}/codes"][1], packed.codes.T)
    np.testing.assert_array_equal(params[f"{base}/absmax"][1], packed.absmax.T)
    # The adapters are 0: the merged weights are those of the folder, and are quantized to the same codes again.
    answer = cli("export", "run", "-o", "merged", "--merge", "--base", "nf4")
    assert answer.code == 0, answer.err
    assert "merged: nf4 moves the logits by" in answer.err
    assert stored(Path("merged"))[UP] == stored(Path("nf4"))[UP]


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


def refused(name: str, **changes: Any) -> Any:
    pretrained = jt.load_pretrained(PUBLISHED / name)
    state = pretrained.model_state
    return jt.save_pretrained(
        "out", pretrained.params, model=pretrained, model_state=state, **{"base": "nf4"} | changes
    )


def small_kernels(base: str | None) -> Any:
    pretrained, small = quantized_llama()
    return jt.save_pretrained("out", small, model=pretrained, base=base)


@functools.cache
def quantized_llama() -> Any:
    pretrained = jt.load_pretrained(LLAMA)
    return pretrained, quantized(pretrained.params, pretrained.model)


def quantized(params: Any, model: Any) -> Any:
    return jax.jit(lambda params: jt.quantize(params, model, "nf4"))(params)


WRONG = {
    "rows of inputs": (lambda: refused("gpt2"), r"c_attn\.weight holds a row for each input.*\(Conv1D\)"),
    "no linear layers": (lambda: refused("resnet_basic"), "is for linear layers, and the model has none"),
    "nf4 kernels as floats": (lambda: small_kernels(None), "is written in floats; give floats"),
    "blocks that end with rows": (lambda: small_kernels("nf4"), "has rows of 16 weights, over whose ends blocks of 64"),
    "an unknown base": (lambda: refused("llama", base="fp4"), "not 'fp4'"),
}


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_written_is_refused(call, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        call()
    assert list(tmp_path.iterdir()) == []
