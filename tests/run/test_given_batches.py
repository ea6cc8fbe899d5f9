"""Batches that a program gives: arrays that are refilled, iterators that end or were read before, and lists."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grain
import jax
import numpy as np
import optax
import pytest
from training_runs import losses

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.data.configured import with_counted_steps
from jaxtrain.data.stream import BatchStream

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
Y = X.argmax(-1).astype(np.int32)


def model() -> jt.Model:
    return jt.from_functions(
        lambda key: {"w": 0.1 * jax.random.normal(key, (4, 4))}, lambda params, x: x @ params["w"], name="linear"
    )


def fit(run_dir: Path, data: object, *, steps: int) -> jt.Result:
    return jt.fit(
        model(),
        jt.classification(),
        optax.sgd(0.1),
        data=data,
        steps=steps,
        mesh=jt.make_mesh(devices=jax.devices()[:1]),
        run_dir=run_dir,
        logging={"every": 1, "tensorboard": False, "report": False},
        checkpoint={"every": None},
    )


def uneven() -> Iterator[dict[str, np.ndarray]]:
    """Two batches of 8 rows, and one of 4."""
    for start, stop in ((0, 8), (8, 16), (16, 20)):
        yield {"inputs": X[start:stop], "targets": Y[start:stop]}


def test_steps_before_batches_end_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = r"batch 2 holds inputs \[4, 4\], but batch 0 \[8, 4\].*drop_last"
    with pytest.raises(jt.DataError, match=words) as error:
        fit(tmp_path, uneven(), steps=6)
    assert "\n" not in str(error.value)
    assert "step 2 is saved in " in capsys.readouterr().err
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"
    assert list(losses(tmp_path)) == [1, 2]
    assert (tmp_path / "checkpoints" / "2").is_dir()


def test_numbers_are_not_cut_to_the_dtype_of_the_first_row() -> None:
    """Rows [0, 0.5, ...] were all 0 where the first row had Python's 0: targets of a regression, in silence."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for targets, line in (([0, 0.5], "of 0.5"), ([0, float("nan")], "of nan"), ([False, 2], "of 2"), ([1, 0.0], None)):
        rows = grain.MapDataset.source([{"targets": np.asarray(target)} for target in targets])
        stream = BatchStream([{"targets": np.asarray([target])} for target in targets])
        for load, first, k in (
            (jt.Batches(rows, 2, seed=0, shuffle=True).load, "the first row", 0),
            (stream.load, "batch 0", 1),
        ):
            if line is None:
                assert set(np.asarray(load(k, {"targets": device})["targets"])) <= {0, 1}
                continue
            with pytest.raises(jt.DataError, match=f"batch {k} holds targets {line}, but those of {first} are"):
                load(k, {"targets": device})


class Failing:
    """Rows of which one cannot be read, once it is told so."""

    fails = False

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if self.fails and index == 20:
            raise OSError("row 20 is gone")
        return X[index], Y[index]


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_what_a_dataset_raises_costs_no_step(tmp_path: Path, where: str) -> None:
    """The state was saved for a DataError of training alone; else all steps since the last save were lost."""
    rows = Failing()

    def fit(**more: Any) -> jt.Result:
        given = {"data": rows, "validation": None} if where == "training" else {"data": (X, Y), "validation": rows}
        quiet = {"tensorboard": False, "report": False}
        words = {"steps": 9, "batch_size": 8, "run_dir": tmp_path, "logging": quiet, "overrides": {"train.prefetch": 1}}
        return jt.fit(model(), jt.classification(), optax.sgd(0.1), **given, **words, **more)

    def fail(moment: jt.Moment) -> None:
        rows.fails = rows.fails or moment.step == 3

    with pytest.raises(OSError, match="row 20 is gone"):
        fit(callbacks=[jt.Callback(on_step=fail)])
    (kept,) = jt.open_run(tmp_path).checkpoints
    assert kept in (range(3, 9) if where == "training" else (9,)), "an epoch is four steps"
    rows.fails = False
    result = fit()
    assert result.step == 9
    assert ("eval_loss" in result.metrics) == (where == "evaluation")


def test_passes_over_the_rows_are_steps() -> None:
    """The products of some floats are a hair above the whole number that is meant."""
    for epochs, num_rows, size, steps in ((1.1, 100, 10, 11), (2.2, 100, 20, 11), (1.11, 100, 10, 12), (2, 7, 4, 4)):
        config = load_config(keywords={"train": {"epochs": epochs, "global_batch_size": size}}).config
        counted = with_counted_steps(config, cast(Any, SimpleNamespace(train=range(num_rows)))).train
        assert (counted.steps, counted.epochs) == (steps, None)
