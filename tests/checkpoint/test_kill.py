"""kill -9 at any moment of continuous saves leaves a step that restores."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import Checkpointer

SAVE_FOREVER = """
import sys
from pathlib import Path
import jax.numpy as jnp
from jaxtrain.checkpoint import Checkpointer

checkpointer = Checkpointer(Path(sys.argv[1]))
step = checkpointer.latest_step() or 0
while True:
    step += 1
    state = {"step": jnp.int32(step), "kernel": jnp.full((512, 512), step, jnp.float32)}
    checkpointer.save(step, state, metadata={"step": step})
    print(step, flush=True)
"""
ROOT = Path(__file__).parents[2]
TARGET = {"step": jnp.int32(0), "kernel": jnp.zeros((512, 512))}


@pytest.mark.parametrize("attempt", [0, *(pytest.param(attempt, marks=pytest.mark.long) for attempt in (1, 2))])
def test_kill_during_saves(tmp_path, attempt):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        for _ in range(3 + attempt):
            assert writer.stdout.readline()
        time.sleep(random.Random(attempt).uniform(0, 0.1))
        writer.send_signal(signal.SIGKILL)
        issued = max(map(int, writer.stdout.read().split()), default=3 + attempt)
    with Checkpointer(tmp_path) as checkpointer:
        step = checkpointer.latest_step()
        assert step is not None
        assert step >= issued - 1
        restored = checkpointer.restore(TARGET)
        assert int(restored["step"]) == step
        assert (restored["kernel"] == step).all()
        # What the killed save left is removed by the next one.
        checkpointer.save(step + 1, TARGET, metadata={})
        checkpointer.wait()
        assert {path.name for path in tmp_path.iterdir()} == {str(step), str(step + 1)}
