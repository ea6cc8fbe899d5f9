"""Runs on pairs: what they compare with is computed once, kept, and found again, whatever happens to the run."""

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


def test_the_first_loss_is_ln_2_and_the_file_is_by_row(whole):
    folder, result = whole
    assert abs(losses(folder)[0] - np.log(2)) < 1e-6
    with np.load(folder / "reference.npz") as kept:
        train, validation = kept["train"], kept["validation"]
    start = bigrams().init(jax.random.split(jax.random.key(0))[0])[0]["table"]
    logs = jax.nn.log_softmax(start)
    for data, values in ((DATA, train), (HELD_OUT, validation)):
        wanted = np.sum(np.asarray(logs)[data["inputs"], data["targets"]] * data["weights"], axis=-1)
        np.testing.assert_allclose(values, wanted, rtol=1e-5)
    rows = jt.ArrayRows({**HELD_OUT, "reference": validation})
    found = jt.open_run(folder, model=bigrams(), task=jt.dpo()).evaluate(rows)["eval_loss"]
    assert found == pytest.approx(result.metrics["eval_loss"])
    # A row of the model is one answer of a pair, and two rows have the shape of one pair.
    run = jt.open_run(folder, model=bigrams(), task=jt.dpo())
    np.testing.assert_array_equal(run.predict(DATA["inputs"][:2, 0]), table(result)[DATA["inputs"][:2, 0]])


def test_a_resumed_run_reads_the_file_and_equals_the_whole_one_bit_for_bit(whole, half):
    kept = (half / "reference.npz").read_bytes()
    result = fit(half)
    assert (half / "reference.npz").read_bytes() == kept
    np.testing.assert_array_equal(table(result), table(whole[1]))


def test_a_lost_or_damaged_file_is_one_line(half):
    path = half / "reference.npz"
    with np.load(path) as kept:
        arrays = dict(kept)
    arrays["train"][3, 1] += 1
    np.savez(path, **arrays)
    for damage in (lambda: None, lambda: path.write_bytes(path.read_bytes()[:100]), path.unlink):
        damage()
        with pytest.raises(
            jt.CheckpointError, match="is missing, damaged or of another run; put the file of this run back"
        ):
            fit(half)


def test_other_rows_need_a_reference_of_their_own(whole):
    run = jt.open_run(whole[0], model=bigrams(), task=jt.dpo())
    with pytest.raises(jt.DataError, match="give rows with an entry 'reference'"):
        run.evaluate(jt.ArrayRows(pairs(3, seed=7)))
    own = {**pairs(3, seed=7), "reference": np.full((3, 2), -9.0, np.float32)}
    assert np.isfinite(run.evaluate(jt.ArrayRows(own))["eval_loss"])


def ipo(apply, batch, key):
    ratios = jt.answer_log_probabilities(apply, batch) - batch["reference"]
    return jnp.square(ratios[:, 0] - ratios[:, 1] - 5.0), {}


@pytest.mark.long
def test_a_loss_of_ones_own_may_ask_for_a_reference(tmp_path):
    task = jt.Task.calling("ipo", ipo, reference=jt.answer_log_probabilities)
    fit(tmp_path / "run", task=task, steps=1)
    assert losses(tmp_path / "run")[0] == pytest.approx(25, rel=1e-6)


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
def test_the_runs_own_held_out_rows_are_evaluated_with_the_numbers_that_it_kept(tmp_path):
    pairs = [{"prompt": f"{i}?", "chosen": f"It is {i}.", "rejected": f"No {i + 1}."} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {**CONFIG["data"], "path": str(tmp_path / "pairs.jsonl"), "validation_fraction": 0.5}
    more = {"data": data, "train": {"steps": 4, "global_batch_size": 8}}
    result = jt.run_config({**CONFIG, **more}, run_dir=tmp_path / "run")
    assert abs(result.metrics["eval_loss"] - np.log(2)) > 1e-6
    found = jt.open_run(tmp_path / "run").evaluate()
    assert found["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)
    (tmp_path / "run" / "reference.npz").write_bytes(b"of another run")
    with pytest.raises(jt.CheckpointError, match="is missing, damaged or of another run"):
        jt.open_run(tmp_path / "run").evaluate()


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
    kept = (tmp_path / "two" / "reference.npz").read_bytes()
    found = train(TWO, "two")
    assert abs(first[0] - np.log(2)) < 1e-6
    assert found[:2] == first
    assert (tmp_path / "two" / "reference.npz").read_bytes() == kept
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
