"""Wrong inputs of what makes models, tasks and optimizers: (call, what was given, how to write it)."""

import dataclasses
import math

import given
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from given import LinenNet, Net, X, Y, apply, init, loss

import jaxtrain as jt

MLP = {"kind": "mlp"}
STAGES = {"embed": print, "block": print, "head": print}
TABLE, IDS = jnp.ones((4, 2)), jnp.zeros((1, 3), jnp.int32)
LOGITS = jnp.ones((2, 3, 4))


def stack(rngs):
    module = nnx.Module()
    module.blocks = jt.make_stack(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 2, rngs)
    return module


def parts(**more):
    return jt.Parts(**{"stack": "blocks", "num_layers": 2, "embed": print, "layers": print, "head": print, **more})


def adapted():
    return jt.adapt(given.text_model(), lora=jt.LoraConfig(rank=2))


def built(config=MLP, **more):
    return jt.build_model(config, **{"input_shape": (4,), "num_outputs": 3, **more})


ROWS = {
    "DeferredLogits: words": (lambda: jt.DeferredLogits("a", "b"), "'a'", "DeferredLogits(hidden, kernel"),
    "DeferredLogits: shapes": (
        lambda: jt.DeferredLogits(jnp.ones((1, 2, 3)), jnp.ones((4, 5))),
        "[4, 5]",
        "tied=True",
    ),
    "DeferredLogits: a bias of another size": (
        lambda: jt.DeferredLogits(jnp.ones((1, 2, 3)), jnp.ones((3, 5)), bias=jnp.ones(3)),
        "[3]",
        "bias [V]",
    ),
    "DeferredLogits: a bias that is a word": (
        lambda: jt.DeferredLogits(jnp.ones((1, 2, 3)), jnp.ones((3, 5)), bias="yes"),
        "'yes'",
        "bias [V]",
    ),
    "DeferredLogits: no cap": (
        lambda: jt.DeferredLogits(jnp.ones((1, 2, 3)), jnp.ones((3, 5)), softcap=0),
        "not 0",
        "softcap=30.0",
    ),
    "DrawsByRow: a number": (lambda: jt.DrawsByRow(3), "not 3", "DrawsByRow("),
    "LogitsLoss: a number": (lambda: jt.LogitsLoss(3, loss), "not 3", "LogitsLoss(train, evaluate)"),
    "LogitsLoss: evaluation": (lambda: jt.LogitsLoss(loss, None), "not None", "LogitsLoss(train, evaluate)"),
    "Model: no functions": (lambda: jt.Model("mine", None, apply), "not None", "from_functions"),
    "Model: swapped": (lambda: jt.Model(init, "mine", apply), "the function init", "Model('mine', init, apply)"),
    "Model: a list of axes": (
        lambda: jt.Model("mine", init, apply, axes=["embed"]),
        "a list of 1",
        "{'layer/kernel': ('embed', 'mlp')}",
    ),
    "Model: a row that is a word": (
        lambda: jt.Model("mine", init, apply, axes={"w": "embed"}),
        "'embed'",
        "('embed',",
    ),
    "Parts: a number as stack": (lambda: parts(stack=3), "not 3", "stack='blocks'"),
    "Parts: no layers": (lambda: parts(num_layers=0), "not 0", "num_layers="),
    "Parts: no function": (lambda: parts(embed=None), "not None", "embed(params, inputs"),
    "Remat: an unknown policy": (lambda: jt.Remat("ful"), "'ful'", "known: none, full"),
    "Remat: a number": (lambda: jt.Remat(3), "3", "known: none, full"),
    "Remat: one name": (lambda: jt.Remat("names", "query"), "'query'", "('query',)"),
    "Remat: an unknown name": (lambda: jt.Remat("names", ("qury",)), "'qury'", "known: query"),
    "Task: swapped": (lambda: jt.Task(loss, "mine"), "the function loss", "Task('name', loss)"),
    "Task: no loss": (lambda: jt.Task("mine", None), "None", "Task('name', loss)"),
    "Task: a list of axes": (
        lambda: jt.Task("mine", loss, batch_axes=["batch"]),
        "a list of 1",
        "batch_axes={'inputs': ('batch', 'sequence')}",
    ),
    "Task: a number of classes": (lambda: jt.Task("mine", loss, num_classes=10), "not 10", "lambda outputs"),
    "build_model: a word": (lambda: built("mlp"), "not 'mlp'", "{'kind': 'mlp'}"),
    "build_model: no kind": (lambda: built({}), "an empty dict", "{'kind': 'mlp'}"),
    "build_model: an unknown kind": (lambda: built({"kind": "mpl"}), "'mpl'", "did you mean 'mlp'"),
    "build_model: an unknown key": (lambda: built({**MLP, "width": 3}), "unknown key 'model.width'", "model."),
    "build_model: a number as shape": (lambda: built(input_shape=4), "not 4", "input_shape=(4,)"),
    "build_model: a shape of words": (lambda: built(input_shape=("a",)), "'a'", "input_shape=data.input_shape"),
    "build_model: outputs in words": (lambda: built(num_outputs="3"), "not '3'", "num_outputs="),
    "build_model: no outputs": (lambda: built(num_outputs=None), "", "model.num_outputs"),
    "build_model: a policy by name": (
        lambda: built({"kind": "resnet"}, input_shape=(8, 8, 3), remat="full"),
        "not 'full'",
        "Remat('full')",
    ),
    "count_parameters: parameters": (lambda: jt.count_parameters({"w": X}), "a dict of 'w'", "step.model"),
    "count_parameters: a module": (lambda: jt.count_parameters(Net(nnx.Rngs(0))), "a Net", "from_nnx"),
    "cross_entropy: a list": (lambda: jt.cross_entropy([1.0], Y), "a list of 1", "cross_entropy(logits, targets)"),
    "cross_entropy: swapped": (lambda: jt.cross_entropy(IDS, LOGITS), "int32[1, 3]", "cross_entropy(logits, targets)"),
    "cross_entropy: shapes": (lambda: jt.cross_entropy(LOGITS, IDS), "int32[1, 3]", "[2, 3]"),
    "cross_entropy_sums: shapes": (
        lambda: jt.cross_entropy_sums(LOGITS, IDS, jnp.ones((2, 3))),
        "int32[1, 3]",
        "[2, 3]",
    ),
    "cross_entropy_sums: weights": (
        lambda: jt.cross_entropy_sums(LOGITS, jnp.zeros((2, 3), jnp.int32), None),
        "None",
        "target_weights(batch)",
    ),
    "cross_entropy_sums: weights of another shape": (
        lambda: jt.cross_entropy_sums(LOGITS, jnp.zeros((2, 3), jnp.int32), jnp.ones(3)),
        "float32[3]",
        "of the shape of the targets, [2, 3]",
    ),
    "cross_entropy: unknown blocks": (lambda: jt.cross_entropy(LOGITS, IDS, by="vocab"), "vocab", "use auto, whole"),
    "cross_entropy: a block of -1": (lambda: jt.cross_entropy(LOGITS, IDS, by="tokens", size=-1), "-1", "at least 1"),
    "cross_entropy_sums: a z-loss of words": (
        lambda: jt.cross_entropy_sums(LOGITS, jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3)), z_loss="a"),
        "'a'",
        "z_loss=1e-4",
    ),
    "dropout: a rate above 1": (lambda: jt.dropout(X, 1.5, jax.random.key(0)), "not 1.5", "dropout(x, 0.1, key)"),
    "dropout: swapped": (lambda: jt.dropout(X, jax.random.key(0), 0.1), "an array key", "dropout(x, 0.1, key)"),
    "dropout: a seed": (lambda: jt.dropout(X, 0.1, 0), "not 0", "jax.random.key(0)"),
    "elementwise: not called": (lambda: jt.elementwise(optax.adamw), "the function adamw", "optax.adamw(1e-3)"),
    "elementwise: a number": (lambda: jt.elementwise(1e-3), "0.001", "optax.adamw(0.001)"),
    "embedding_lookup: swapped": (
        lambda: jt.embedding_lookup(IDS, TABLE, rows=None),
        "int32[1, 3]",
        "embedding_lookup(table, ids",
    ),
    "embedding_lookup: a table of 3 dims": (
        lambda: jt.embedding_lookup(LOGITS, IDS, rows=None),
        "float32[2, 3, 4]",
        "[V, D]",
    ),
    "embedding_lookup: a list": (lambda: jt.embedding_lookup(TABLE, [1, 2], rows=None), "a list of 2", "[B, L]"),
    "embedding_lookup: a number as rows": (lambda: jt.embedding_lookup(TABLE, IDS, rows=3), "not 3", "rows='vocab'"),
    "from_functions: arrays": (lambda: jt.from_functions({"w": X}, apply), "dict", "init(key) -> params"),
    "from_functions: no apply": (lambda: jt.from_functions(init), "neither", "from_functions(init, apply)"),
    "from_functions: a list of axes": (lambda: jt.from_functions(init, apply, axes=[1]), "a list of 1", "axes"),
    "from_functions: a number as name": (lambda: jt.from_functions(init, apply, name=3), "3", "name"),
    "from_functions: words as parts": (lambda: jt.from_functions(init, parts="x"), "not 'x'", "Parts("),
    "from_linen: a class": (lambda: jt.from_linen(LinenNet, X), "the class LinenNet", "from_linen(LinenNet(), "),
    "from_linen: an NNX module": (lambda: jt.from_linen(Net(nnx.Rngs(0)), X), "Net", "from_nnx"),
    "from_linen: swapped": (lambda: jt.from_linen(X, LinenNet()), "ndarray", "from_linen("),
    "from_linen: inputs in words": (lambda: jt.from_linen(LinenNet(), "x"), "'x'", "np.zeros("),
    "from_linen: a shape for inputs": (lambda: jt.from_linen(LinenNet(), (8, 4)), "8", "np.zeros("),
    "from_linen: a list of axes": (lambda: jt.from_linen(LinenNet(), X, axes=[1]), "a list of 1", "axes"),
    "from_nnx: a Linen module": (lambda: jt.from_nnx(LinenNet()), "LinenNet", "from_linen"),
    "from_nnx: a function that gives no module": (lambda: jt.from_nnx(lambda rngs: {"w": 1}), "dict", "nnx.Module"),
    "from_nnx: a list of axes": (lambda: jt.from_nnx(Net, axes=[1]), "a list of 1", "axes"),
    "from_nnx: a word as call": (lambda: jt.from_nnx(Net, call="x"), "not 'x'", "lambda module, inputs, key, train"),
    "from_nnx: one path": (lambda: jt.from_nnx(Net, gathers_itself="linear"), "'linear'", "('linear',)"),
    "from_stages: a module": (
        lambda: jt.from_stages(Net(nnx.Rngs(0)), stack="blocks", **STAGES),
        "Net",
        "rngs -> module",
    ),
    "from_stages: no stack of that name": (
        lambda: jt.from_stages(Net, stack="layers", **STAGES),
        "'layers'",
        "make_stack",
    ),
    "from_stages: a number as stack": (lambda: jt.from_stages(Net, stack=3, **STAGES), "not 3", "stack='blocks'"),
    "from_stages: a word as block": (
        lambda: jt.from_stages(stack, stack="blocks", **{**STAGES, "block": "x"}),
        "not 'x'",
        "(block, carry, inputs, key, train)",
    ),
    "from_stages: a policy by name": (
        lambda: jt.from_stages(stack, stack="blocks", remat="full", **STAGES),
        "not 'full'",
        "Remat('full')",
    ),
    "get_policy: unknown": (lambda: jt.get_policy("bf8"), "'bf8'", "known: fp32"),
    "get_policy: a number": (lambda: jt.get_policy(16), "16", "known: fp32"),
    "get_policy: a dtype": (lambda: jt.get_policy(jnp.bfloat16), "bfloat16", "known: fp32"),
    "Policy: a word as dtype": (lambda: jt.Policy("mine", "real", jnp.float32, None), "'real'", "jnp.bfloat16"),
    "Policy: integers": (lambda: jt.Policy("mine", jnp.int32, jnp.float32, None), "int32", "jnp.bfloat16"),
    "Policy: precision": (lambda: jt.Policy("mine", jnp.float32, jnp.float32, "hi"), "'hi'", "highest"),
    "Policy: 8 bits": (
        lambda: jt.Policy("mine", jnp.float8_e4m3fn, jnp.float32, None),
        "float8_e4m3fn",
        "16 to 32 bits",
    ),
    "Policy: 64 bits": (lambda: jt.Policy("mine", jnp.float64, jnp.float32, None), "float64", "16 to 32 bits"),
    "Policy: linear format": (
        lambda: jt.Policy("mine", jnp.float32, jnp.bfloat16, None, linear_format="FP8"),
        "linear_format takes fp8",
        "not 'FP8'; write linear_format='fp8'",
    ),
    "Policy: fp8 in fp16": (
        lambda: jt.Policy("mine", jnp.float32, jnp.float16, None, True, "fp8"),
        "takes compute_dtype bfloat16 or float32",
        "write compute_dtype=jnp.bfloat16",
    ),
    "LossScaling: out of range": (lambda: jt.LossScaling(initial=0), "initial=0", "0 < minimum"),
    "LossScaling: infinite": (
        lambda: jt.LossScaling(initial=math.inf, maximum=math.inf),
        "initial=inf",
        "all finite",
    ),
    "Policy: a word as switch": (
        lambda: jt.Policy("mine", jnp.float32, jnp.float16, None, loss_scaled="yes"),
        "'yes'",
        "loss_scaled=True",
    ),
    "LossScaling: words": (lambda: jt.LossScaling(initial="a"), "'a'", "LossScaling(initial=32768)"),
    "SpikeRule: window": (lambda: jt.SpikeRule(window=2), "2", "SpikeRule(window=128)"),
    "SpikeRule: sigmas": (lambda: jt.SpikeRule(sigmas=0), "not 0", "SpikeRule(sigmas=6.0)"),
    "SpikeRule: watch": (lambda: jt.SpikeRule(watch="all"), "'all'", "watch='both'"),
    "LossScaling: half a step": (lambda: jt.LossScaling(growth_interval=0.5), "0.5", "growth_interval=2000"),
    "language_modeling: a z-loss below 0": (lambda: jt.language_modeling(z_loss=-1.0), "not -1.0", "z_loss=1e-4"),
    "language_modeling: a z-loss of words": (lambda: jt.language_modeling(z_loss="a"), "'a'", "z_loss=1e-4"),
    "language_modeling: unknown blocks": (lambda: jt.language_modeling(logits="vocab"), "vocab", "use auto, whole"),
    "language_modeling: a block of 0": (
        lambda: jt.language_modeling(logits="tokens", block=0),
        "loss.block=0",
        "at least 1",
    ),
    "masked_language_modeling: a z-loss of words": (
        lambda: jt.masked_language_modeling(z_loss="a"),
        "'a'",
        "z_loss=1e-4",
    ),
    "sequence_to_sequence: unknown blocks": (
        lambda: jt.sequence_to_sequence(logits="vocab"),
        "vocab",
        "use auto, whole",
    ),
    "make_stack: a module": (
        lambda: jt.make_stack(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 2, nnx.Rngs(0)),
        "Linear",
        "rngs -> module",
    ),
    "make_stack: no layers": (
        lambda: jt.make_stack(Net, 0, nnx.Rngs(0)),
        "not 0",
        "make_stack(make, 12, rngs)",
    ),
    "make_stack: a seed": (lambda: jt.make_stack(Net, 2, 0), "not 0", "nnx.Rngs(0)"),
    "adapt: no model": (lambda: jt.adapt(Net, lora=jt.LoraConfig()), "the class Net", "from_nnx"),
    "adapt: a dict of settings": (lambda: jt.adapt(given.text_model(), lora={"rank": 2}), "a dict", "LoraConfig(rank="),
    "adapt: nothing to do": (lambda: jt.adapt(given.text_model()), "lora=, base= or both", "lora=jt.LoraConfig"),
    "adapt: an unknown format": (
        lambda: jt.adapt(given.text_model(), lora=jt.LoraConfig(rank=2), base="int3"),
        "'int3'",
        "base='int8'",
    ),
    "adapt: an unknown target": (
        lambda: jt.adapt(given.text_model(), lora=jt.LoraConfig(rank=2, targets=("qeury",))),
        "'qeury'",
        "there are query",
    ),
    "adapt: a rank above a dim": (
        lambda: jt.adapt(given.text_model(), lora=jt.LoraConfig(rank=1000)),
        "lora.rank=1000",
        "or less",
    ),
    "adapt: twice": (
        lambda: jt.adapt(adapted(), lora=jt.LoraConfig(rank=2)),
        "is adapted already",
        "adapt the model that it was made of",
    ),
    "LoraConfig: rank": (lambda: jt.LoraConfig(rank=0), "rank=0", "greater than 0"),
    "LoraConfig: an unknown key": (lambda: jt.LoraConfig(r=8), "'r'", "it takes rank"),
    "LoraConfig: targets": (lambda: jt.LoraConfig(targets=()), "targets", "at least 1"),
    "adapt: a part of a model": (
        lambda: jt.from_models({"student": adapted()}),
        "'student' is adapted already",
        "adapt the whole",
    ),
    "merge_adapters: a model without adapters": (
        lambda: jt.merge_adapters({"w": X}, given.text_model()),
        "has no adapters",
        "jt.adapt(model, lora=",
    ),
    "merge_adapters: other parameters": (
        lambda: jt.merge_adapters({"w": X}, adapted()),
        "a dict",
        "merge_adapters(state.params, step.model)",
    ),
    "quantize: an unknown format": (lambda: jt.quantize({}, given.text_model(), "int3"), "'int3'", "known: int8"),
    "quantize: swapped": (
        lambda: jt.quantize(given.text_model(), {}),
        "an empty dict",
        "quantize(state.params, step.model)",
    ),
    "quantize: other parameters": (
        lambda: jt.quantize({"w": X}, given.text_model()),
        "no blocks/",
        "give state.params",
    ),
    "quantize: no linear layers": (lambda: jt.quantize({"w": X}, given.model()), "functions", "linear layers"),
    "target_weights: no targets": (lambda: jt.target_weights({"inputs": X}), "inputs", "'targets'"),
    "target_weights: an array": (lambda: jt.target_weights(Y), "an array int32[8]", "{'inputs': "),
    "target_weights: a list": (lambda: jt.target_weights({"targets": [1, 2]}), "a list of 2", "array"),
    "target_weights: other weights": (
        lambda: jt.target_weights({"targets": Y, "weights": X}),
        "weights [8, 4]",
        "one weight per target",
    ),
    "EvaluationState: swapped with a state": (
        lambda: jt.EvaluationState(given.state(), {}),
        "a TrainState",
        "state.params",
    ),
    "ShardedModel.apply: no parameters": (
        lambda: jt.shard_model(given.model()).apply(None, {}, X, key=None, train=False),
        "None",
        "sharded.apply(params",
    ),
    "TrainState: no dict of parameters": (
        lambda: given.step()(dataclasses.replace(given.state(), params=[np.ones(3)]), {"inputs": X, "targets": Y}),
        "params/w is missing",
        "does not fit",
    ),
}
