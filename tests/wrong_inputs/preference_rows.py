"""Wrong inputs of tasks on pairs of answers."""

import functools

import given
import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt

L = 8
TOKENS = np.zeros((4, 2, L), np.int32)
PAIRS = {"inputs": TOKENS, "targets": TOKENS, "weights": np.ones((4, 2, L), np.float32)}


@functools.cache
def step() -> jt.TrainStep:
    return jt.make_train_step(given.text_model(), jt.dpo(), given.OPTIMIZER, mesh=given.one_device())


def lower(task: jt.Task, batch, model: jt.Model | None = None):
    model = model or given.text_model()
    return jt.make_train_step(model, task, given.OPTIMIZER, mesh=given.one_device()).lower(batch)


def embedded() -> jt.Model:
    """A model that gives numbers per text, and no logits."""
    return jt.from_functions(lambda key: {"w": jnp.ones(3)}, lambda params, x: jax.nn.one_hot(x[:, 0], 3) @ params["w"])


def called(batch):
    return lower(
        jt.Task.calling("mine", lambda apply, batch, key: (jt.answer_log_probabilities(apply, batch), {})), batch
    )


def with_reference(reference):
    return lower(jt.Task.calling("mine", lambda apply, batch, key: 1.0, reference=reference), PAIRS)


ROWS = {
    "dpo: a beta of 0": (lambda: jt.dpo(0.0), "loss.beta=0", "above 0, such as 0.1"),
    "dpo: a beta below 0": (lambda: jt.dpo(-0.1), "loss.beta=-0.1", "above 0, such as 0.1"),
    "dpo: a beta of words": (lambda: jt.dpo("a"), "'a'", "dpo(beta=0.1)"),
    "dpo: no beta": (lambda: jt.dpo(float("nan")), "nan", "dpo(beta=0.1)"),
    "dpo: half of the labels wrong": (lambda: jt.dpo(label_smoothing=0.5), "=0.5", "from 0 to below 0.5"),
    "dpo: a block without blocks": (lambda: jt.dpo(block=8), "loss.block=8", "tokens or vocabulary"),
    "dpo: no pairs": (
        lambda: lower(jt.dpo(), {"inputs": TOKENS[:, 0], "targets": TOKENS[:, 0]}),
        "int32[4, 8]",
        "the chosen answer first",
    ),
    "dpo: three answers": (
        lambda: lower(jt.dpo(), {"inputs": np.zeros((4, 3, L), np.int32), "targets": np.zeros((4, 3, L), np.int32)}),
        "int32[4, 3, 8]",
        "int32 [pairs, 2, L]",
    ),
    "dpo: no targets": (
        lambda: lower(jt.dpo(), {"inputs": TOKENS}),
        "has no 'targets' (it has inputs)",
        "data.kind=chat",
    ),
    "dpo: no reference": (lambda: lower(jt.dpo(), PAIRS), "reference of the batch is None", "jaxtrain.reference_rows("),
    "dpo: a reference of another shape": (
        lambda: lower(jt.dpo(), {**PAIRS, "reference": np.zeros(4, np.float32)}),
        "float32[4]",
        "float32 [4, 2]",
    ),
    "dpo: a model without vocabulary": (
        lambda: lower(jt.dpo(), {**PAIRS, "reference": np.zeros((4, 2), np.float32)}, embedded()),
        "float32[8]",
        "task=reward for scores",
    ),
    "reward: logits of a vocabulary": (
        lambda: lower(jt.reward(), PAIRS),
        "[8, 8, 256]",
        "model.head.num_labels=1",
    ),
    "reward: no pairs": (
        lambda: lower(jt.reward(), {"inputs": TOKENS[:, 0], "targets": TOKENS[:, 0]}),
        "int32[4, 8]",
        "the chosen answer first",
    ),
    "answer_log_probabilities: no model": (
        lambda: jt.answer_log_probabilities(3, PAIRS),
        "not 3",
        "Task.calling('name', loss)",
    ),
    "answer_log_probabilities: no pairs": (
        lambda: called({"inputs": TOKENS[0], "targets": TOKENS[0]}),
        "int32[2, 8]",
        "the chosen answer first",
    ),
    "reference_rows: no step": (lambda: jt.reference_rows(3, None, given.rows()), "not 3", "step.init(0)"),
    "reference_rows: no state": (lambda: jt.reference_rows(step(), None, given.rows()), "not None", "step.init(0)"),
    "reference_rows: a dict": (
        lambda: jt.reference_rows(step(), step().init(0), PAIRS),
        "a dict of inputs",
        "jaxtrain.ArrayRows({...})",
    ),
    "reference_rows: no rows at once": (
        lambda: jt.reference_rows(step(), step().init(0), jt.ArrayRows(PAIRS), batch_size=0),
        "not 0",
        "batch_size=32",
    ),
    "reference_rows: a task without": (
        lambda: jt.reference_rows(given.text_step(), given.text_step().init(0), jt.ArrayRows(PAIRS)),
        "language_modeling",
        "jaxtrain.dpo()",
    ),
    "Task.calling: a reference of words": (
        lambda: with_reference("start"),
        "'start'",
        "reference=jaxtrain.answer_log_probabilities",
    ),
}
