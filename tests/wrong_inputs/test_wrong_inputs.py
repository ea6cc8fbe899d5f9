"""What users pass wrongly in their first month is one line: what was given, and how to write it.

Rows of settings, files and data; what the command line says is in tests/cli/test_usage.py.
"""

import functools
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt

LLAMA = Path(__file__).parent.parent / "weights" / "published" / "llama"
GROUP = {"kind": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "vocab_size": 40}
MLP = {"kind": "mlp"}
X, Y = np.ones((8, 4), np.float32), np.zeros(8, np.int32)
BATCH = {"inputs": X, "targets": Y}
TASK, OPTIMIZER = jt.classification(), optax.sgd(0.1)


@functools.cache
def model() -> jt.Model:
    return jt.from_functions(lambda key: {"w": jnp.ones((4, 3))}, lambda params, x: x @ params["w"])


@functools.cache
def step() -> jt.TrainStep:
    return jt.make_train_step(model(), TASK, OPTIMIZER)


def folder() -> Path:
    return Path(tempfile.mkdtemp())


def built(config=MLP, **more):
    return jt.build_model(config, **{"input_shape": (4,), "num_outputs": 3, **more})


def fit(optimizer=OPTIMIZER, **more):
    words = {"data": BATCH, "steps": 1, "batch_size": 8, "run_dir": folder() / "run"}
    return jt.fit(model(), TASK, optimizer, **{**words, **more})


def chats(**settings):
    return jt.open_data({"kind": "chat", **settings}, sequence_length=64)


# What is wrong: (call, words of what was given, words of how to write it).
ROWS = {
    "adapt: an unknown target": (
        lambda: jt.adapt(built(GROUP, input_shape=(8,)), lora=jt.LoraConfig(rank=2, targets=("qeury",))),
        "'qeury'",
        "there are query",
    ),
    "ArrayRows: lengths": (lambda: jt.ArrayRows({"inputs": X, "targets": Y[:3]}), "targets has 3", "equal length"),
    "ArrayRows: text": (lambda: jt.ArrayRows({"inputs": ["a", "b"]}), "inputs holds", "numbers"),
    "build_model: an unknown kind": (lambda: built({"kind": "mpl"}), "'mpl'", "did you mean 'mlp'"),
    "build_model: an unknown key": (lambda: built({**MLP, "width": 3}), "unknown key 'model.width'", "model."),
    "Checkpointer: another store": (lambda: jt.Checkpointer("hf://bucket/x"), "hf://bucket/x", "a local folder"),
    "Config: an unknown key": (lambda: jt.Config(trian={"steps": 3}), "unknown key 'trian.steps'", "'train.steps'?"),
    "Config: a wrong value": (lambda: jt.Config(train={"steps": "many"}), "train.steps is 'many'", "it takes int"),
    "dpo: a beta of 0": (lambda: jt.dpo(0.0), "Loss: beta is 0.0", "greater than 0"),
    "fit: a rate as optimizer": (lambda: fit(1e-3), "0.001", "optax.adamw(1e-3)"),
    "fit: no length": (lambda: fit(steps=None), "steps= or epochs=", "give one of them"),
    "fit: lengths that differ": (lambda: fit(data=(X, Y[:3])), "3", "equal length"),
    "fit: an unknown key": (lambda: fit(evaluation={"evry": 1}), "evaluation.evry", "evaluation.every"),
    "fit: a quantized base without adapters": (
        lambda: fit(finetune={"base": "int8"}),
        "base=int8 without lora",
        "set lora.rank",
    ),
    "load_adapter: a published folder": (
        lambda: jt.load_adapter(LLAMA, base=LLAMA),
        "has no adapter_config.json",
        "an adapter folder",
    ),
    "load_config: no such config": (lambda: jt.load_config("quikstart"), "'quikstart'", "did you mean 'quickstart'"),
    "load_pretrained: no folder": (lambda: jt.load_pretrained("none"), "no folder none", "config.json"),
    "LoraConfig: an unknown key": (lambda: jt.LoraConfig(r=8), "'r'", "it takes rank"),
    "make_mesh: too many": (lambda: jt.make_mesh(data=16), "data=16", "--emulate 16"),
    "open_data: an unknown kind": (lambda: jt.open_data({"kind": "digit"}), "'digit'", "did you mean 'digits'"),
    "open_data: another template": (lambda: chats(template="chatnl"), "chatnl does not exist", "chatml or plain"),
    "open_data: no file": (lambda: chats(path="chats.jsonl"), "data.path chats.jsonl", "the nearest existing path"),
    "open_run: no run": (lambda: jt.open_run("runs/none"), "runs/none", "run"),
    "Remat: an unknown policy": (lambda: jt.Remat(policy="ful"), "'ful'", "not one of none, full"),
    "run_config: no such config": (lambda: jt.run_config("digits"), "'digits'", "digits_mlp"),
    "save_pretrained: a full folder": (
        lambda: jt.save_pretrained(LLAMA, {}, model=GROUP),
        "not empty",
        "name a new folder",
    ),
    "save_pretrained: no family": (
        lambda: jt.save_pretrained("out", {}, model={**GROUP, "norm": "layernorm"}),
        "model.norm",
        "family",
    ),
    "TrainStep: inputs of another width": (
        lambda: step()(step().init(0), {"inputs": X[:, :2], "targets": Y}),
        "float32[8, 2]",
        "cannot be applied to inputs",
    ),
    "TrainStep: no targets": (lambda: step()(step().init(0), {"inputs": X}), "inputs", "'targets'"),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_wrong_input_is_one_line(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, given, write = ROWS[row]
    with pytest.raises(jt.UserError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    assert given in line
    assert write in line
    # A line that nobody reads to its end tells nobody anything.
    assert len(line) < 500
    assert not list(tmp_path.iterdir())
