"""Memory of the very step that the trainer runs, from the compiler of hardware that is not here.

`ask` runs this module in a process of its own, so that plugins of such hardware, and what they print, stay out of the
one that asks. jax is imported in the functions that need it: a plan by formulas does without.
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtrain.config.data import CalledData
from jaxtrain.config.kinds import called_parts
from jaxtrain.config.schema import Config
from jaxtrain.errors import DataError, UserError, first_line
from jaxtrain.plan.targets import Target
from jaxtrain.plan.workload import Workload, describe_workload
from jaxtrain.runtime import distributed
from jaxtrain.runtime.call import user_place

if TYPE_CHECKING:
    from jaxtrain.train.step import TrainStep

# libtpu, once it laid the program out: "Ran out of memory in memory space hbm. Used 50.24G of 15.75G hbm.", or before:
# "Ran out of memory on HBM, the total memory required for HLO temporaries (20.55G) exceeds available HBM (15.75G)."
_USED = re.compile(r"([\d.]+)([KMGT])\)? (?:of|exceeds available HBM) \(?([\d.]+)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class ExactMemory:
    """What a compiler says of one device, in bytes.

    Attributes:
        state_bytes: the train state on the device, from its shardings.
        peak_bytes: the most that is allocated at once, state included.
        temporary_bytes: of that, what lives inside a step only; None where the compiler gave up.
        capacity_bytes: what the compiler says the device has, where it says so.
        compile_seconds: what compiling took, tracing left out.
        host_bytes: in the host's memory for one device: state and activations that are offloaded.
    """

    state_bytes: int
    peak_bytes: int
    temporary_bytes: int | None
    capacity_bytes: int | None
    compile_seconds: float
    host_bytes: int = 0


def exact_memory(config: Config, workload: Workload, devices: list[Any]) -> ExactMemory:
    """Compile the step of a config for devices, real or compile-only, as a run does, and read its memory.

    Raises:
        ConfigError: a layout that the model cannot take.
        CompilerMissingError: no compiler for these devices.
    """
    import jax

    from jaxtrain.plan.topology import compile_for

    step, batch = planned_step(config, workload, devices)
    device_bytes, host_bytes = state_bytes(step)
    # Kernels ask for which GPU they are lowered, and this machine may have none.
    with jax.sharding.use_abstract_mesh(step.mesh.abstract_mesh):
        lowered = step.lower(batch)
    began = time.monotonic()
    try:
        compiled = compile_for(devices[0], lowered)
    except jax.errors.JaxRuntimeError as error:
        used = _USED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or used is None:
            raise
        peak, capacity = (round(float(used[i]) * _UNITS[used[i + 1]]) for i in (1, 3))
        return ExactMemory(device_bytes, peak, None, capacity, time.monotonic() - began, host_bytes)
    memory = compiled.memory_analysis()
    assert memory is not None, "every compiler that compile_for has gives it"
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = arguments + outputs + temporaries + memory.generated_code_size_in_bytes
    host_bytes = max(host_bytes, memory.host_argument_size_in_bytes) + memory.host_temp_size_in_bytes
    return ExactMemory(device_bytes, peak, temporaries, None, time.monotonic() - began, host_bytes)


def step_state(config: Config, workload: Workload, devices: list[Any]) -> dict[str, Any]:
    """What the shapes of a step say without compiling: bytes of its state and of its batch on one device.

    `num_parameters`, `parts` (name -> bytes) with the batch, and `host_parts` of what is offloaded.
    """
    import jax

    step, batch = planned_step(config, workload, devices)
    names = {
        "parameters": ("params",),
        "optimizer state": ("optimizer_state",),
        "moving average": ("ema", "ema_model_state"),
        "model state": ("model_state",),
        "reference model": ("reference",),
    }
    parts, host_parts = dict[str, int](), dict[str, int]()
    for name, fields in names.items():
        trees, hosts = ([getattr(tree, one) for one in fields] for tree in (step.abstract_state, step.state_on_host))
        host_parts[name] = sharded_bytes(jax.tree.map(lambda leaf, host: leaf if host else None, trees, hosts))
        parts[name] = sharded_bytes(trees) - host_parts[name]
    each = zip(jax.tree.leaves(batch), jax.tree.leaves(step.batch_shardings(batch)), strict=True)
    parts["batch"] = sum(math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, where in each)
    return {
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(step.abstract_state.params)),
        "parts": {name: size for name, size in parts.items() if size},
        "host_parts": {name: size for name, size in host_parts.items() if size},
    }


def planned_step(config: Config, workload: Workload, devices: list[Any] | None) -> "tuple[TrainStep, dict[str, Any]]":
    """The step of a config for devices (None: all of this process), and the shapes of its batch."""
    from jaxtrain.data.configured import open_run_data, training_batches
    from jaxtrain.train.build import build_step

    sizes = {name: getattr(workload, name) for name in ("input_shape", "vocab_size", "num_outputs")}
    step = build_step(config, **sizes, devices=devices)
    if isinstance(config.data, CalledData):
        return step, dict(training_batches(config, open_run_data(config)).spec())
    return step, batch_shapes(workload)


def state_bytes(step: "TrainStep") -> tuple[int, int]:
    """Return the bytes of a state on one device, and those of it that are kept in the host's memory."""
    import jax

    def if_on_host(leaf: Any, is_on_host: bool) -> Any:
        return leaf if is_on_host else None

    host_bytes = sharded_bytes(jax.tree.map(if_on_host, step.abstract_state, step.state_on_host))
    return sharded_bytes(step.abstract_state) - host_bytes, host_bytes


def sharded_bytes(tree: Any) -> int:
    """Bytes of a tree of shapes with shardings on one device; keys, of a few bytes, are left out."""
    import jax
    import jax.numpy as jnp

    leaves = [leaf for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def batch_shapes(workload: Workload) -> dict[str, Any]:
    """The global batch of a step as shapes, as the data would give it."""
    import numpy as np
    from jax import ShapeDtypeStruct

    rows, numbers = workload.rows, workload.numbers
    label = ShapeDtypeStruct((rows,), np.int32)
    if workload.unit != "tokens":
        return {"inputs": ShapeDtypeStruct((rows, *workload.input_shape), np.float32), "targets": label}
    tokens = ShapeDtypeStruct((rows, *workload.input_shape), np.int32)
    (length,) = workload.input_shape
    if workload.pairs:
        entries = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
        return {name: ShapeDtypeStruct((rows // 2, 2, length), dtype) for name, dtype in entries.items()}
    if workload.decoder_length is not None:
        written = ShapeDtypeStruct((rows, workload.decoder_length), np.int32)
        inputs = {"tokens": tokens, "decoder_tokens": written}
        if numbers != length + 2 * workload.decoder_length:  # texts of any length, which are padded
            inputs |= {"segments": tokens, "decoder_segments": written}
        return {"inputs": inputs, "targets": written}
    if workload.weighted:
        packed = {"tokens": tokens, "segments": tokens, "positions": tokens}
        inputs = packed if numbers == 5 * length else tokens
        return {"inputs": inputs, "targets": tokens, "weights": ShapeDtypeStruct(tokens.shape, np.float32)}
    if numbers in (None, 2 * length):
        return {"inputs": tokens, "targets": tokens}
    inputs = {"tokens": tokens, "segments": tokens}
    if numbers == 3 * length:
        return {"inputs": inputs, "targets": tokens}
    inputs |= {"token_types": tokens} if numbers == 3 * length + 1 else {}
    return {"inputs": inputs, "targets": label}


def ask(what: str, config: Config, target: Target) -> dict[str, Any]:
    """The answer of a process of its own about the step of a config on a target.

    Args:
        what: `memory`, by the target's compiler: the fields of `ExactMemory`; or `state`, on emulated devices: `state`
            as `step_state` gives it, and the fields of `Workload` as `workload`.
        config: the run, its degrees as numbers.
        target: hardware and count.

    Returns:
        That, or `error`, a line.
    """
    request = {
        "what": what,
        "config": config.model_dump(mode="json"),
        "topology": target.topology if what == "memory" else None,
        "num_slices": target.num_hosts if target.hardware.kind == "tpu" else 1,
        "num_devices": target.num_devices,
    }
    command = [sys.executable, "-m", "jaxtrain.plan.compile"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    if done.returncode:
        raised = re.findall(r"^[\w.]*(?:Error|Exception)\b.*$", done.stderr, re.MULTILINE)
        return {"error": f"the compiler failed: {(raised or [done.stderr[-300:].strip()])[-1][:300]}"}
    return json.loads(done.stdout.splitlines()[-1])


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request of `ask`, in the process that it started."""
    name = request["topology"]
    os.environ["JAX_PLATFORMS"] = "cpu"
    distributed.start_alone(emulate=request["num_devices"] if name is None else 1)
    import jax

    from jaxtrain.plan.topology import topology_devices

    config = Config.model_validate(request["config"])
    try:
        devices = jax.devices() if name is None else topology_devices(name, num_slices=request["num_slices"])
        workload = describe_workload(config)
        if request["what"] == "state":
            return {"state": step_state(config, workload, devices), "workload": dataclasses.asdict(workload)}
        return dataclasses.asdict(exact_memory(config, workload, devices))
    except UserError as error:
        return {"error": str(error), "is_data": isinstance(error, DataError)}
    except Exception as error:
        place = user_place(error) if called_parts(config) else None
        if place is None:
            raise
        return {"error": f"{place} raised {type(error).__name__}: {first_line(error)}"}


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
