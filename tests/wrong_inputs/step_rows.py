"""Wrong inputs of what trains, evaluates and runs: (call, what was given, how to write it)."""

import dataclasses

import given
import jax
import jax.numpy as jnp
import numpy as np
from given import MASKED, OPTIMIZER, TASK, Net, X, Y

import jaxtrain as jt
from jaxtrain.data.tokenizer import ByteTokenizer

BATCH = {"inputs": X, "targets": Y}
SPEC = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in BATCH.items()}


def step_of(model=None, task=TASK, optimizer=OPTIMIZER, **more):
    return jt.make_train_step(model or given.model(), task, optimizer, **{"mesh": given.one_device(), **more})


def text_of(prompts=("a",), tokenizer=True, **more):
    step = given.text_step()
    words = {"new_tokens": 2, "sampling": jt.Sampling(), **more}
    return jt.generate_text(
        step, step.init(0).params, ByteTokenizer() if tokenizer is True else tokenizer, prompts, **words
    )


def run(config="digits_mlp", **more):
    return jt.run_config(config, run_dir=more.pop("run_dir", given.folder()), **more)


def without_jit(function):
    with jax.disable_jit():
        return function()


def fresh():
    """A state that nothing else uses."""
    return given.step().init(0)


ROWS = {
    "Evaluator: no task": (lambda: jt.Evaluator(jt.shard_model(given.model())), "None", "Task"),
    "Evaluator: a task beside a step": (lambda: jt.Evaluator(given.step(), TASK), "takes task", "step.sharded_model"),
    "Parallelism: no such stage": (lambda: jt.Parallelism(zero=4), "zero=4", "use 0, 1, 2 or 3"),
    "Parallelism: a word as switch": (
        lambda: jt.Parallelism(sequence_parallel="no"),
        "'no'",
        "sequence_parallel=True",
    ),
    "Parallelism: an unknown schedule": (lambda: jt.Parallelism(schedule="1f2b"), "'1f2b'", "gpipe"),
    "Parallelism: an unknown attention": (
        lambda: jt.Parallelism(context_attention="rings"),
        "'rings'",
        "all_to_all",
    ),
    "Parallelism: no microbatches": (lambda: jt.Parallelism(microbatches=0), "not 0", "microbatches=8"),
    "Parallelism: chunks in words": (lambda: jt.Parallelism(chunks="a"), "not 'a'", "chunks=2"),
    "Parallelism: a share in percent": (
        lambda: jt.Parallelism(max_replicated_fraction=50),
        "not 50",
        "max_replicated_fraction=0.02",
    ),
    "Sampling: a temperature below 0": (lambda: jt.Sampling(temperature=-1), "-1", "use 0 (greedy)"),
    "Sampling: a word": (lambda: jt.Sampling("hot"), "hot", "use 0 (greedy)"),
    "Sampling: top_p": (lambda: jt.Sampling(top_p=2), "top_p is 2", "up to 1"),
    "Sampling: top_k": (lambda: jt.Sampling(top_k=0), "top_k is 0", "1 or more"),
    "Sampling: min_p": (lambda: jt.Sampling(min_p=2), "min_p is 2", "from 0 to 1"),
    "Sampling: a penalty": (lambda: jt.Sampling(presence_penalty=3), "presence_penalty is 3", "from -2 to 2"),
    "Sampling: a repetition": (lambda: jt.Sampling(repetition_penalty=0), "repetition_penalty is 0", "1: no penalty"),
    "TrainStep.init: a word": (lambda: given.step().init("a"), "'a'", "jax.random.key(0)"),
    "TrainStep.init: nothing": (lambda: given.step().init(None), "None", "jax.random.key(0)"),
    "TrainStep.init: other parameters": (
        lambda: given.step().init(0, params={"w": X[:2]}),
        "float32[2, 4]",
        "wanted is float32[4, 3]",
    ),
    "TrainStep.init: an array as parameters": (
        lambda: given.step().init(0, params=X),
        "it is one array",
        "wanted is a tree of arrays",
    ),
    "TrainStep.init: an object as parameters": (
        lambda: given.step().init(0, params=object()),
        "params is an instance of object",
        "give a tree of arrays",
    ),
    "TrainStep.init: what is evaluated": (
        lambda: given.step().init(0, params=jt.EvaluationState(given.state().params, {})),
        "params is an EvaluationState",
        "params=state.evaluation_params",
    ),
    "TrainStep.batch_shardings: an array": (lambda: given.step().batch_shardings(X), "ndarray", "{'inputs': x"),
    "TrainStep.batch_shardings: empty": (lambda: given.step().batch_shardings({}), "an empty dict", "give it arrays"),
    "TrainStep.batch_shardings: words": (
        lambda: given.step().batch_shardings({"inputs": "x"}),
        "'x'",
        "array",
    ),
    "TrainStep.loader: rows": (lambda: given.step().loader(given.rows()), "ArrayRows", "Batches(rows, 32"),
    "TrainStep.loader: an array": (lambda: given.step().loader(X), "an array float32[8, 4]", "Batches(rows, 32"),
    "TrainStep.loader: data": (lambda: given.step().loader(given.data()), "a Data", "Batches(data.train, 32"),
    "TrainStep.place: an array": (lambda: given.step().place(X), "ndarray", "{'inputs': x"),
    "TrainStep.place: masked": (lambda: given.step().place({"inputs": MASKED}), "the batch holds inputs", ".filled(0)"),
    "TrainStep.place: text": (lambda: given.step().place({"inputs": ["a"]}), "inputs", "numbers"),
    "TrainStep.lower: an array": (lambda: given.step().lower(X), "ndarray", "{'inputs': x"),
    "TrainStep.lower: an empty batch": (lambda: given.step().lower({}), "an empty dict", "give it arrays"),
    "TrainStep.lower: lists": (lambda: given.step().lower({"inputs": [1.0], "targets": [1]}), "inputs", "array"),
    "TrainStep.trace: an empty batch": (lambda: given.step().trace({}), "an empty dict", "give it arrays"),
    "TrainStep.compile: batches": (lambda: given.step().compile(given.batches()), "Batches", "{'inputs': x"),
    "TrainStep.compile: targets of another shape": (
        lambda: given.step().compile({**SPEC, "targets": jax.ShapeDtypeStruct((8, 1), np.int32)}),
        "targets [8, 1]",
        "drop the last dimension",
    ),
    "TrainStep.use: a function": (lambda: given.step().use(print), "the function print", "step.lower(batch).compile()"),
    "TrainStep.use: without jit": (lambda: without_jit(lambda: given.step().compile(SPEC)), "jit", "switch it off"),
    "TrainStep.__call__: swapped": (lambda: given.step()(BATCH, fresh()), "a dict", "step.init(seed)"),
    "TrainStep.__call__: parameters": (lambda: given.step()({"w": X}, BATCH), "a dict", "step.init(seed)"),
    "TrainStep.__call__: a tuple": (lambda: given.step()(fresh(), (X, Y)), "tuple", "{'inputs': x"),
    "TrainStep.__call__: nothing": (lambda: given.step()(fresh(), None), "None", "{'inputs': x"),
    "TrainStep.__call__: an empty batch": (lambda: given.step()(fresh(), {}), "an empty dict", "give it arrays"),
    "TrainStep.__call__: no targets": (lambda: given.step()(fresh(), {"inputs": X}), "inputs", "'targets'"),
    "TrainStep.__call__: text": (
        lambda: given.step()(fresh(), {"inputs": ["a"], "targets": [0]}),
        "inputs",
        "numbers",
    ),
    "TrainStep.__call__: inputs of another width": (
        lambda: given.step()(fresh(), {"inputs": X[:, :2], "targets": Y}),
        "float32[8, 2]",
        "give inputs of the shape",
    ),
    "TrainStep.__call__: rows that differ": (
        lambda: given.step()(fresh(), {"inputs": X, "targets": Y[:4]}),
        "targets [4]",
        "[8]",
    ),
    "TrainStep.__call__: batch number": (lambda: given.step()(fresh(), 3), "3", "{'inputs': x"),
    "build_step: a word": (lambda: jt.build_step("quickstart", input_shape=(8,)), "'quickstart'", "load_config("),
    "build_step: what load_config gives": (
        lambda: jt.build_step(jt.load_config("quickstart"), input_shape=(8,)),
        "a Loaded",
        ".config",
    ),
    "build_step: a number as shape": (
        lambda: jt.build_step(jt.load_config("digits_mlp").config, input_shape=4),
        "not 4",
        "input_shape=(4,)",
    ),
    "generate_text: one text": (lambda: text_of("hello"), "'hello'", "['hello']"),
    "generate_text: numbers": (lambda: text_of([1, 2]), "not 1", "['Once upon a time']"),
    "generate_text: no tokenizer": (lambda: text_of(tokenizer=None), "None", "data.tokenizer"),
    "generate_text: no tokens": (lambda: text_of(new_tokens=0), "new_tokens is 0", "1 or more"),
    "generate_text: a temperature": (lambda: text_of(sampling=0.8), "not 0.8", "Sampling(temperature=0.8)"),
    "generate_text: a seed of words": (lambda: text_of(seed="a"), "'a'", "seed=0"),
    "generate_text: a stop token": (lambda: text_of(stop_tokens=2), "not 2", "stop_tokens=[2]"),
    "generate_text: a stop token of words": (lambda: text_of(stop_tokens=["a"]), "'a'", "stop_tokens=[2]"),
    "generate_text: special tokens": (lambda: text_of(add_special_tokens=1), "not 1", "add_special_tokens=False"),
    "generate_text: one stop": (lambda: text_of(stop="END"), "stop is 'END'", "['END']"),
    "generate_text: a cache of words": (lambda: text_of(cache_dtype="tiny"), "'tiny'", "cache_dtype='bfloat16'"),
    "generate_text: a model": (
        lambda: jt.generate_text(given.text_model(), {}, None, ["a"], new_tokens=1, sampling=jt.Sampling()),
        "a Model",
        "shard_model(model)",
    ),
    "generate_text: a state": (
        lambda: jt.generate_text(
            given.text_step(), given.text_step().init(0), None, ["a"], new_tokens=1, sampling=jt.Sampling()
        ),
        "a TrainState",
        "state.params",
    ),
    "make_mesh: a word": (lambda: jt.make_mesh(data="all"), "not 'all'", "data=4"),
    "make_mesh: 0": (lambda: jt.make_mesh(fsdp=0), "not 0", "fsdp=4"),
    "make_mesh: half a device": (lambda: jt.make_mesh(tensor=0.5), "not 0.5", "tensor=4"),
    "make_mesh: too many": (lambda: jt.make_mesh(data=16), "data=16", "--emulate 16"),
    "make_mesh: a number of devices": (lambda: jt.make_mesh(devices=4), "not 4", "devices=jax.devices()[:4]"),
    "make_mesh: no devices": (lambda: jt.make_mesh(devices=[]), "an empty list", "devices=jax.devices()"),
    "make_mesh: names of devices": (lambda: jt.make_mesh(devices=["cpu"]), "'cpu'", "devices=jax.devices()"),
    "make_mesh: a device twice": (lambda: jt.make_mesh(devices=jax.devices()[:1] * 2), "twice", "jax.devices()"),
    "make_train_step: no model": (lambda: jt.make_train_step(Net, TASK, OPTIMIZER), "the class Net", "from_nnx"),
    "make_train_step: swapped": (lambda: jt.make_train_step(TASK, given.model(), OPTIMIZER), "Task", "from_nnx"),
    "find_learning_rate: rates that fall": (
        lambda: jt.find_learning_rate(given.model(), TASK, data=given.rows(), lowest=1.0, highest=0.1),
        "1 to 0.1",
        "rise",
    ),
    "make_train_step: no task": (lambda: step_of(task="classify"), "no task 'classify'", "classification"),
    "make_train_step: no optimizer": (lambda: step_of(optimizer=1e-3), "0.001", "optax.adamw(0.001)"),
    "make_train_step: a number of devices": (lambda: step_of(mesh=8), "not 8", "make_mesh(data=8)"),
    "make_train_step: another mesh": (
        lambda: step_of(mesh=jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))),
        "'x'",
        "make_mesh(",
    ),
    "make_train_step: an unknown policy": (lambda: step_of(policy="bf17"), "'bf17'", "known: fp32"),
    "make_train_step: no accumulation": (lambda: step_of(accumulation_steps=0), "=0", "whole number from 1"),
    "make_train_step: a norm in words": (lambda: step_of(clip_norm="a"), "'a'", "None for no clipping"),
    "make_train_step: a decay in words": (lambda: step_of(ema_decay="a"), "'a'", "0.999"),
    "make_train_step: trainable as a list": (lambda: step_of(trainable=["w"]), "list", "lambda path"),
    "make_train_step: a rate in words": (lambda: step_of(learning_rate="a"), "'a'", "learning_rate=1e-3"),
    "make_train_step: a number as loss scale": (
        lambda: step_of(loss_scaling=1024),
        "not 1024",
        "LossScaling(initial=1024)",
    ),
    "make_train_step: a number as rule of spikes": (lambda: step_of(spikes=6.0), "not 6.0", "SpikeRule(window=128"),
    "make_train_step: a list of rules": (lambda: step_of(rules=["mlp"]), "a list of 1", "{'mlp': ('tensor',)}"),
    "make_train_step: a rule that is a word": (lambda: step_of(rules={"mlp": "tensor"}), "'tensor'", "('tensor',)"),
    "make_train_step: an unknown mesh axis": (lambda: step_of(rules={"mlp": ("model",)}), "'model'", "the axes are"),
    "make_train_step: parallelism as a dict": (
        lambda: step_of(parallelism={"zero": 1}),
        "a dict of 'zero'",
        "Parallelism(zero=1)",
    ),
    "make_train_step: a list of options": (
        lambda: step_of(compiler_options=["a"]),
        "a list of 1",
        "compiler_options={",
    ),
    "make_train_step: offload as a word": (lambda: step_of(offload_optimizer="yes"), "'yes'", "=True"),
    "make_train_step: batch axes that no rule knows": (
        lambda: step_of(task=dataclasses.replace(TASK, batch_axes={"inputs": ("rows",)})).place(BATCH),
        "'rows'",
        "known: ",
    ),
    "make_train_step: a model that gives no pair": (
        lambda: step_of(jt.Model("mine", lambda key: {"w": jnp.ones(3)}, print)),
        "a dict of 'w'",
        "(params, model_state)",
    ),
    "run_config: nothing": (lambda: jt.run_config(None), "not None", "run_config('quickstart')"),
    "run_config: a number": (lambda: run(3), "not 3", "load_config('quickstart')"),
    "run_config: no such config": (lambda: run("digits"), "'digits'", "digits_mlp"),
    "run_config: a list of overrides": (
        lambda: run(overrides=["train.steps=3"]),
        "a list of 1",
        "{'train.steps': 100}",
    ),
    "run_config: a number as folder": (lambda: run(run_dir=3), "not 3", "runs/mine"),
    "run_config: an unknown resume": (lambda: run(resume="yes"), "'yes'", "auto, must, never"),
    "run_config: devices in words": (lambda: run(emulate="8"), "'8'", "emulate=8"),
    "run_config: no model": (lambda: run(model=Net), "the class Net", "from_nnx"),
    "run_config: no task": (lambda: run(task="classification"), "'classification'", "classification()"),
    "run_config: no data": (lambda: run(data=given.rows()), "ArrayRows", "open_data"),
    "run_config: progress as a flag": (lambda: run(progress=False), "False", "progress=None"),
    "shard_model: a module": (lambda: jt.shard_model(Net), "the class Net", "from_nnx"),
    "shard_model: a number of devices": (lambda: jt.shard_model(given.model(), mesh=8), "not 8", "make_mesh(data=8)"),
    "shard_model: an unknown policy": (lambda: jt.shard_model(given.model(), policy="x"), "'x'", "known: fp32"),
    "shard_model: a list of trainable paths": (
        lambda: jt.shard_model(given.model(), trainable=["w"]),
        "list",
        "lambda path",
    ),
    "shard_model: no task": (lambda: jt.shard_model(given.model(), task=3), "3", "Task("),
    "start: no devices": (lambda: jt.start(emulate=0), "not 0", "start(emulate=8)"),
    "start: words": (lambda: jt.start(emulate="8"), "not '8'", "start(emulate=8)"),
    "start: words as seconds": (lambda: jt.start(lost_seconds="25"), "not '25'", "lost_seconds=25"),
    "start: no seconds": (lambda: jt.start(lost_seconds=0), "not 0", "lost_seconds=25"),
    "start: after jax has started": (lambda: jt.start(emulate=3), "8 devices", "before"),
    "start: a number as cache": (lambda: jt.start(compilation_cache=3), "not 3", "write it as text"),
}
