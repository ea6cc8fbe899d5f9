"""A run of one's own parts: every form of data, every mesh, a signal and a resume, and every wrong argument."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_runs import losses, rows

import jaxtrain as jt
from jaxtrain.data.sources.given import data_of, renamed
from jaxtrain.data.stream import BatchStream

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 8)).astype(np.float32)
Y = (X @ RNG.normal(size=(8, 8))).argmax(-1).astype(np.int32)
QUIET = {"every": 1, "tensorboard": False, "report": False}


def model() -> jt.Model:
    """Two layers, both divisible by 8 shards."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        return {"a": jax.random.normal(first, (8, 64)) * 0.3, "b": jax.random.normal(second, (64, 8)) * 0.1}

    return jt.from_functions(init, lambda params, x: jnp.tanh(x @ params["a"]) @ params["b"], name="two layers")


def fit(run_dir: Path, **changes: Any) -> jt.Result:
    arguments: dict[str, Any] = dict(
        data={"inputs": X, "targets": Y},
        steps=6,
        batch_size=16,
        mesh=jt.make_mesh(devices=jax.devices()[:1]),
        run_dir=run_dir,
        logging=QUIET,
        checkpoint={"every": None},
    )
    arguments |= changes
    if isinstance(arguments["data"], Iterator) and "batch_size" not in changes:
        arguments["batch_size"] = None
    optimizer = arguments.pop("optimizer", optax.adam(1e-2))
    task = arguments.pop("task", jt.classification())
    return jt.fit(arguments.pop("model", model()), task, optimizer, **arguments)


class TorchLike:
    """Rows as pairs; integers are Python's, as torch datasets give them."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return X[index], int(Y[index])


class HuggingFaceLike:
    """Rows as dicts of lists and numbers; a string selects a column, as in `datasets.Dataset`."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            raise AssertionError("no column is read whole")
        return {"inputs": X[key].tolist(), "targets": int(Y[key])}


class Augmented(TorchLike):
    """Every read draws anew."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return X[index] + RNG.normal(), int(Y[index])


COLUMNS = {"inputs": X, "targets": Y}
FORMS = {
    "a dict of arrays": COLUMNS,
    "a pair": (X, Y),
    "jax arrays": (jnp.asarray(X), jnp.asarray(Y)),
    "lists": {"inputs": X.tolist(), "targets": Y.tolist()},
    "rows with an index": jt.ArrayRows(COLUMNS),
    "a grain dataset": grain.MapDataset.source([{"inputs": x, "targets": y} for x, y in zip(X, Y, strict=True)]),
    "a list of rows": [{"inputs": x, "targets": y} for x, y in zip(X, Y, strict=True)],
    "a torch dataset": TorchLike(),
    "a Hugging Face dataset": HuggingFaceLike(),
    "a Data": data_of(COLUMNS),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_batches(form: str) -> None:
    data, again = data_of(FORMS[form]), data_of(FORMS[form])
    assert (data.input_shape, data.unit, data.validation) == ((8,), "examples", None)
    assert data.fingerprint == again.fingerprint
    assert data.fingerprint["num_rows"] == 96
    batches = jt.Batches(data.train, 16, seed=3, shuffle=True)
    wanted = jt.Batches(jt.ArrayRows(COLUMNS), 16, seed=3, shuffle=True)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found, reference = (one.load(7, dict.fromkeys(COLUMNS, device)) for one in (batches, wanted))
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: leaf.dtype, reference)
    jax.tree.map(np.testing.assert_array_equal, found, reference)


@pytest.mark.parametrize("form", ["a dict of arrays", "a torch dataset"])
def test_a_share_for_validation_depends_on_the_seed_alone(form: str) -> None:
    def parts(seed: int) -> tuple[list[int], list[int]]:
        data = data_of(FORMS[form], validation=0.25, seed=seed)
        assert data.validation is not None
        assert not isinstance(data.train, BatchStream)
        kept = [
            [int(np.flatnonzero((row["inputs"] == X).all(-1))[0]) for row in part]
            for part in (data.train, data.validation)
        ]
        return kept[0], kept[1]

    train, validation = parts(0)
    assert (len(train), len(validation)) == (72, 24)
    assert sorted([*train, *validation]) == list(range(96))
    assert parts(0) == (train, validation) != parts(1)
    assert data_of(FORMS[form], validation=0.25).fingerprint != data_of(FORMS[form]).fingerprint


def test_a_fingerprint_is_of_the_content() -> None:
    changed = X.copy()
    changed[50, 3] += 1
    assert data_of((X, Y)).fingerprint != data_of((changed, Y)).fingerprint
    augmented = data_of(Augmented())
    assert "sha256" not in augmented.fingerprint, "rows that are drawn anew identify nothing"
    held_out = [data_of((X, Y), validation=(rows, Y)).fingerprint for rows in (X, X.copy(), changed)]
    assert held_out[0] == held_out[1] != held_out[2]
    assert "drawn when read" in augmented.description[0]


def test_nested_inputs_and_no_targets(tmp_path: Path) -> None:
    """What graphs, autoencoders and diffusion train on; padding of the last held-out batch does not count."""

    def loss(outputs: Any, batch: Any) -> Any:
        losses_B = jnp.mean(jnp.square(outputs), axis=-1)
        return jnp.sum(losses_B), jnp.float32(losses_B.size), {}

    result = fit(
        tmp_path,
        model=jt.from_functions(
            lambda key: {"w": jnp.ones((8, 8))}, lambda p, g: g["nodes"] @ p["w"] + g["more"]["edges"].sum()
        ),
        task=jt.Task("power", loss),
        data={"inputs": {"nodes": X, "more": {"edges": X[:, :2]}}},
        validation=0.1,
        steps=2,
        mesh=jt.make_mesh(),
    )
    assert np.isfinite(result.metrics["eval_loss"] or np.nan)


def test_a_run_of_own_parts_has_all_that_a_run_has(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = fit(
        tmp_path,
        validation=0.25,
        evaluation={"every": 3},
        checkpoint={"every": 3},
        logging={"every": 2},
        learning_rate=optax.linear_schedule(1e-2, 0.0, 6),
        ema_decay=0.9,
        steps=None,
        epochs=2,
        batch_size=24,
    )
    assert result.step == 6
    names = {path.name for path in tmp_path.iterdir()}
    assert {"run.json", "metrics.jsonl", "checkpoints", "report.html", "tensorboard"} <= names
    info = json.loads((tmp_path / "run.json").read_text())
    assert (info["status"], info["config"]["train"]["steps"]) == ("done", 6)
    assert info["from_python"]["model"] == "two layers"
    assert info["from_python"]["optimizer"] == "optax"
    logged = {row["step"]: row["learning_rate"] for row in rows(tmp_path) if "loss" in row}
    # The rate of step k is that of k - 1 updates; float32.
    assert logged == pytest.approx({step: 1e-2 * (7 - step) / 6 for step in (1, 2, 4, 6)}, rel=1e-6)
    assert [row["step"] for row in rows(tmp_path) if "eval_accuracy" in row] == [3, 6]
    assert "72 training rows and 24 validation rows" in capfd.readouterr().err


def test_a_pass_is_over_all_rows_whoever_sets_the_batch(tmp_path: Path) -> None:
    """96 rows in batches of 24 are 4 steps; steps of the default batch, 32 rows, were counted before."""
    batch = {"train.global_batch_size": 24, "logging.every": 1, "name": "one pass"}
    result = fit(tmp_path, steps=None, epochs=1, batch_size=None, overrides=batch)
    assert (result.step, rows(tmp_path)[-1]["examples"]) == (4, 96)
    assert json.loads((tmp_path / "run.json").read_text())["name"] == "one pass"


def test_a_mesh_gives_the_losses_of_one_device(tmp_path: Path) -> None:
    """Sums in another order: float32, after six steps."""
    mesh = jt.make_mesh(data=2, fsdp=4)
    fit(tmp_path / "one", clip_norm=1.0)
    fit(tmp_path / "eight", clip_norm=1.0, mesh=mesh)
    one, eight = losses(tmp_path / "one"), losses(tmp_path / "eight")
    assert one == pytest.approx(eight, rel=1e-5)
    info = json.loads((tmp_path / "eight" / "run.json").read_text())
    assert {axis: size for axis, size in info["mesh"].items() if size > 1} == {"data": 2, "fsdp": 4}


def digests(run_dir: Path, step: int) -> Any:
    with jt.Checkpointer(run_dir / "checkpoints", read_only=True) as checkpointer:
        return checkpointer.info(step).digests


def stop_after(step: int) -> jt.Callback:
    """What a scheduler does to a run."""
    return jt.Callback(on_step=lambda moment: os.kill(os.getpid(), signal.SIGTERM) if moment.step == step else None)


def batches_of() -> Iterator[dict[str, np.ndarray]]:
    """An endless iterator of batches, the same from its start every time."""
    random = np.random.default_rng(1)
    while True:
        chosen = random.integers(0, len(X), 16)
        yield {"inputs": X[chosen], "targets": Y[chosen]}


RESUMED = {"arrays": lambda: COLUMNS, "an iterator": batches_of}


@pytest.mark.parametrize("form", ["arrays", pytest.param("an iterator", marks=pytest.mark.long)])
def test_a_signal_and_a_resume_equal_an_uninterrupted_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], form: str
) -> None:
    data = RESUMED[form]
    fit(tmp_path / "whole", data=data())
    half = tmp_path / "half"
    with pytest.raises(jt.PreemptedError, match=r"stopped after step [34] of 6; saved in"):
        fit(half, data=data(), callbacks=[stop_after(3)])
    assert json.loads((half / "run.json").read_text())["status"] == "preempted"
    capfd.readouterr()
    fit(half, data=data())
    shown = capfd.readouterr().err
    assert "resuming step" in shown
    assert losses(half) == losses(tmp_path / "whole")
    assert digests(half, 6) == digests(tmp_path / "whole", 6)


def test_more_steps_go_on_and_other_parts_are_refused(tmp_path: Path) -> None:
    fit(tmp_path, steps=2)
    assert fit(tmp_path, steps=3).step == 3
    assert list(losses(tmp_path)) == [1, 2, 3]
    for changes, words in (
        (dict(optimizer=optax.sgd(1e-2, momentum=0.9)), "is of another optimizer: 7 of 13 arrays"),
        (dict(clip_norm=1.0), r"clip_norm None -> 1\.0"),
        (dict(data=(X + 1, Y)), "trained on other data: sha256"),
    ):
        with pytest.raises(jt.UserError, match=words) as error:
            fit(tmp_path, steps=3, **changes)
        assert "\n" not in str(error.value)


def test_another_loss_of_numbers_is_another_task(tmp_path: Path) -> None:
    fit(tmp_path, task="mae", data=(X, X), steps=1)
    with pytest.raises(jt.ConfigError, match="the code of the loss changed"):
        fit(tmp_path, task="mse", data=(X, X), steps=1)


class Table:
    """What distinguishes a table of pandas, which tests do not need."""

    iloc = None


# A row for each kind of mistake; keys and their values are those of a config.
WRONG = {
    "a table of pandas": (dict(data=Table()), r"data is a Table; give .*\.to_numpy\(\) of tables"),
    "an array": (dict(data=X), r"data is an array \[96, 8\]; give {'inputs': x"),
    "three arrays": (dict(data=(X, Y, Y)), "data is a tuple; give {'inputs': x"),
    "a generator function": (dict(data=batches_of), "data is a function .batches_of.; call it first"),
    "no rows": (dict(data=(X[:0], Y[:0])), "data has no rows"),
    "text in a row": (
        dict(data=[{"inputs": X[0], "targets": "a"}]),
        "row 0 of data 'targets' holds <U1, not numbers",
    ),
    "ragged": (dict(data={"inputs": [[1.0], [1.0, 2.0]], "targets": [0, 1]}), "'inputs' cannot become an array"),
    "no inputs": (dict(data={"targets": Y}), "has no entry 'inputs'"),
    "another batch size": (dict(data=batches_of(), batch_size=8), "batch_size=8, but the iterable gives batches of 16"),
    "epochs of an iterator": (dict(data=batches_of(), steps=None, epochs=1), "give steps="),
    "an iterator to evaluate": (dict(validation=batches_of()), "validation is a generator; give {'inputs': x"),
    "a share of 2": (dict(validation=2.0), "validation=2 needs a share between 0 and 1"),
    "other entries": (dict(validation={"inputs": X}), "validation holds inputs, but data holds inputs, targets"),
    "steps=0": (dict(steps=0), r"train\.steps is 0 \(jaxtrain.fit\)"),
    "a class": (dict(optimizer=optax.adam), "optimizer takes an optax transformation, not the function adam"),
    "swapped": (dict(model=jt.classification(), task=model()), "model takes a jaxtrain.Model, not a Task"),
    "a batch that does not divide": (dict(mesh=jt.make_mesh(), batch_size=12), "12"),
    "degrees that the mesh has not": (dict(parallelism=jt.Parallelism(fsdp=4)), "fsdp=4, but the mesh has fsdp=1"),
}


def test_a_wrong_argument_is_one_line(tmp_path: Path) -> None:
    for changes, words in WRONG.values():
        with pytest.raises(jt.UserError, match=words) as error:
            fit(tmp_path / "run", **changes)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("checkpoints/*")), "nothing was trained"


class Frame:
    """A table as pandas has it: [0] is a column that is not there, and its columns are objects."""

    iloc = None

    def __init__(self, values: dict[str, Any]):
        self.columns, self._values = list(values), values

    def __len__(self) -> int:
        return 16

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(to_numpy=lambda: self._values[name])


def test_columns_of_a_table_are_found_by_their_names() -> None:
    frame = Frame({"when": np.arange(16) / 4, "kind": np.arange(16) % 3, "note": np.full(16, "text")})
    data = data_of(renamed(frame, {"inputs": "when", "targets": "kind"}, "data"))
    assert [(row["inputs"], row["targets"]) for row in data.train] == [(i / 4, i % 3) for i in range(16)]
    with pytest.raises(jt.DataError, match="columns names 'what', but data holds when, kind, note"):
        renamed(frame, {"inputs": "what"}, "data")


def test_rows_with_names_of_their_own_and_a_task_by_its_name(tmp_path: Path) -> None:
    images, labels = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), np.arange(16) % 3
    rows = [{"image": x, "label": y, "file": "a.png"} for x, y in zip(images, labels, strict=True)]
    model = jt.from_functions(lambda key: {"w": jnp.zeros((8, 3))}, lambda params, x: x @ params["w"])
    given = dict(steps=2, batch_size=8, logging={"report": False})
    columns, task = {"inputs": "image", "targets": "label"}, jt.classification(metrics=["top_2", "f1"])
    result = jt.fit(model, task, optax.sgd(0.1), data=rows, columns=columns, run_dir=tmp_path / "run", **given)
    same = jt.fit(model, "classification", optax.sgd(0.1), data=(images, labels), run_dir=tmp_path / "same", **given)
    assert result.metrics["loss"] == same.metrics["loss"]
    assert 0 <= result.metrics["top_2"] <= 1
    assert np.ndim(result.metrics["macro_f1"]) == 0
    arrays = {"image": images, "label": labels}
    with pytest.raises(jt.UserError, match=r"write fit\(columns=\{'inputs': 'image', 'targets': 'label'\}\)"):
        jt.fit(model, "classification", optax.sgd(0.1), data=arrays, run_dir=tmp_path / "other", **given)


def test_a_run_starts_from_what_ran_or_was_opened(tmp_path: Path) -> None:
    first = fit(tmp_path / "first", steps=2, checkpoint={"every": 1})
    earlier = jt.open_run(tmp_path / "first", model=model(), step=1)
    step = jt.make_train_step(model(), jt.classification(), optax.sgd(0.1))
    start, before = (jt.load_weights(step, given).params["a"] for given in (first, earlier))
    np.testing.assert_array_equal(start, first.state.params["a"])
    np.testing.assert_array_equal(before, jt.load_weights(step, tmp_path / "first" / "checkpoints" / "1").params["a"])
    assert not np.array_equal(start, before)
