"""A run that goes on with a change: which parts of the state come, go and change, and what is refused for its form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from training_runs import rows

import jaxtrain as jt
from jaxtrain.checkpoint.directory import seal
from jaxtrain.run.injected import with_injected

RNG = np.random.default_rng(0)
DATA = (RNG.normal(size=(32, 4)).astype(np.float32), RNG.normal(size=(32, 2)).astype(np.float32))
START = {"kernel": np.ones((4, 2), np.float32), "bias": np.zeros(2, np.float32)}
LOGGING = {"every": 1, "tensorboard": False, "report": False}


def fit(run_dir: Path, optimizer: optax.GradientTransformation | None = None, **changes: Any) -> jt.Result:
    model = jt.from_nnx(lambda rngs: nnx.Linear(4, 2, rngs=rngs))
    arguments: dict[str, Any] = dict(data=DATA, steps=2, batch_size=8, run_dir=run_dir, logging=LOGGING)
    return jt.fit(model, jt.regression(), optimizer or optax.sgd(0.1), **(arguments | changes))


def test_a_loss_scale_comes_goes_and_stays_within_its_bounds(tmp_path: Path) -> None:
    """A run that diverges under fp16 is told to use bf16: its parameters and moments are the same."""
    raised = {"precision.loss_scale": {"initial": 2.0**17, "minimum": 2.0**16}}
    for steps, policy, overrides, scale in (
        (1, "fp32", {}, None),
        (2, "fp16", {}, 2.0**15),
        (3, "fp16", raised, 2.0**16),
        (4, "bf16", {}, None),
    ):
        state = fit(tmp_path, steps=steps, policy=policy, overrides=overrides, resume="auto").state
        assert (None if state.loss_scale is None else float(state.loss_scale.scale)) == scale
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def injected(rate: Any, decay: float = 0.0) -> optax.GradientTransformation:
    return optax.chain(optax.clip(9.0), optax.inject_hyperparams(optax.adamw)(rate, weight_decay=decay))


def numbers(result: jt.Result) -> dict[str, float]:
    return {name: float(f"{number:.6g}") for name, number in result.state.optimizer_state[1].hyperparams.items()}


def change_metadata(run_dir: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes what the checkpoints say of their run."""
    for path in (run_dir / "checkpoints").glob("*/jaxtrain/metadata"):
        content = json.loads(path.read_text())["content"]
        change(content["metadata"])
        path.write_text(json.dumps(seal(content)))


SAID = "numbers injected into the optimizer are those of this call: "


@pytest.mark.parametrize("is_recorded", [True, pytest.param(False, marks=pytest.mark.long)])
def test_injected_numbers_are_those_of_the_call_where_a_change_is_accepted(
    tmp_path: Path, is_recorded: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    first = jax.device_get(fit(tmp_path, injected(0.1)).state.params)
    if not is_recorded:  # as by earlier versions
        change_metadata(tmp_path, lambda metadata: metadata.pop("injected"))
    with pytest.raises(jt.ConfigError, match="resume='must' to go on") as error:
        fit(tmp_path, injected(1e-6), steps=3)
    assert "\n" not in str(error.value)
    changed = fit(tmp_path, injected(1e-6), steps=3, resume="must")
    ends = " " if is_recorded else "; the checkpoint does not record "
    assert f"{SAID}learning_rate 0.1 -> 1e-06{ends}" in " ".join([*capfd.readouterr().err.split(), ""])
    assert numbers(changed)["learning_rate"] == 1e-6
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), first, jax.device_get(changed.state.params))
    assert max(jax.tree.leaves(moved)) < 1e-5
    fit(tmp_path, injected(1e-6), steps=4)
    assert SAID not in " ".join(capfd.readouterr().err.split())


def of_an_earlier_version(metadata: dict[str, Any]) -> None:
    """Without the record of the numbers, and with digests that tell nothing in this version."""
    del metadata["injected"]
    metadata["digests"]["under"] = "that of other versions of the packages"


def test_numbers_of_a_checkpoint_without_their_record_are_never_taken_for_those_of_the_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, injected(0.1))
    change_metadata(tmp_path, of_an_earlier_version)
    for steps in (3, 4):  # the second goes on from a checkpoint of this version, which still cannot tell
        assert numbers(fit(tmp_path, injected(1e-6), steps=steps))["learning_rate"] == 0.1
        assert "resume='must' takes those of this call: learning_rate 0.1 -> 1e-06 " in " ".join(
            [*capfd.readouterr().err.split(), ""]
        )
    assert numbers(fit(tmp_path, injected(1e-6), steps=5, resume="must"))["learning_rate"] == 1e-6
    assert f"{SAID}learning_rate 0.1 -> 1e-06; the checkpoint does not record " in " ".join(
        capfd.readouterr().err.split()
    )
    with pytest.raises(jt.ConfigError, match="resume='must' to go on"):
        fit(tmp_path, injected(0.1), steps=6)


@pytest.mark.long
def test_a_run_that_goes_back_keeps_the_numbers_that_it_went_on_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where it goes back to a checkpoint that records none."""
    random = np.random.default_rng(0)
    inputs, targets = (random.normal(size=(128, width)).astype(np.float32) for width in (4, 2))
    targets[17] = 1e4  # in a batch after step 10
    spikes = {"action": "roll_back", "roll_back_steps": 5, "window": 4, "sigmas": 50.0, "skip_batches": 12}
    overrides = {"spikes": spikes, "checkpoint.every": 2, "checkpoint.keep_last": 20}
    options: dict[str, Any] = dict(data=(inputs, targets), overrides=overrides)
    fit(tmp_path, injected(1e-3), steps=10, **options)
    change_metadata(tmp_path, of_an_earlier_version)
    result = fit(tmp_path, injected(1e-6), steps=14, resume="must", **options)
    assert "going back to step 8" in " ".join(capfd.readouterr().err.split())
    assert numbers(result)["learning_rate"] == 1e-6


def called(rate: float) -> dict[str, Any]:
    """What metadata says of a run whose config calls for its optimizer."""
    optimizer = {"call": "mine:injected", "arguments": {"rate": rate}}
    return {"config": {"optimizer": optimizer}, "from_python": {"optimizer": None}}


@pytest.mark.parametrize(("before", "after", "rate"), [(0.1, 0.1, 0.3), (0.1, 0.2, 0.2)], ids=["same", "other"])
def test_without_a_record_the_call_in_the_config_tells_what_a_run_began_with(
    before: float, after: float, rate: float
) -> None:
    """The state holds 0.3, which the run set itself."""
    model = jt.from_nnx(lambda rngs: nnx.Linear(4, 2, rngs=rngs))
    state = jt.make_train_step(model, jt.regression(), injected(0.3)).init(0)
    path = "1/hyperparams/learning_rate"
    current = {"injected": {path: after}, **called(after)}
    found, recorded = with_injected(state, current, called(before), may_change=True, report=None)
    held: Any = found.optimizer_state
    assert float(held[1].hyperparams["learning_rate"]) == pytest.approx(rate)
    assert recorded == {path: after}


def test_numbers_that_the_run_itself_set_stay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The state may hold others than the call began with; the same call, also with another change, keeps them."""
    fit(tmp_path, injected(0.1))
    change_metadata(tmp_path, lambda metadata: metadata["injected"].update({"1/hyperparams/learning_rate": 0.3}))
    kept = fit(tmp_path, injected(0.3, decay=0.5), steps=3, resume="must")
    assert f"{SAID}weight_decay 0 -> 0.5 " in " ".join([*capfd.readouterr().err.split(), ""])
    assert (numbers(kept)["learning_rate"], numbers(kept)["weight_decay"]) == (0.1, 0.5)


@pytest.mark.long
def test_an_injected_schedule_goes_on_at_its_count(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, injected(optax.linear_schedule(0.0, 1.0, 10)))
    result = fit(tmp_path, injected(optax.linear_schedule(0.0, 2.0, 10)), steps=3, resume="must")
    assert SAID not in " ".join(capfd.readouterr().err.split())
    assert numbers(result)["learning_rate"] == 0.4
    assert int(result.state.optimizer_state[1].hyperparams_states["learning_rate"].count) == 3


def test_an_injected_random_key_is_restored_beside_numbers_that_are_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def noise(eta: float) -> optax.GradientTransformation:
        injected_noise = optax.inject_hyperparams(optax.add_noise)(eta=eta, gamma=0.55, key=jax.random.key(0))
        return optax.chain(injected_noise, optax.sgd(0.1))

    fit(tmp_path, noise(0.01))
    assert fit(tmp_path, noise(0.01), steps=3).step == 3
    changed = fit(tmp_path, noise(0.02), steps=4, resume="must")
    assert f"{SAID}eta 0.01 -> 0.02 " in " ".join([*capfd.readouterr().err.split(), ""])
    assert float(changed.state.optimizer_state[0].hyperparams["eta"]) == pytest.approx(0.02)


def test_other_injected_numbers_are_refused_whatever_else_is_not_compared(tmp_path: Path) -> None:
    """The first state of given parameters is not compared as equations."""
    fit(tmp_path, injected(0.1), params=START)
    with pytest.raises(jt.ConfigError, match=r"injected into its optimizer: learning_rate 0\.1 -> 0\.2; use") as error:
        fit(tmp_path, injected(0.2), params=START, steps=3)
    assert "\n" not in str(error.value)


# Options of a call, and of another whose state has another form, of the same weights.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "average": (dict(), dict(ema_decay=0.9)),
    "frozen": (dict(), dict(trainable=lambda path: path != "bias")),
    "optimizer": (dict(), dict(optimizer=optax.sgd(0.1))),
    "precision": (dict(), dict(policy="bf16_pure")),
}


@pytest.mark.parametrize(("before", "after"), REFUSED.values(), ids=REFUSED)
def test_no_resume_is_offered_where_none_can_go_on(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    before, after = ({"optimizer": optax.adam(0.1), **options} for options in (before, after))
    fit(tmp_path / "run", **before)
    with pytest.raises(jt.UserError) as error:
        fit(tmp_path / "run", **after)
    assert "resume='must'" not in str(error.value)
    assert "\n" not in str(error.value)
    assert f", where params='{tmp_path / 'run'}' starts from its weights" in str(error.value)
    assert fit(tmp_path / "other", params=str(tmp_path / "run"), **after).step == 2
