"""Wrong inputs of `fit`, its callbacks, `open_run` and models of models: (call, what was given, how to write it)."""

import types

import given
import jax
import numpy as np
import optax
from given import MASKED, OPTIMIZER, TASK, Net, X, Y

import jaxtrain as jt

LEAF = jax.ShapeDtypeStruct((4,), np.float32)


def fit(model=None, task=TASK, optimizer=OPTIMIZER, **more):
    words = {"data": {"inputs": X, "targets": Y}, "steps": 1, "batch_size": 8, "run_dir": given.folder() / "run"}
    return jt.fit(model or given.model(), task, optimizer, **{**words, **more})


def without_jit():
    with jax.disable_jit():
        fit()


def called(inputs=X, **more):
    """Calls a model inside a loss, which is traced."""
    task = jt.Task.calling("mine", lambda apply, batch, key: (apply(inputs, **more).sum(), 1.0, {}))
    step = jt.make_train_step(given.model(), task, OPTIMIZER, mesh=given.one_device())
    return step.lower({"inputs": X, "targets": Y})


ROWS = {
    "Callback: nothing": (lambda: jt.Callback(), "nothing to call", "on_step="),
    "Callback: every 0 steps": (lambda: jt.Callback(on_step=print, every=0), "every=0", "whole number of steps from 1"),
    "Checkpointer.read: no such array": (lambda: given.checkpointer().read({"v": LEAF}, step=3), "v is", "there"),
    "Checkpointer.read: no such step": (lambda: given.checkpointer().read({"w": LEAF}, step=9), "step 9", "it holds"),
    "Checkpointer.read: a list": (
        lambda: given.checkpointer().read(["w"], step=3),
        "a list of 1",
        "read({'params/w': ",
    ),
    "EarlyStopping: no patience": (lambda: jt.EarlyStopping(patience=0), "0", "patience"),
    "EarlyStopping: an unknown mode": (lambda: jt.EarlyStopping(mode="up"), "'up'", "auto, min, max"),
    "EarlyStopping: a number as metric": (lambda: jt.EarlyStopping(3), "3", "metric"),
    "EarlyStopping: a difference in words": (lambda: jt.EarlyStopping(min_delta="a"), "'a'", "min_delta"),
    "ModelCall.__call__: parameters of another structure": (
        lambda: called(params={"v": X}),
        "params",
        "jax.tree.map(function, apply.params)",
    ),
    "ModelCall.__call__: inputs of another width": (
        lambda: called(inputs=X[:, :2]),
        "float32[8, 2]",
        "give inputs of the shape",
    ),
    "TrainStep.gradients: swapped": (
        lambda: given.step().gradients({"inputs": X, "targets": Y}, given.step().init(0)),
        "a dict",
        "step.init(seed)",
    ),
    "TrainStep.gradients: a tuple": (
        lambda: given.step().gradients(given.step().init(0), (X, Y)),
        "tuple",
        "{'inputs': x",
    ),
    "fit: a class as model": (lambda: fit(Net), "the class Net", "from_nnx"),
    "fit: adapters that are no dict": (lambda: fit(finetune=8), "finetune=8", "{'lora': {'rank': 8}}"),
    "fit: adapters of an adapted model": (
        lambda: fit(
            jt.adapt(given.text_model(), lora=jt.LoraConfig(rank=2)),
            finetune={"lora": {"rank": 2}},
        ),
        "is adapted already",
        "leave the group finetune out",
    ),
    "fit: adapters beside frozen parameters": (
        lambda: fit(given.text_model(), finetune={"lora": {"rank": 2}}, overrides={"optimizer.freeze": ["embedding"]}),
        "optimizer.freeze=['embedding']",
        "leave optimizer.freeze out",
    ),
    "fit: a quantized base without adapters": (
        lambda: fit(given.text_model(), finetune={"base": "int8"}),
        "base=int8 without lora",
        "set lora.rank",
    ),
    "fit: a word as task": (lambda: fit(task="classify"), "no task 'classify'", "classification"),
    "fit: a rate as optimizer": (lambda: fit(optimizer=1e-3), "0.001", "optax.adamw(0.001)"),
    "fit: no length": (lambda: fit(steps=None), "steps= or epochs=", "give one of them"),
    "fit: two lengths": (lambda: fit(epochs=1), "steps= or epochs=", "leave one out"),
    "fit: epochs in words": (lambda: fit(steps=None, epochs="a"), "'a'", "such as 5"),
    "fit: steps in words": (lambda: fit(steps="a"), "'a'", "int"),
    "fit: without jit": (without_jit, "jax_disable_jit is on", "call step(state, batch)"),
    "fit: a size of 0": (lambda: fit(batch_size=0), "0", "global_batch_size"),
    "fit: a number as data": (lambda: fit(data=3), "3", "inputs"),
    "fit: no data": (lambda: fit(data={}), "", "inputs"),
    "fit: masked inputs": (lambda: fit(data=(MASKED, Y)), "data holds 'inputs' with masked", ".filled(0)"),
    "fit: masked targets": (
        lambda: fit(data={"inputs": X, "targets": np.ma.masked_equal(Y, 0)}),
        "data holds 'targets' with masked",
        "leave their rows out",
    ),
    "fit: masked weights of a row": (
        lambda: fit(data=[{"inputs": X[0], "targets": 0, "weights": np.ma.masked}] * 8),
        "row 0 of data holds 'weights' with masked",
        ".filled(0)",
    ),
    "fit: masked validation": (
        lambda: fit(validation={"inputs": {"a": MASKED}, "targets": Y}),
        "validation holds 'inputs'.a with masked",
        ".filled(0)",
    ),
    "fit: a batch with a mask": (lambda: fit(data=iter([(MASKED, Y)])), "batch 0 holds 'inputs' with", ".filled(0)"),
    "fit: lengths that differ": (lambda: fit(data=(X, Y[:3])), "3", "one length"),
    "fit: validation in percent": (lambda: fit(validation=20), "20", "{'inputs': x"),
    "fit: a number as mesh": (lambda: fit(mesh=8), "8", "make_mesh("),
    "fit: an unknown policy": (lambda: fit(policy="bf17"), "'bf17'", "bf16"),
    "fit: an unknown resume": (lambda: fit(resume="yes"), "yes", "auto"),
    "fit: a function as callback": (lambda: fit(callbacks=[print]), "function print", "Callback("),
    "fit: an unknown key": (lambda: fit(evaluation={"evry": 1}), "evaluation.evry", "evaluation.every"),
    "fit: a number as group": (lambda: fit(logging=3), "3", "{'every': 100}"),
    "from_equinox: a number": (lambda: jt.from_equinox(3), "int", "from_equinox(lambda key: "),
    "from_equinox: no module": (lambda: jt.from_equinox(lambda key: {"w": 1}), "dict", "from_equinox(lambda key: "),
    "from_models: a list": (lambda: jt.from_models([given.model()]), "a list of 1", "{'student': small"),
    "from_models: empty": (lambda: jt.from_models({}), "an empty dict", "{'student': small"),
    "from_models: a module": (lambda: jt.from_models({"a": Net}), "the class Net", "from_nnx"),
    "from_models: a path as name": (lambda: jt.from_models({"a/b": given.model()}), "'a/b'", "such as 'student'"),
    "lookahead: not called": (lambda: jt.lookahead(optax.adamw), "function", "lookahead(optax.adamw(1e-3))"),
    "lookahead: no period": (lambda: jt.lookahead(OPTIMIZER, sync_period=0), "=0", "such as 6"),
    "lookahead: a step of 2": (lambda: jt.lookahead(OPTIMIZER, slow_step_size=2), "=2", "at most 1"),
    "parameter_groups: not called": (
        lambda: jt.parameter_groups(optax.adamw, {"head/*": OPTIMIZER}),
        "function",
        "parameter_groups(optax.adamw(1e-3), {'head/*': optax.sgd(1e-2)})",
    ),
    "parameter_groups: a group not called": (
        lambda: jt.parameter_groups(OPTIMIZER, {"head/*": optax.sgd}),
        "groups['head/*'] takes an optax transformation, not the function",
        "parameter_groups(optax.adamw(1e-3)",
    ),
    "parameter_groups: a list": (lambda: jt.parameter_groups(OPTIMIZER, []), "an empty list", "parameter_groups(optax"),
    "parameter_groups: none": (lambda: jt.parameter_groups(OPTIMIZER, {}), "an empty dict", "parameter_groups(optax"),
    "open_run: a number": (lambda: jt.open_run(3), "int", "open_run('runs/x')"),
    "open_run: no run": (lambda: jt.open_run("runs/none"), "runs/none", "run"),
    "open_run: a result": (lambda: jt.open_run(types.SimpleNamespace()), "SimpleNamespace", "open_run('runs/x')"),
}
