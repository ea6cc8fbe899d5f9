"""Checkpoints of real processes: kill -9 at any moment leaves a step that restores; two save what one restores."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from checkpoint_states import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.places import Place, names

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

root, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address = f"127.0.0.1:{port}"
jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address, initialization_timeout=60)
from jaxtrain.checkpoint import Checkpointer

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
split, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
target = {
    "kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=split),
    "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole),
    "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
    "empty": jax.ShapeDtypeStruct((0, 2), jnp.float32, sharding=whole),
}
lines = []
with Checkpointer(root, report=lines.append) as checkpointer:
    state = checkpointer.restore(target)
    if checkpointer.latest_step() == 1:
        assert len(lines) == (rank == 0), lines
    double = jax.jit(lambda s: {**s, "kernel": s["kernel"] * 2, "step": s["step"] + 1}, donate_argnums=0)
    for step in (2, 3):
        state = double(state)
        assert checkpointer.save(step, state, metadata={"step": step})
        assert not checkpointer.save(step, state, metadata={})
    state = checkpointer.restore(target)
    local = state["kernel"].addressable_shards[0]
    assert (np.asarray(local.data) == 4 * np.arange(32.0).reshape(8, 4)[local.index]).all()
    lines.clear()
    assert checkpointer.save(3, checkpointer.restore(target, step=2), metadata={"step": 3})
assert len(lines) == (rank == 0), lines
print("fine", flush=True)
"""
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}

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


def test_kill_during_saves(tmp_path):
    target = {"step": jnp.int32(0), "kernel": jnp.zeros((512, 512))}
    command = [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT}) as writer:
        assert writer.stdout is not None
        for _ in range(3):
            assert writer.stdout.readline()
        time.sleep(random.uniform(0, 0.1))
        writer.send_signal(signal.SIGKILL)
        issued = max(map(int, writer.stdout.read().split()), default=3)
    with Checkpointer(tmp_path) as checkpointer:
        step = checkpointer.latest_step()
        assert step is not None
        assert step >= issued - 1
        restored = checkpointer.restore(target)
        assert int(restored["step"]) == step
        assert (restored["kernel"] == step).all()
        # What the killed save left is removed by the next one.
        checkpointer.save(step + 1, target, metadata={})
        checkpointer.wait()
        assert {path.name for path in tmp_path.iterdir()} == {str(step), str(step + 1)}


def one_to_two_to_one(root: Place) -> None:
    """Step 1 and a damaged step 2 of one process, resumed by two, which go back to step 2 at their end."""
    state = {
        "kernel": jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh_of(8), P("fsdp"))),
        "key": jax.random.key(5),
        "step": jnp.int32(1),
        "empty": jnp.zeros((0, 2)),
    }
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state, metadata={})
        checkpointer.save(2, state, metadata={})
    record = root / "2" / "jaxtrain" / "metadata"
    record.unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = [[sys.executable, "-c", PROGRAM, str(root), str(rank), str(port)] for rank in range(2)]
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.steps() == [2, 3]
        restored = checkpointer.restore(state)
        assert checkpointer.verify(2).metadata == {"step": 2}
        assert [name.partition("-")[0] for name in names(root) if "abandoned" in name] == ["3.abandoned"]
    assert (np.asarray(restored["kernel"]) == 2 * np.arange(32.0).reshape(8, 4)).all()
    assert int(restored["step"]) == 2
    assert (jax.random.key_data(restored["key"]) == jax.random.key_data(state["key"])).all()


def test_one_to_two_to_one(tmp_path):
    one_to_two_to_one(tmp_path)
