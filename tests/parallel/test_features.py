"""Frozen parameters, weights and a moving average on stages and ZeRO: trained and evaluated as on one device."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from layouts import ADAMW, CASES, load_batches, make_mesh_of

from jaxtrain import Evaluator, Parallelism, make_train_step
from jaxtrain.optim.optimizers import build_optimizer


def numbers(zero: int, **degrees: int) -> np.ndarray:
    """Losses and gradient norms of three steps, then the loss in evaluation by the moving average."""
    case = CASES["transformer"]
    model = case.model("none")
    step = make_train_step(
        model,
        case.task,
        build_optimizer(ADAMW, optax.constant_schedule(1e-3), axes=model.axes),
        mesh=make_mesh_of(degrees),
        accumulation_steps=4,
        clip_norm=1.0,
        ema_decay=0.9,
        trainable=lambda path: path.startswith("blocks"),
        parallelism=Parallelism(zero=zero),
    )
    state, found = step.init(0), []
    batch: dict[str, Any] = {}
    for batch in map(dict, load_batches("transformer")[:3]):
        # Microbatches and shards of very different weight, some tokens of none.
        batch["weights"] = np.random.default_rng(0).integers(0, 2, batch["targets"].shape).astype(np.float32)
        batch["weights"][::3] = 0
        state, metrics = step(state, batch)
        found += [metrics["loss"], metrics["grad_norm"]]
    evaluation = Evaluator(step)(state, [jax.device_put(batch, step.batch_shardings(batch))])
    return np.array([*jax.device_get(found), evaluation["eval_loss"]])


@pytest.mark.long
def test_numbers_of_one_device() -> None:
    # Sums in another order: 2^-24 a sum, a few thousand of them.
    np.testing.assert_allclose(numbers(1, pipe=2, data=2), numbers(0, data=1), rtol=1e-5)
