"""A second run in one directory: other code is refused, whatever part of the step it is in; the same code resumes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_fit import fit
from training_runs import losses

import jaxtrain as jt

SHIFT = np.linspace(0, 1, 8, dtype=np.float32)


def init(key: jax.Array, scale: float = 0.3) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {"a": jax.random.normal(first, (8, 64)) * scale, "b": jax.random.normal(second, (64, 8)) * 0.1}


def net(act: Callable[[Any], Any] = jnp.tanh, shift: Any = SHIFT, scale: float = 0.3) -> jt.Model:
    """A model with an array that its code closes over, and a product in a function of its own."""

    @jax.jit
    def hidden(params: Any, x: Any) -> Any:
        return act((x + shift) @ params["a"])

    return jt.from_functions(
        lambda key: init(key, scale), lambda params, x: hidden(params, x) @ params["b"], name="net"
    )


def renamed_and_printing() -> jt.Model:
    def another(params: Any, rows: Any) -> Any:
        jax.debug.print("mean {}", rows.mean())
        return jnp.tanh(rows)

    @jax.jit
    def project(params: Any, rows: Any) -> Any:
        return another(params, (rows + SHIFT) @ params["a"])

    return jt.from_functions(init, lambda weights, rows: project(weights, rows) @ weights["b"], name="other")


def smoothed(amount: float) -> jt.Task:
    """A loss of one's own."""

    def loss(outputs: Any, batch: Any) -> Any:
        rows = optax.softmax_cross_entropy(outputs, optax.smooth_labels(jax.nn.one_hot(batch["targets"], 8), amount))
        return rows.sum(), jnp.float32(len(rows)), {}

    return jt.Task("smoothed", loss)


def adam(rate: float = 1e-2, over: int = 100, b2: float = 0.999) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(rate, over), b2=b2)


def train(run_dir: Path, **changes: Any) -> jt.Result:
    parts = {"model": net(), "task": smoothed(0.1), "optimizer": adam(), "steps": 2, "resume": None}
    return fit(run_dir, **{**parts, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder)
    return folder


CHANGES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "body": (lambda: {"model": net(jax.nn.relu)}, "model"),
    "array that is closed over": (lambda: {"model": net(shift=SHIFT[::-1])}, "model"),
    "rate": (lambda: {"optimizer": adam(3e-2)}, "optimizer"),
    "schedule": (lambda: {"optimizer": adam(over=200)}, "optimizer"),
    "constant of the optimizer": (lambda: {"optimizer": adam(b2=0.99)}, "optimizer"),
    "constant of the loss": (lambda: {"task": smoothed(0.2)}, "loss"),
    "scale of the first parameters": (lambda: {"model": net(scale=0.1)}, "initial state"),
    "two": (lambda: {"task": smoothed(0.2), "model": net(jax.nn.relu)}, "model and loss"),
    "body, and more steps": (lambda: {"model": net(jax.nn.relu), "steps": 3}, "model"),
}


@pytest.mark.parametrize(("changes", "part"), CHANGES.values(), ids=CHANGES)
def test_other_code_is_refused(trained: Path, changes: Callable[[], dict[str, Any]], part: str) -> None:
    """Here of a run that is complete: its old numbers would be returned as those of the new code."""
    words = rf"^the code of the {part} changed since [^\n]*resume='never' \(--resume never\)[^\n]*resume='must'[^\n]*$"
    for resume in (None, "auto"):
        with pytest.raises(jt.ConfigError, match=words):
            train(trained, resume=resume, **changes())
    assert list(losses(trained)) == [1, 2]


def test_the_same_code_resumes(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With other names, a print, another rate that is only shown, callbacks and evaluations."""
    train(trained)
    assert "same config, same code" in capfd.readouterr().err
    train(trained, model=renamed_and_printing(), learning_rate=0.5, callbacks=[jt.Callback(on_step=print)])
    assert "same config, same code" in capfd.readouterr().err


def test_must_resumes_with_other_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    capfd.readouterr()
    assert train(tmp_path, model=net(jax.nn.relu), steps=3, resume="must").step == 3
    assert "checkpoints: the code of the model changed, train.steps 2 -> 3" in capfd.readouterr().err
    assert train(tmp_path, model=net(jax.nn.relu), steps=3).step == 3


def test_a_rate_in_the_state_of_the_optimizer(tmp_path: Path) -> None:
    """No equation of the step holds it: a checkpoint would bring the old one back."""

    def optimizer(rate: float) -> optax.GradientTransformation:
        return optax.inject_hyperparams(optax.adam)(learning_rate=rate)

    train(tmp_path, optimizer=optimizer(1e-2), steps=1)
    with pytest.raises(jt.ConfigError, match="the code of the initial state changed"):
        train(tmp_path, optimizer=optimizer(3e-2), steps=1)


def test_more_steps_of_the_optimizer_of_a_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its schedule follows the steps; what it gets is compared, also where equations are only connected otherwise."""

    def go_on(steps: int, *, is_swapped: bool = False) -> None:
        def apply(params: Any, x: Any) -> Any:
            rows = x.reshape(len(x), -1) @ params["a"]
            change = jnp.tanh(rows) - rows if is_swapped else rows - jnp.tanh(rows)
            return change @ params["b"]

        shapes = {"a": (64, 16), "b": (16, 10)}
        model = jt.from_functions(lambda key: {name: jnp.ones(shape) for name, shape in shapes.items()}, apply)
        overrides = {"train.steps": steps, "optimizer.schedule.kind": "cosine", "logging.report": False}
        jt.run_config("digits_mlp", model=model, overrides=overrides, run_dir=tmp_path)

    go_on(1)
    go_on(2)
    assert "train.steps 1 -> 2, same code" in capfd.readouterr().err
    with pytest.raises(jt.ConfigError, match=r"^the code of the \w+ changed"):
        go_on(3, is_swapped=True)


def test_code_is_not_compared_on_another_mesh(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(trained, mesh=jt.make_mesh(data=2, devices=jax.devices()[:2]), model=net(jax.nn.relu))
    assert "(code not compared)" in capfd.readouterr().err
