"""Portable programs: outputs of each shipped model where jaxtrain cannot be imported, and the command's mistakes."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import export

import jaxtrain as jt
from jaxtrain.inference.read_program import read_weights
from jaxtrain.inference.stablehlo import FILES, make_program, write_program

SMALL = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32}
DECODER = {"kind": "transformer", **SMALL, "max_sequence_length": 16}
ENCODER = {**DECODER, "causal": False}
# Kind -> its group, its sizes, and per input the shape and dtype of a row.
KINDS = {
    "mlp": ({"kind": "mlp", "hidden_dims": [8]}, (4,), {"inputs": ((4,), "float32")}),
    "resnet": ({"kind": "resnet", "stem": "small", "stage_blocks": [1], "width": 4}, (8, 8, 3), None),
    "decoder": (DECODER, (16,), {"tokens": ((16,), "int32")}),
    "experts": ({**DECODER, "experts": {"num_experts": 4}}, (16,), {"tokens": ((16,), "int32")}),
    "classifier": (
        {**ENCODER, "head": {"kind": "sequence", "pooling": "mean"}},
        (16,),
        {"tokens": ((16,), "int32"), "segments": ((16,), "int32")},
    ),
    "encoder_decoder": (
        {**DECODER, "kind": "encoder_decoder"},
        (16,),
        {"tokens": ((16,), "int32"), "segments": ((16,), "int32"), "decoder_tokens": ((8,), "int32")},
    ),
}
SHORT = ("decoder",)
# Whose dispatch of tokens has sizes that the number of rows decides.
FIXED = ("experts",)

# The reader of the folder, in a process that cannot import what it must not need.
ALONE = """
import runpy, sys
sys.modules.update({name: None for name in ("jaxtrain", "flax", "optax", "orbax", "safetensors", "ml_collections")})
read, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(read, run_name="__main__")
"""


def run_alone(folder, inputs):
    np.savez(folder / "inputs.npz", **inputs)
    words = [str(folder / name) for name in ("read.py", "inputs.npz", "outputs.npz")]
    done = subprocess.run([sys.executable, "-I", "-c", ALONE, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "outputs.npz"))


def sharded(kind, policy="fp32"):
    group, shape, rows = KINDS[kind]
    model = jt.build_model(group, input_shape=shape, vocab_size=64, num_outputs=3)
    model = jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]), policy=policy)
    specs = rows or {"inputs": (shape, "float32")}
    return model, {name: jax.ShapeDtypeStruct(size, np.dtype(dtype)) for name, (size, dtype) in specs.items()}


def some(rows, count):
    """Random rows; segments end in padding."""
    random, found = np.random.default_rng(0), {}
    for name, row in rows.items():
        if name == "segments":
            found[name] = (np.arange(row.shape[0]) < 12).astype(np.int32)[None].repeat(count, 0)
        elif row.dtype == np.int32:
            found[name] = random.integers(0, 64, (count, *row.shape), np.int32)
        else:
            found[name] = random.standard_normal((count, *row.shape), np.float32)
    return found


def rows_of(names):
    return [pytest.param(name, id=name, marks=() if name in SHORT else pytest.mark.long) for name in names]


@pytest.mark.parametrize("kind", rows_of(KINDS))
def test_outputs_are_those_of_the_model(kind, tmp_path):
    model, rows = sharded(kind)
    params, model_state = jax.jit(model.init)(jax.random.key(0))
    program = make_program(model, params, model_state, rows, batch=1 if kind in FIXED else None)
    write_program(tmp_path / "out", program, about={"classes": ["a", "b", "c"]})
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(FILES)
    said = json.loads((tmp_path / "out" / "program.json").read_text())
    count = 1 if kind in FIXED else 3
    assert said["rows_per_call"] == (1 if kind in FIXED else "batch")
    assert {name: spec["shape"][1:] for name, spec in said["inputs"].items()} == {
        name: list(row.shape) for name, row in rows.items()
    }
    assert said["platforms"] == list(program.exported.platforms) == ["cpu", "cuda", "tpu"]
    # A kernel that only one version of one platform has would be another custom call.
    assert set(custom_calls(program.exported)) <= {"shape_assertion"}
    # Weights are arguments: as constants they would stand in the program too.
    assert len(program.exported.in_avals) == len(program.weights) + len(rows)
    inputs = some(rows, count)
    given = inputs.get("inputs", inputs)
    wanted, _ = jax.jit(lambda *trees: model.apply(*trees, key=None, train=False))(params, model_state, given)
    wanted = wanted["logits"] if isinstance(wanted, dict) else wanted
    (found,) = run_alone(tmp_path / "out", inputs).values()
    # The same operations, compiled in another process: sums of float32 in another order at most.
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def custom_calls(exported):
    return [word.split("(")[0] for word in exported.mlir_module().split("custom_call @")[1:]]


def test_weights_keep_their_dtypes(tmp_path):
    """Of a model in bfloat16, whose outputs are float32 all the same; any number of rows."""
    model, rows = sharded("mlp", "bf16_pure")
    params, model_state = jax.jit(model.init)(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf.astype(np.dtype("bfloat16")), params)
    write_program(tmp_path / "out", make_program(model, params, model_state, rows, batch=None), about={})
    program = export.deserialize(bytearray((tmp_path / "out" / "forward.bin").read_bytes()))
    weights = read_weights(tmp_path / "out", program)
    leaves = {f"params/{'/'.join(k.key for k in path)}": leaf for path, leaf in jax.tree.leaves_with_path(params)}
    assert sorted(weights) == sorted(leaves)
    for name, leaf in leaves.items():
        assert weights[name].dtype == leaf.dtype == np.dtype("bfloat16")
        np.testing.assert_array_equal(weights[name], leaf)
    for count in (1, 5):
        (value,) = program.call(weights, some(rows, count)).values()
        assert (value.shape, value.dtype) == ((count, 3), np.float32)


RUN = {
    "task": "classification",
    "model": {"kind": "mlp", "hidden_dims": [8]},
    "data": {"kind": "synthetic", "task": "table", "num_columns": 4, "num_classes": 3, "num_rows": 32},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "train": {"steps": 1, "global_batch_size": 8},
    "evaluation": {"every": 1, "max_batches": 1},
    "logging": {"report": False, "tensorboard": False},
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return jt.run_config(RUN, run_dir=tmp_path_factory.mktemp("runs") / "mlp").run_dir


def test_a_run_is_exported_by_the_command(run_dir, tmp_path, cli):
    answer = cli("export", str(run_dir), "-o", str(tmp_path / "out"), "--to", "stablehlo")
    assert (answer.code, answer.out, answer.err) == (0, f"{tmp_path / 'out'}\n", "")
    said = json.loads((tmp_path / "out" / "program.json").read_text())
    assert (said["model"], said["step"], said["outputs"]["outputs"]["shape"]) == ("mlp", 1, ["batch", 3])
    run = jt.open_run(run_dir, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    program = export.deserialize(bytearray((tmp_path / "out" / "forward.bin").read_bytes()))
    inputs = np.random.default_rng(1).standard_normal((6, 4), np.float32)
    found = program.call(read_weights(tmp_path / "out", program), {"inputs": inputs})["outputs"]
    # The same operations in another program.
    np.testing.assert_allclose(found, run.predict(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_runs_on_texts_say_their_inputs(tmp_path, cli):
    """The rows of the run's own data go through the program as through the run."""
    lines = [{"text": f"row {i}", "label": ["no", "yes"][i % 2]} for i in range(32)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    data = {"kind": "labelled_text", "path": str(tmp_path / "rows.jsonl"), "tokenizer": {"kind": "byte"}}
    model = {**ENCODER, "head": {"kind": "sequence"}}
    jt.run_config({**RUN, "model": model, "data": data}, run_dir=tmp_path / "run")
    assert cli("export", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--to", "stablehlo").code == 0
    said = json.loads((tmp_path / "out" / "program.json").read_text())
    run = jt.open_run(tmp_path / "run", mesh=jt.make_mesh(devices=jax.devices()[:1]))
    inputs = run.data.validation.gather(np.arange(3))["inputs"]
    given = {name: inputs[name] for name in said["inputs"]}
    assert {name: spec["shape"][1] for name, spec in said["inputs"].items()} == {
        name: array.shape[1] for name, array in given.items()
    }
    assert said.get("classes") == ["no", "yes"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "run" / "tokenizer.json").read_bytes()
    program = export.deserialize(bytearray((tmp_path / "out" / "forward.bin").read_bytes()))
    found = np.asarray(program.call(read_weights(tmp_path / "out", program), given)["outputs"])
    # The same operations in another program.
    np.testing.assert_allclose(found, run.predict(inputs), rtol=1e-4, atol=1e-5)


def test_a_folder_that_is_used_is_refused_in_one_line(run_dir, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    answer = cli("export", str(run_dir), "-o", "full", "--to", "stablehlo")
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert "full exists and is not empty; name a new folder" in answer.err
