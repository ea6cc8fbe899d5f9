"""Two runs in two threads of one process: each has the numbers that it has alone, from the start and resumed."""

import os
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt

INPUTS = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
DATA = (INPUTS, INPUTS[:, :4].argmax(1))


def train(folder, steps, seed):
    model = jt.from_functions(lambda key: {"w": jnp.zeros((8, 4))}, lambda params, inputs: inputs @ params["w"])
    result = jt.fit(
        model,
        jt.classification(),
        optax.adam(0.1),
        data=DATA,
        validation=0.25,
        steps=steps,
        batch_size=16,
        seed=seed,
        run_dir=folder,
        checkpoint={"every": 2},
        evaluation={"every": 3},
        logging={"report": False, "tensorboard": False},
    )
    return result.step, result.metrics["loss"], result.metrics["eval_loss"]


def test_two_runs_in_two_threads(tmp_path):
    alone = [train(tmp_path / f"alone{seed}", 12, seed) for seed in (1, 2)]
    umask = os.umask(0o022)
    os.umask(umask)
    for steps in (6, 12):
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda seed, steps=steps: train(tmp_path / str(seed), steps, seed), (1, 2)))
    assert found == alone
    assert os.umask(umask) == umask
