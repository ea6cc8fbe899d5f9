"""Runs on pairs compare with what they started from, whatever happens to the run."""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt

L, V = 6, 11


def pairs(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, V, (rows, 2, L + 1)).astype(np.int32)
    weights = np.ones((rows, 2, L), np.float32)
    weights[..., :2] = 0
    return {"inputs": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}


DATA, HELD_OUT = pairs(12), pairs(5, seed=1)


def bigrams() -> jt.Model:
    """Logits of the next token from a table, which compiles at once."""
    return jt.from_functions(
        lambda key: {"table": jax.random.normal(key, (V, V))}, lambda params, x: params["table"][x], name="bigrams"
    )


def fit(folder, *, steps=4, task=None, devices=1, data=DATA, **more):
    mesh = jt.make_mesh(data=devices, devices=jax.devices()[:devices])
    options = {"validation": HELD_OUT, "logging": {"report": False}, "checkpoint": {"every": 2}, **more}
    return jt.fit(
        bigrams(),
        task or jt.dpo(),
        optax.adam(0.1),
        data=data,
        steps=steps,
        batch_size=4,
        mesh=mesh,
        run_dir=folder,
        **options,
    )


def table(result) -> np.ndarray:
    return np.asarray(result.state.params["table"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, fit(folder)


@pytest.fixture
def half(whole, tmp_path):
    """The same after two steps."""
    folder = tmp_path / "half"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoints" / "4")
    return folder


def losses(folder) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def first_table(folder) -> np.ndarray:
    """What a run started from, as its checkpoints keep it."""
    run = jt.open_run(folder, model=bigrams(), task=jt.dpo())
    assert run.state.reference is not None
    return np.asarray(run.state.reference.params["table"])


def log_probabilities(table, data) -> np.ndarray:
    logs = np.asarray(jax.nn.log_softmax(table))[data["inputs"], data["targets"]]
    return np.sum(logs * data["weights"], axis=-1)


def test_a_run_and_its_evaluation_compare_with_the_start(whole):
    folder, result = whole
    assert losses(folder)[0] == np.float32(np.log(2))
    start = bigrams().init(jax.random.split(jax.random.key(0))[0])[0]["table"]
    np.testing.assert_array_equal(first_table(folder), start)
    run = jt.open_run(folder, model=bigrams(), task=jt.dpo())
    # Rows that the run has not seen need nothing besides.
    other = pairs(3, seed=7)
    rewards = 0.1 * (log_probabilities(table(result), other) - log_probabilities(start, other))
    found = run.evaluate(jt.ArrayRows(other))
    assert found["eval_margin"] == pytest.approx(np.mean(rewards[:, 0] - rewards[:, 1]), rel=1e-5)
    found = run.evaluate(jt.ArrayRows(HELD_OUT))
    assert found["eval_loss"] == pytest.approx(result.metrics["eval_loss"])
    # A row of the model is one answer of a pair, and two rows have the shape of one pair.
    np.testing.assert_array_equal(run.predict(DATA["inputs"][:2, 0]), table(result)[DATA["inputs"][:2, 0]])


def test_a_resumed_run_equals_the_whole_one_bit_for_bit(whole, half):
    result = fit(half)
    np.testing.assert_array_equal(table(result), table(whole[1]))
    np.testing.assert_array_equal(first_table(half), first_table(whole[0]))


def test_a_run_resumes_on_another_mesh(whole, half):
    result = fit(half, devices=2)
    np.testing.assert_allclose(table(result), table(whole[1]), rtol=1e-5)  # the order of sums
    np.testing.assert_array_equal(first_table(half), first_table(whole[0]))


def test_a_start_from_a_trained_run_compares_with_that(whole, tmp_path):
    result = fit(tmp_path / "run", steps=1, params=whole[0])
    assert losses(tmp_path / "run")[0] == np.float32(np.log(2))
    np.testing.assert_array_equal(first_table(tmp_path / "run"), table(whole[1]))
    assert not np.array_equal(table(result), table(whole[1]))


def ipo(apply, batch, key):
    ratios = jt.answer_log_probabilities(apply, batch) - jt.answer_log_probabilities(apply.reference, batch)
    return jnp.square(ratios[:, 0] - ratios[:, 1] - 5.0), {}


@pytest.mark.long
def test_a_loss_of_ones_own_may_compare_with_the_start(tmp_path):
    result = fit(tmp_path / "run", task=jt.Task.calling("ipo", ipo, reference=True))
    assert losses(tmp_path / "run")[0] == 25
    assert result.metrics["eval_loss"] != 25


CONFIG = {
    "task": "dpo",
    "model": {"kind": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "max_sequence_length": 40},
    "data": {
        "kind": "chat",
        "path": "pairs.jsonl",
        "validation_fraction": 0.0,
        "template": "plain",
        "packing": False,
        "tokenizer": {"kind": "byte"},
    },
    "optimizer": {"kind": "adamw", "learning_rate": 0.01, "schedule": {"kind": "constant", "warmup_steps": 0}},
    "train": {"steps": 4, "global_batch_size": 4},
    "checkpoint": {"every": 2},
    "logging": {"every": 1, "report": False, "tensorboard": False},
}


@pytest.mark.long
def test_a_run_of_a_config_is_evaluated_as_it_was_in_training(tmp_path):
    pairs = [{"prompt": f"{i}?", "chosen": f"It is {i}.", "rejected": f"No {i + 1}."} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {**CONFIG["data"], "path": str(tmp_path / "pairs.jsonl"), "validation_fraction": 0.5}
    more = {"data": data, "train": {"steps": 4, "global_batch_size": 8}, "precision": {"policy": "bf16"}}
    result = jt.run_config({**CONFIG, **more}, run_dir=tmp_path / "run")
    assert abs(result.metrics["eval_loss"] - np.log(2)) > 1e-6
    found = jt.open_run(tmp_path / "run").evaluate()
    assert found["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)


ONE = ("train", "dpo.json", "--emulate", "2")
TWO = ("launch", "--processes", "2", "--emulate", "1", "--", "train", "dpo.json")


@pytest.mark.long
def test_two_processes_train_as_one_and_go_on(tmp_path):
    """Sums over devices are in another order between processes: losses agree to rounding."""
    pairs = [{"prompt": f"{i}?", "chosen": f"It is {i}.", "rejected": f"No {i + 1}."} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "dpo.json").write_text(json.dumps(CONFIG))

    def train(words, folder, *overrides):
        command = [sys.executable, "-m", "jaxtrain", *words, "--run-dir", folder, "parallel.fsdp=2", *overrides]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        rows = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    wanted = train(ONE, "one")
    first = train(TWO, "two", "train.steps=2")
    found = train(TWO, "two")
    assert first[0] == np.float32(np.log(2))
    assert found[:2] == first
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
