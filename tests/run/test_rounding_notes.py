"""What a run says of norm scales in bf16 that its learning rate cannot move."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.run.banner import banner_lines
from jaxtrain.run.own_parts import own_parts
from jaxtrain.run.rounding_notes import rounding_notes
from jaxtrain.train.assemble import assemble, open_run_data

SIZES = ("model.num_layers=1", "model.embed_dim=16", "model.num_heads=2", "model.mlp_dim=32")
DATA = ("data.kind=synthetic", "data.task=tokens", "data.vocab_size=32", "data.sequence_length=8", "data.num_rows=16")
OWN = own_parts(model=None, task=None, data=None)
TINY = dict(kind="transformer", num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32, max_sequence_length=8)


def assembled(*words):
    overrides = ["model.kind=transformer", *SIZES, *DATA, "train.global_batch_size=8", *words]
    loaded = load_config({}, overrides=overrides)
    return loaded, assemble(loaded.config, open_run_data(loaded.config), name="run")


SAID = {
    "AdamW": (("optimizer.kind=adamw", "optimizer.learning_rate=3e-4"), "learning rate 0.0003"),
    "Lion": (("optimizer.kind=lion", "optimizer.learning_rate=1e-4"), "learning rate 0.0001"),
    "AdamW of Muon": (("optimizer.kind=muon", "optimizer.learning_rate=1e-3"), "learning rate 0.001"),
    "the last that is lost": (("optimizer.kind=adamw", f"optimizer.learning_rate={2.0**-9}"), "0.00195312"),
    "a group of small steps": (
        (
            *("optimizer.kind=adamw", "optimizer.learning_rate=4e-3"),
            "optimizer.groups=[{match: ['*/scale'], learning_rate_factor: 0.1}]",
        ),
        "learning rate 0.0004",
    ),
    "large steps": (("optimizer.kind=adamw", "optimizer.learning_rate=2e-3"), None),
    "a group of large steps": (
        (
            *("optimizer.kind=adamw", "optimizer.learning_rate=1e-3"),
            "optimizer.groups=[{match: ['*/scale'], learning_rate_factor: 10}]",
        ),
        None,
    ),
    "steps of any length": (("optimizer.kind=sgd", "optimizer.learning_rate=1e-3"), None),
    "frozen scales": (
        ("optimizer.kind=adamw", "optimizer.learning_rate=1e-4", "optimizer.freeze=['*/scale']"),
        None,
    ),
    "scales around 0": (("optimizer.kind=adamw", "optimizer.learning_rate=1e-4", "model.norm_offset=true"), None),
    "parameters in fp32": (
        ("optimizer.kind=adamw", "optimizer.learning_rate=1e-4", "precision.policy=bf16"),
        None,
    ),
}


@pytest.mark.parametrize(("words", "said"), SAID.values(), ids=SAID)
def test_scales_that_cannot_move_are_one_line(words, said):
    loaded, run = assembled("precision.policy=bf16_pure", *words)
    lines = rounding_notes(run, OWN)
    assert len(lines) == (said is not None)
    if said is not None:
        assert said in lines[0]
        assert "norm scales near 1 will not move" in lines[0]
        assert "precision.policy=bf16 keeps" in lines[0]
        assert lines[0] in banner_lines(loaded, run, Path("run"), [], own=OWN, units_per_step=8)


OWN_RATES = {"low": (1e-3, True), "high": (1e-2, False), "not shown": (None, True)}


@pytest.mark.parametrize(("rate", "said"), OWN_RATES.values(), ids=OWN_RATES)
def test_an_optimizer_from_python_is_judged_by_the_rate_it_shows(rate, said):
    model, task = jt.build_model(TINY, input_shape=(8,), vocab_size=32), jt.language_modeling()
    step = jt.make_train_step(model, task, optax.sgd(1e-3), learning_rate=rate, policy="bf16_pure")
    _, run = assembled("precision.policy=bf16_pure")
    lines = rounding_notes(dataclasses.replace(run, step=step), OWN | {"optimizer": "mine"})
    assert len(lines) == said
    assert all("changes norm scales near 1 by less than 2e-3" in line for line in lines)


def test_steps_of_the_bound_are_rounded_away():
    assert jnp.bfloat16(1.0 - 2.0**-9) == jnp.bfloat16(1.0 + 2.0**-9) == 1
    assert jnp.bfloat16(1.0 - 2.0**-9 - 1e-6) < 1
