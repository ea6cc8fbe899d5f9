"""Memory of the very step that the trainer runs, from the compiler of hardware that is not here."""

import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtrain.config.schema import Config
from jaxtrain.plan.workload.record import Workload

if TYPE_CHECKING:
    from jaxtrain.data import Batches, Data
    from jaxtrain.data.stream import BatchStream
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

    Args:
        config: the run; its degrees multiply to the number of devices.
        workload: from `describe_workload`.
        devices: from `topology_devices`, or jax's own.

    Raises:
        ConfigError: a layout that the model cannot take.
        CompilerMissingError: no compiler for these devices.
    """
    import jax

    from jaxtrain.plan.compilers.topology import compile_for

    step, batch = planned_step(config, workload, devices)
    on_host = step.state_on_host
    moved = jax.tree.map(lambda leaf, host: leaf if host else None, step.abstract_state, on_host)
    host_bytes = sharded_bytes(moved)
    state_bytes = sharded_bytes(step.abstract_state) - host_bytes
    lowered = step.lower(batch)
    flags = _host_flags(on_host, batch, lowered)
    began = time.monotonic()
    try:
        compiled = compile_for(devices[0], lowered, on_host=flags)
    except jax.errors.JaxRuntimeError as error:
        used = _USED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or used is None:
            raise
        peak, capacity = (round(float(used[i]) * _UNITS[used[i + 1]]) for i in (1, 3))
        return ExactMemory(state_bytes, peak, None, capacity, time.monotonic() - began, host_bytes)
    memory = compiled.memory_analysis()
    assert memory is not None, "every compiler that compile_for has gives it"
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = arguments + outputs + temporaries + memory.generated_code_size_in_bytes
    host_bytes = max(host_bytes, memory.host_argument_size_in_bytes) + memory.host_temp_size_in_bytes
    return ExactMemory(state_bytes, peak, temporaries, None, time.monotonic() - began, host_bytes)


def planned_step(config: Config, workload: Workload, devices: list[Any] | None) -> "tuple[TrainStep, dict[str, Any]]":
    """The step of a config for devices, and the shapes of its batch.

    Args:
        config: the run.
        workload: from `describe_workload`.
        devices: real or compile-only; None: all of this process.
    """
    from jaxtrain.config.data import CalledData
    from jaxtrain.train.assemble import build_step, open_run_data

    step = build_step(
        config,
        input_shape=workload.input_shape,
        vocab_size=workload.vocab_size,
        num_outputs=workload.num_outputs,
        devices=devices,
    )
    if isinstance(config.data, CalledData):
        return step, dict(stand_in_batches(config, open_run_data(config), step).spec())
    return step, batch_shapes(workload)


def stand_in_batches(config: Config, data: "Data", step: "TrainStep") -> "Batches | BatchStream":
    """The training batches of a step that is planned or measured: what a run computes of its rows first is 0."""
    from jaxtrain.train.assemble import training_batches
    from jaxtrain.train.reference import awaiting_reference, lacks_reference

    batches = training_batches(config, data)
    if not lacks_reference(step.task, batches.spec()):
        return batches
    return training_batches(config, awaiting_reference(step, data, batches.spec(), value=0.0))


def _host_flags(on_host: Any, batch: dict[str, Any], lowered: Any) -> tuple[list[bool], list[bool]] | None:
    """Which arguments (state, batch) and results (state, metrics) of a step lie on the host; None where none does."""
    import jax

    state = jax.tree.leaves(on_host)
    if not any(state):
        return None
    num_results = len(jax.tree.leaves(lowered.out_info))
    return [*state, *[False] * len(jax.tree.leaves(batch))], [*state, *[False] * (num_results - len(state))]


def sharded_bytes(tree: Any) -> int:
    """Bytes of a tree of shapes with shardings on one device; keys, of a few bytes, are left out."""
    import jax
    import jax.numpy as jnp

    leaves = [leaf for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def batch_shapes(workload: Workload) -> dict[str, Any]:
    """The global batch of a step as shapes, as the data would give it."""
    import jax
    import numpy as np

    rows = workload.rows
    if workload.unit == "tokens":
        tokens = jax.ShapeDtypeStruct((rows, *workload.input_shape), np.int32)
        (length,) = workload.input_shape
        if workload.pairs:
            entries = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
            pairs = {name: jax.ShapeDtypeStruct((rows // 2, 2, length), dtype) for name, dtype in entries.items()}
            return pairs | {"reference": jax.ShapeDtypeStruct((rows // 2, 2), np.float32)}
        if workload.decoder_length is not None:
            written = jax.ShapeDtypeStruct((rows, workload.decoder_length), np.int32)
            inputs = {"tokens": tokens, "decoder_tokens": written}
            if workload.numbers != length + 2 * workload.decoder_length:  # texts of any length, which are padded
                inputs |= {"segments": tokens, "decoder_segments": written}
            return {"inputs": inputs, "targets": written}
        if workload.weighted:
            packed = {"tokens": tokens, "segments": tokens, "positions": tokens}
            inputs = packed if workload.numbers == 5 * length else tokens
            return {"inputs": inputs, "targets": tokens, "weights": jax.ShapeDtypeStruct(tokens.shape, np.float32)}
        if workload.numbers in (None, 2 * length):
            return {"inputs": tokens, "targets": tokens}
        inputs = {"tokens": tokens, "segments": tokens}
        if workload.numbers == 3 * length:
            return {"inputs": inputs, "targets": tokens}
        inputs |= {"token_types": tokens} if workload.numbers == 3 * length + 1 else {}
        return {"inputs": inputs, "targets": jax.ShapeDtypeStruct((rows,), np.int32)}
    inputs = jax.ShapeDtypeStruct((rows, *workload.input_shape), np.float32)
    return {"inputs": inputs, "targets": jax.ShapeDtypeStruct((rows,), np.int32)}
