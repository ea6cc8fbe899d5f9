"""Published weights reach every layout, each slice is read once, and the doors (config, commands) open."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.formats.safetensors import open_folder
from jaxtrain.weights.read import by_path, copy_into, read_places

LLAMA = Path(__file__).parent / "published" / "llama"
WANTED = dict(np.load(LLAMA / "expected.npz"))


class CountingSource:
    """A source that adds up what is read of each tensor."""

    def __init__(self, source):
        self.source, self.read_elements = source, {}

    def read(self, name):
        found = self.source.read(name)
        self.read_elements[name] = self.read_elements.get(name, 0) + found.size
        return found


def test_weights_on_a_mesh():
    pretrained = jt.load_pretrained(LLAMA)
    sharded = jt.shard_model(pretrained.model, mesh=jt.make_mesh(fsdp=2, tensor=2, data=2))
    source = CountingSource(pretrained.published.source)
    published = dataclasses.replace(pretrained.published, source=source)
    wanted = by_path(sharded.abstract_params)
    found = read_places(published, pretrained.places.params, wanted)
    # Devices that hold the same slice share it: nothing is read twice.
    sizes = {name: int(np.prod(shape)) for name, (shape, _) in pretrained.published.source.tensors.items()}
    assert source.read_elements == sizes
    assert {path: array.sharding for path, array in found.items()} == {
        path: like.sharding for path, like in wanted.items()
    }
    here = by_path(pretrained.params)
    for path, array in found.items():
        np.testing.assert_array_equal(array, here[path], err_msg=path)
    params = jax.tree.unflatten(jax.tree.structure(sharded.abstract_params), [found[path] for path in wanted])
    tokens = jnp.asarray(WANTED["tokens"], jnp.int32)
    logits = jax.jit(lambda params, x: sharded.apply(params, {}, x, key=None, train=False)[0])(params, tokens)
    # As on one device in test_families.py: float32 sums in another order.
    np.testing.assert_allclose(logits, WANTED["logits"], rtol=0, atol=1e-4 * np.ptp(WANTED["logits"]))


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0)])
def test_transposed_views_are_copied_number_for_number(order):
    theirs = np.random.default_rng(0).normal(size=(37, 70, 41)).astype(np.float32)
    part = theirs.transpose(order)
    for dtype in (np.float32, jnp.bfloat16):
        out = np.zeros(part.shape, dtype)
        copy_into(out, part)
        np.testing.assert_array_equal(out, part.astype(dtype))


CONFIG = {
    "model": {"from": str(LLAMA)},
    "data": {"kind": "synthetic", "task": "tokens", "vocab_size": 40, "sequence_length": 16, "num_rows": 64},
    "train": {"steps": 2, "global_batch_size": 8},
    "evaluation": {"every": None},
    "logging": {"report": False},
}


def test_the_folder_gives_the_keys_and_what_is_set_after_it_wins():
    loaded = jt.load_config(CONFIG, overrides=["model.num_heads=2", "model.num_kv_heads=null", "model.head_dim=8"])
    model = loaded.config.model
    assert (model.num_layers, model.num_heads, model.kv_heads, model.vocab_size) == (2, 2, 2, 40)
    assert loaded.origins["model.num_layers"] == str(LLAMA / "config.json")
    assert loaded.origins["model.num_heads"] == "command line"
    other = jt.load_config("quickstart", overrides=[f"model.from={LLAMA}"])
    assert other.config.model.embed_dim == 16
    assert any("model.embed_dim" in note and "is replaced by model.from" in note for note in other.notes)


@pytest.mark.long
def test_train_import_export_and_back(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "folder" / name).write_bytes((LLAMA / name).read_bytes())
    answer = cli("import", "folder", "-o", "run")
    assert (answer.code, answer.out) == (0, "run\n"), answer.err
    # Neither the run nor its export needs the folder.
    (tmp_path / "folder").rename(tmp_path / "elsewhere")
    assert cli("export", "run", "-o", "out", "--max-shard-size", "8KB").code == 0
    before, after = open_folder(LLAMA), open_folder("out")
    assert {name: before.read(name).tobytes() for name in before.tensors} == {
        name: after.read(name).tobytes() for name in after.tensors
    }
    assert cli("export", "run", "-o", "half", "--dtype", "bfloat16").code == 0
    assert open_folder("half").config["torch_dtype"] == "bfloat16"
    assert {str(dtype) for _, dtype in open_folder("half").tensors.values()} == {"bfloat16"}
    assert cli("eval", "run").code == 0
    for words, said in (
        (("import", "none", "-o", "other"), "no folder none"),
        (("import", "elsewhere", "-o", "run"), "is a run already"),
        (("export", "run", "-o", "out"), "not empty"),
        (("export", "run", "-o", "more", "--max-shard-size", "big"), "5GB"),
        (("export", "none", "-o", "more"), "none is not a run"),
    ):
        answer = cli(*words)
        assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
        assert said in answer.err
