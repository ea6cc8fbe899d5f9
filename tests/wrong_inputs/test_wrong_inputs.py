"""What an ordinary user passes wrongly to a public name is one line: what was given, and how to write it.

A row per kind of mistake that users make in their first month, not per public name.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.data.tokenizer import ByteTokenizer

LLAMA = Path(__file__).parent.parent / "interop" / "published" / "llama"
GROUP = {"kind": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "vocab_size": 40}
MLP = {"kind": "mlp"}
X, Y = np.ones((8, 4), np.float32), np.zeros(8, np.int32)
BATCH = {"inputs": X, "targets": Y}
SPEC = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in BATCH.items()}
MASKED = np.ma.masked_array(X, mask=X > 0)
TASK, OPTIMIZER = jt.classification(), optax.sgd(0.1)
LOGITS, IDS = jnp.ones((2, 3, 4)), jnp.zeros((1, 3), jnp.int32)
TOKENS = np.zeros((4, 2, 8), np.int32)
PAIRS = {"inputs": TOKENS, "targets": TOKENS, "weights": np.ones((4, 2, 8), np.float32)}


class Net(nnx.Module):
    """x [B, 4] -> [B, 3]."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


class LinenNet(flax.linen.Module):
    """x [B, 4] -> [B, 3]."""

    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return flax.linen.Dense(3)(x)


@functools.cache
def model() -> jt.Model:
    return jt.from_functions(lambda key: {"w": jnp.ones((4, 3))}, lambda params, x: x @ params["w"])


@functools.cache
def text_model() -> jt.Model:
    config = {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 8}
    return jt.build_model(config, input_shape=(8,), vocab_size=256)


@functools.cache
def one_device() -> Any:
    return jt.make_mesh(devices=jax.devices()[:1])


def step_of(model_of=model, task=TASK, optimizer=OPTIMIZER, **more):
    return jt.make_train_step(model_of(), task, optimizer, **{"mesh": one_device(), **more})


@functools.cache
def step() -> jt.TrainStep:
    return step_of()


@functools.cache
def text_step() -> jt.TrainStep:
    return step_of(text_model, jt.language_modeling())


def lower_pairs(task, batch):
    return step_of(text_model, task).lower(batch)


@functools.cache
def rows() -> jt.ArrayRows:
    return jt.ArrayRows(BATCH)


def batches_of(of=None, size=8) -> jt.Batches:
    return jt.Batches(rows() if of is None else of, size, seed=0, shuffle=False)


@functools.cache
def data() -> jt.Data:
    return jt.open_data({"kind": "synthetic", "task": "images", "image_size": 8})


def folder() -> Path:
    return Path(tempfile.mkdtemp())


@functools.cache
def checkpointer() -> jt.Checkpointer:
    """With a step 3."""
    made = jt.Checkpointer(folder())
    made.save(3, {"w": jnp.ones(4)}, metadata={})
    made.wait()
    return made


def built(config=MLP, **more):
    return jt.build_model(config, **{"input_shape": (4,), "num_outputs": 3, **more})


def adapted():
    return jt.adapt(text_model(), lora=jt.LoraConfig(rank=2))


def text_of(prompts=("a",), tokenizer=True):
    tokenizer = ByteTokenizer() if tokenizer is True else tokenizer
    params = text_step().init(0).params
    return jt.generate_text(text_step(), params, tokenizer, prompts, new_tokens=2, sampling=jt.Sampling())


def run(config="digits_mlp", **more):
    return jt.run_config(config, run_dir=folder(), **more)


def fit(model_of=model, task=TASK, optimizer=OPTIMIZER, **more):
    words = {"data": BATCH, "steps": 1, "batch_size": 8, "run_dir": folder() / "run"}
    return jt.fit(model_of(), task, optimizer, **{**words, **more})


def engine(**changed: Any) -> jt.Engine:
    """An engine that is not started, on no parameters: what is wrong is found before either matters."""
    return jt.Engine(changed.pop("model", None) or jt.shard_model(text_model(), mesh=one_device()), {}, **changed)


def request(new_tokens=4) -> jt.Request:
    return jt.Request((1, 2), new_tokens, jt.Sampling())


def device_shardings():
    return dict.fromkeys(batches_of().spec(), jax.sharding.SingleDeviceSharding(jax.devices()[0]))


# What is wrong: (call, words of what was given, words of how to write it).
ROWS = {
    "adapt: an unknown target": (
        lambda: jt.adapt(text_model(), lora=jt.LoraConfig(rank=2, targets=("qeury",))),
        "'qeury'",
        "there are query",
    ),
    "adapt: a rank above a dim": (
        lambda: jt.adapt(text_model(), lora=jt.LoraConfig(rank=1000)),
        "lora.rank=1000",
        "or less",
    ),
    "adapt: twice": (
        lambda: jt.adapt(adapted(), lora=jt.LoraConfig(rank=2)),
        "is adapted already",
        "adapt the model that it was made of",
    ),
    "ArrayRows: an array": (lambda: jt.ArrayRows(X), "an array float32[8, 4]", "ArrayRows({'inputs': "),
    "ArrayRows: lengths": (lambda: jt.ArrayRows({"inputs": X, "targets": Y[:3]}), "targets has 3", "one length"),
    "ArrayRows: text": (lambda: jt.ArrayRows({"inputs": ["a", "b"]}), "inputs holds", "numbers"),
    "ArrayRows: ragged": (lambda: jt.ArrayRows({"inputs": [[1], [1, 2]]}), "different lengths", "pad or crop"),
    "Batches: a dict": (lambda: batches_of({"inputs": X}), "a dict of inputs", "ArrayRows"),
    "Batches: data": (lambda: batches_of(data()), "'Data' object", "data.train"),
    "Batches: no size": (lambda: batches_of(size=0), "not 0", "Batches(rows, 32"),
    "Batches.load: past the end": (lambda: batches_of().load(1, device_shardings()), "batch 1", "batches 0 to 0"),
    "build_model: an unknown kind": (lambda: built({"kind": "mpl"}), "'mpl'", "did you mean 'mlp'"),
    "build_model: an unknown key": (lambda: built({**MLP, "width": 3}), "unknown key 'model.width'", "model."),
    "build_model: a number as shape": (lambda: built(input_shape=4), "not 4", "input_shape=(4,)"),
    "build_model: no outputs": (lambda: built(num_outputs=None), "", "model.num_outputs"),
    "build_step: what load_config gives": (
        lambda: jt.build_step(jt.load_config("quickstart"), input_shape=(8,)),
        "a Loaded",
        ".config",
    ),
    "Checkpointer: another store": (lambda: jt.Checkpointer("hf://bucket/x"), "hf://bucket/x", "a local folder"),
    "Checkpointer.restore: other arrays": (
        lambda: checkpointer().restore({"v": jax.ShapeDtypeStruct((4,), np.float32)}),
        "v is not there",
        "of another",
    ),
    "Config: an unknown key": (lambda: jt.Config(trian={"steps": 3}), "unknown key 'trian'", "did you mean 'train'"),
    "Config: a wrong value": (lambda: jt.Config(train={"steps": "many"}), "train.steps is 'many'", "it takes int"),
    "count_parameters: parameters": (lambda: jt.count_parameters({"w": X}), "a dict of 'w'", "step.model"),
    "cross_entropy: shapes": (lambda: jt.cross_entropy(LOGITS, IDS), "int32[1, 3]", "[2, 3]"),
    "dpo: a beta of 0": (lambda: jt.dpo(0.0), "Loss: beta is 0.0", "greater than 0"),
    "dpo: no pairs": (
        lambda: lower_pairs(jt.dpo(), {"inputs": TOKENS[:, 0], "targets": TOKENS[:, 0]}),
        "int32[4, 8]",
        "the chosen answer first",
    ),
    "dpo: no reference": (
        lambda: lower_pairs(jt.dpo(), PAIRS),
        "reference of the batch is None",
        "jaxtrain.reference_rows(",
    ),
    "dropout: swapped": (lambda: jt.dropout(X, jax.random.key(0), 0.1), "an array key", "dropout(x, 0.1, key)"),
    "EarlyStopping: an unknown mode": (lambda: jt.EarlyStopping(mode="up"), "'up'", "auto, min, max"),
    "elementwise: not called": (lambda: jt.elementwise(optax.adamw), "the function adamw", "optax.adamw(1e-3)"),
    "Engine: a model on no mesh": (lambda: engine(model=text_model()), "not a Model", "Engine(sharded_model"),
    "Engine: more positions than the model has": (lambda: engine(length=9), "length=9", "use length=8"),
    "Engine.submit: before the start": (lambda: engine().submit(request()), "does not run", "call start() first"),
    "Evaluator: no task": (lambda: jt.Evaluator(jt.shard_model(model())), "None", "Task"),
    "fit: a quantized base without adapters": (
        lambda: fit(text_model, finetune={"base": "int8"}),
        "base=int8 without lora",
        "set lora.rank",
    ),
    "fit: a rate as optimizer": (lambda: fit(optimizer=1e-3), "0.001", "optax.adamw(0.001)"),
    "fit: no length": (lambda: fit(steps=None), "steps= or epochs=", "give one of them"),
    "fit: two lengths": (lambda: fit(epochs=1), "steps= or epochs=", "leave one out"),
    "fit: masked inputs": (lambda: fit(data=(MASKED, Y)), "data holds 'inputs' with masked", ".filled(0)"),
    "fit: lengths that differ": (lambda: fit(data=(X, Y[:3])), "3", "one length"),
    "fit: a function as callback": (lambda: fit(callbacks=[print]), "function print", "Callback("),
    "fit: an unknown key": (lambda: fit(evaluation={"evry": 1}), "evaluation.evry", "evaluation.every"),
    "from_equinox: no module": (lambda: jt.from_equinox(lambda key: {"w": 1}), "dict", "from_equinox(lambda key: "),
    "from_linen: a class": (lambda: jt.from_linen(LinenNet, X), "the class LinenNet", "from_linen(LinenNet(), "),
    "from_models: a list": (lambda: jt.from_models([model()]), "a list of 1", "{'student': small"),
    "from_nnx: a Linen module": (lambda: jt.from_nnx(LinenNet()), "LinenNet", "from_linen"),
    "from_nnx: a function that gives no module": (lambda: jt.from_nnx(lambda rngs: {"w": 1}), "dict", "nnx.Module"),
    "generate_text: one text": (lambda: text_of("hello"), "'hello'", "['hello']"),
    "generate_text: no tokenizer": (lambda: text_of(tokenizer=None), "None", "data.tokenizer"),
    "get_policy: unknown": (lambda: jt.get_policy("bf8"), "'bf8'", "known: fp32"),
    "language_modeling: unknown blocks": (
        lambda: jt.language_modeling(logits="vocab"),
        "logits is 'vocab'",
        "not one of auto, whole",
    ),
    "load_adapter: a published folder": (
        lambda: jt.load_adapter(LLAMA, base=LLAMA),
        "has no adapter_config.json",
        "the folder of an adapter",
    ),
    "load_config: no such config": (lambda: jt.load_config("quikstart"), "'quikstart'", "did you mean 'quickstart'"),
    "load_config: one override": (
        lambda: jt.load_config("quickstart", overrides="train.steps=3"),
        "not 'train.steps=3'",
        "overrides=['train.steps=100']",
    ),
    "load_config: a dict of overrides": (
        lambda: jt.load_config("quickstart", overrides={"train.steps": 3}),
        "a dict of 'train.steps'",
        "keywords=",
    ),
    "load_pretrained: no folder": (lambda: jt.load_pretrained("none"), "no folder none", "config.json"),
    "lookahead: not called": (lambda: jt.lookahead(optax.adamw), "function", "lookahead(optax.adamw(1e-3))"),
    "LoraConfig: an unknown key": (lambda: jt.LoraConfig(r=8), "'r'", "it takes rank"),
    "make_mesh: 0": (lambda: jt.make_mesh(fsdp=0), "not 0", "fsdp=4"),
    "make_mesh: too many": (lambda: jt.make_mesh(data=16), "data=16", "--emulate 16"),
    "make_train_step: no model": (lambda: jt.make_train_step(Net, TASK, OPTIMIZER), "the class Net", "from_nnx"),
    "make_train_step: no task": (lambda: step_of(task="classify"), "no task 'classify'", "classification"),
    "make_train_step: a number of devices": (lambda: step_of(mesh=8), "not 8", "make_mesh(data=8)"),
    "make_train_step: an unknown policy": (lambda: step_of(policy="bf17"), "'bf17'", "known: fp32"),
    "make_train_step: no accumulation": (lambda: step_of(accumulation_steps=0), "=0", "whole number from 1"),
    "make_train_step: a rule that is a word": (lambda: step_of(rules={"mlp": "tensor"}), "'tensor'", "('tensor',)"),
    "make_train_step: an unknown mesh axis": (lambda: step_of(rules={"mlp": ("model",)}), "'model'", "the axes are"),
    "merge_adapters: a model without adapters": (
        lambda: jt.merge_adapters({"w": X}, text_model()),
        "has no adapters",
        "jt.adapt(model, lora=",
    ),
    "open_data: an unknown kind": (lambda: jt.open_data({"kind": "digit"}), "'digit'", "did you mean 'digits'"),
    "open_data: an array": (lambda: jt.open_data(X), "an array float32[8, 4]", "jaxtrain.ArrayRows"),
    "open_data: chats of another template": (
        lambda: jt.open_data({"kind": "chat", "template": "chatnl"}, sequence_length=64),
        "data.template=chatnl",
        "chatml or plain",
    ),
    "open_data: chats without a file": (
        lambda: jt.open_data({"kind": "chat", "path": "chats.jsonl"}, sequence_length=64),
        "data.path chats.jsonl",
        "the nearest existing path",
    ),
    "open_run: no run": (lambda: jt.open_run("runs/none"), "runs/none", "run"),
    "Parallelism: no such stage": (lambda: jt.Parallelism(zero=4), "zero=4", "use 0, 1, 2 or 3"),
    "Parallelism: an unknown schedule": (lambda: jt.Parallelism(schedule="1f2b"), "'1f2b'", "gpipe"),
    "parameter_groups: not called": (
        lambda: jt.parameter_groups(optax.adamw, {"head/*": OPTIMIZER}),
        "function",
        "parameter_groups(optax.adamw(1e-3), {'head/*': optax.sgd(1e-2)})",
    ),
    "prefetch: batches": (lambda: jt.prefetch(batches_of(), 0, 1), "a Batches", "step.loader(batches)"),
    "quantize: an unknown format": (lambda: jt.quantize({}, text_model(), "int3"), "'int3'", "known: int8"),
    "reference_rows: a task without": (
        lambda: jt.reference_rows(text_step(), text_step().init(0), jt.ArrayRows(PAIRS)),
        "language_modeling",
        "jaxtrain.dpo()",
    ),
    "Remat: an unknown policy": (lambda: jt.Remat("ful"), "'ful'", "not one of none, full"),
    "Request: no new tokens": (lambda: request(new_tokens=0), "not 0", "1 or more"),
    "reward: logits of a vocabulary": (
        lambda: lower_pairs(jt.reward(), PAIRS),
        "[8, 8, 256]",
        "model.head.num_labels=1",
    ),
    "run_config: no such config": (lambda: run("digits"), "'digits'", "digits_mlp"),
    "run_config: a list of overrides": (
        lambda: run(overrides=["train.steps=3"]),
        "a list of 1",
        "{'train.steps': 100}",
    ),
    "run_config: an unknown resume": (lambda: run(resume="yes"), "'yes'", "auto, must, never"),
    "run_config: no data": (lambda: run(data=rows()), "ArrayRows", "open_data"),
    "Sampling: a temperature below 0": (lambda: jt.Sampling(temperature=-1), "-1", "use 0 (greedy)"),
    "Sampling: top_p": (lambda: jt.Sampling(top_p=2), "top_p is 2", "up to 1"),
    "save_adapter: no adapters": (
        lambda: jt.save_adapter("out", {}, model=jt.build_model(GROUP, input_shape=(4,)), base=GROUP),
        "has no adapters",
        "save_pretrained",
    ),
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
    "start: after jax has started": (lambda: jt.start(emulate=3), "8 devices", "before"),
    "target_weights: no targets": (lambda: jt.target_weights({"inputs": X}), "inputs", "'targets'"),
    "TrainStep.init: other parameters": (
        lambda: step().init(0, params={"w": X[:2]}),
        "float32[2, 4]",
        "wanted is float32[4, 3]",
    ),
    "TrainStep.loader: rows": (lambda: step().loader(rows()), "ArrayRows", "Batches(rows, 32"),
    "TrainStep.place: text": (lambda: step().place({"inputs": ["a"]}), "inputs", "numbers"),
    "TrainStep.compile: targets of another shape": (
        lambda: step().compile({**SPEC, "targets": jax.ShapeDtypeStruct((8, 1), np.int32)}),
        "targets [8, 1]",
        "drop the last dimension",
    ),
    "TrainStep.__call__: swapped": (lambda: step()(BATCH, step().init(0)), "a dict", "step.init(seed)"),
    "TrainStep.__call__: a tuple": (lambda: step()(step().init(0), (X, Y)), "tuple", "{'inputs': x"),
    "TrainStep.__call__: no targets": (lambda: step()(step().init(0), {"inputs": X}), "inputs", "'targets'"),
    "TrainStep.__call__: inputs of another width": (
        lambda: step()(step().init(0), {"inputs": X[:, :2], "targets": Y}),
        "float32[8, 2]",
        "give inputs of the shape",
    ),
    "TrainStep.__call__: rows that differ": (
        lambda: step()(step().init(0), {"inputs": X, "targets": Y[:4]}),
        "targets [4]",
        "[8]",
    ),
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
