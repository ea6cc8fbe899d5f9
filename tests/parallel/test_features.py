"""What a step does besides layouts, on pipelines and ZeRO: the numbers of one device, training and evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest
from layouts import ADAMW, CASES, load_batches, make_mesh_of

from jaxtrain import Evaluator, Parallelism, make_train_step
from jaxtrain.optim.optimizers import build_optimizer


@dataclass(frozen=True)
class Row:
    """Options of a step on `pipe=2,data=2`; whether tokens weigh differently; the relative tolerance."""

    parallelism: Parallelism
    trainable: Callable[[str], bool]
    policy: str = "fp32"
    ema_decay: float | None = None
    weights: bool = False
    # Sums in another order: 2^-24 a sum, a few thousand of them.
    tolerance: float = 1e-5


ROWS = {
    # Microbatches and shards of very different weight, some tokens of none; evaluated by the moving average.
    "only the blocks trained, weights, average": Row(
        Parallelism(zero=1), lambda path: path.startswith("blocks"), ema_decay=0.9, weights=True
    ),
    # A product has 11 bits: half of 2^-10 a rounding, and a norm over all gradients.
    "only what is outside the blocks trained, fp16": Row(
        Parallelism(schedule="interleaved_1f1b"),
        lambda path: not path.startswith("blocks"),
        policy="fp16",
        tolerance=2.0**-11,
    ),
}


def numbers(row: Row, degrees: dict[str, int], parallelism: Parallelism) -> np.ndarray:
    """Losses and gradient norms of three steps, then the loss in evaluation."""
    case = CASES["transformer"]
    model = case.model("none")
    step = make_train_step(
        model,
        case.task,
        build_optimizer(ADAMW, optax.constant_schedule(1e-3), axes=model.axes),
        mesh=make_mesh_of(degrees),
        policy=row.policy,
        accumulation_steps=4,
        clip_norm=1.0,
        ema_decay=row.ema_decay,
        trainable=row.trainable,
        parallelism=parallelism,
    )
    state, found = step.init(0), []
    batch: dict[str, Any] = {}
    for batch in map(dict, load_batches("transformer")[:3]):
        if row.weights:
            batch["weights"] = np.random.default_rng(0).integers(0, 2, batch["targets"].shape).astype(np.float32)
            batch["weights"][::3] = 0
        state, metrics = step(state, batch)
        found += [metrics["loss"], metrics["grad_norm"]]
    evaluation = Evaluator(step)(state, [jax.device_put(batch, step.batch_shardings(batch))])
    return np.array([*jax.device_get(found), evaluation["eval_loss"]])


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_numbers_of_one_device(name: str) -> None:
    row = ROWS[name]
    np.testing.assert_allclose(
        numbers(row, dict(pipe=2, data=2), row.parallelism),
        numbers(row, dict(data=1), Parallelism()),
        rtol=row.tolerance,
    )
