"""The train step compiles for TPUs and GPUs that are not here, with the collectives and kernels it should have.

Each row is compiled in a process of its own, `python tests/plan/test_portability.py ROW`, so that the plugins that it
loads stay out of this one.
"""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest

TRANSFORMER = dict(num_layers=2, embed_dim=64, num_heads=8, max_sequence_length=128)
# A sequence and a head that fill the tiles of a TPU's attention kernel.
WIDE = dict(embed_dim=256, num_heads=4)
EXPERTS = dict(experts=dict(num_experts=8, experts_per_token=2))
STAGES = dict(pipe=2, fsdp=2, tensor=2)
# id: (target, degrees, keys of the model, arguments of make_train_step, collectives that must be in the program).
# `data` takes the devices that the degrees leave. A collective is its kind and the axis that it crosses.
ROWS = {
    "v5e data, fsdp, tensor": (
        *("v5e:2x4", dict(data=2, fsdp=2, tensor=2), WIDE, dict(accumulation_steps=2)),
        {"all-gather fsdp", "reduce-scatter fsdp", "all-reduce tensor", "all-reduce data"},
    ),
    "v5e stages": (
        *("v5e:2x4", STAGES, WIDE, dict(parallelism=dict(schedule="1f1b", microbatches=4))),
        {"collective-permute pipe", "all-gather fsdp", "all-reduce tensor"},
    ),
    "v6e": ("v6e:2x4", dict(fsdp=8), {}, {}, {"all-gather fsdp", "reduce-scatter fsdp"}),
    "v5e experts": ("v5e:2x4", dict(expert=4), EXPERTS, {}, {"all-to-all expert"}),
    "v5e ring": (
        *("v5e:2x4", dict(context=4), {}, dict(parallelism=dict(context_attention="ring"))),
        {"collective-permute context"},
    ),
    "v5e zero=1": (
        *("v5e:2x4", {}, {}, dict(accumulation_steps=2, parallelism=dict(zero=1))),
        {"reduce-scatter data", "all-gather data"},
    ),
    "8 h100": ("h100:1x8", dict(fsdp=8), {}, {}, {"all-gather fsdp", "reduce-scatter fsdp"}),
    "2 x 8 h100 stages": (
        *("h100:2x8", STAGES, {}, dict(parallelism=dict(schedule="1f1b", microbatches=4))),
        {"collective-permute pipe", "all-gather fsdp", "all-reduce tensor"},
    ),
    "2 x 8 h100 experts": ("h100:2x8", dict(expert=4), EXPERTS, {}, {"all-to-all expert"}),
    "8 h100 fp8": (
        *("h100:1x8", dict(fsdp=2, tensor=2, context=2), dict(num_kv_heads=4)),
        dict(policy="fp8", parallelism=dict(sequence_parallel=True)),
        {"all-gather fsdp"},
    ),
}
# Of each kind of compiler and layout one; the others are further rows.
PLAIN = ("v5e data, fsdp, tensor", "v5e stages", "v6e", "8 h100", "2 x 8 h100 stages")
# Stages whose inputs outweigh what a layer needs at once.
ACTIVATIONS = {
    f"activations {schedule}": (
        *("v5e:2x4", dict(pipe=2), dict(embed_dim=128, num_heads=2, mlp_dim=128, max_sequence_length=64)),
        dict(parallelism=dict(schedule=schedule, microbatches=16)),
        {"collective-permute pipe"},
    )
    for schedule in ("gpipe", "1f1b")
}


def fp8_products(program: str) -> dict[str, tuple[int, int]]:
    """Products of the scopes of `ops/linear.py` that multiply 8-bit numbers, and that multiply wider ones."""
    counts = {name: [0, 0] for name in ("fp8_forward", "fp8_input_gradient", "fp8_kernel_gradient")}
    types: dict[str, str] = {}
    for line in program.splitlines():
        types |= dict(re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = (\w+)\[", line))
        scope = next((name for name in counts if f"/{name}/" in line), None)
        call = re.search(r'custom_call_target="(__cublas[^"]*)"', line)
        dot = re.search(r"= .*? (?:dot|convolution)\(%?([\w.-]+), %?([\w.-]+)", line)
        if scope is not None and (call or dot):
            operands = dot.groups() if dot else ()
            native = call[1].endswith("$f8") if call else all(types.get(one, "").startswith("f8") for one in operands)
            counts[scope][not native] += 1
    return {name: (native, wider) for name, (native, wider) in counts.items()}


def compile_row(name: str) -> dict[str, Any]:
    """Compile the step of a row; what stands in its program."""
    import jax
    import numpy as np
    import optax
    from program_text import crosses

    from jaxtrain.config.model import TransformerConfig
    from jaxtrain.config.schema import Parallelism, Remat
    from jaxtrain.layout.mesh import crossing_axes, make_mesh
    from jaxtrain.models.shipped.build import build_model
    from jaxtrain.models.tasks import language_modeling
    from jaxtrain.parallel.programs import collectives
    from jaxtrain.plan.topology import compile_for, topology_devices
    from jaxtrain.runtime import distributed
    from jaxtrain.runtime.compiler import record_choices
    from jaxtrain.train.build import make_train_step

    distributed.start(emulate=1)
    target, degrees, keys, options, _ = {**ROWS, **ACTIVATIONS}[name]
    devices = topology_devices(target)
    mesh = make_mesh(**degrees, devices=devices)
    config = TransformerConfig.model_validate({**TRANSFORMER, **keys})
    held = name in ACTIVATIONS
    shape = (4 * 16 * 256 if held else 32, config.max_sequence_length)
    model = build_model(config, input_shape=shape[1:], vocab_size=512, remat=Remat(policy="full" if held else "dots"))
    options = {
        "policy": "bf16",
        "clip_norm": 1.0,
        **options,
        "parallelism": Parallelism(**options.get("parallelism", {})),
    }
    step = make_train_step(model, language_modeling(), optax.adamw(1e-3), mesh=mesh, **options)
    rows = jax.ShapeDtypeStruct(shape, np.int32)
    with record_choices() as choices:
        lowered = step.lower({"inputs": rows, "targets": rows})
    compiled = compile_for(devices[0], lowered)
    memory = compiled.memory_analysis()
    leaves = [leaf for leaf in jax.tree.leaves(step.abstract_state) if leaf.dtype != jax.random.key(0).dtype]
    # What TPUs fuse into `all-reduce-scatter` is the reduce-scatter that it is.
    text = "\n\n".join(
        block.replace(" all-reduce(", " reduce-scatter(") if block.startswith("%all-reduce-scatter") else block
        for block in compiled.as_text().split("\n\n")
    )
    found = collectives(text)
    return {
        "devices": len(devices),
        "crossing": crossing_axes(mesh),
        "state_bytes": sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves),
        # Float32, of the stage's layers and of all that stands outside the stack.
        "gradient_bytes": sum(
            4 * leaf.size // (mesh.shape["pipe"] if name == "blocks" else 1)
            for name, tree in step.abstract_state.params.items()
            for leaf in jax.tree.leaves(tree)
        ),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": sorted(
            {f"{one.kind} {axis}" for one in found for axis in mesh.shape if crosses(one, mesh, axis)}
        ),
        "permutes_in_branches": [one.line for one in found if one.kind == "collective-permute" and one.in_branch],
        "choices": choices,
        "kernel_calls": text.count("tpu_custom_call"),
        "fp8_products": fp8_products(text),
    }


def compiled(name: str) -> dict[str, Any]:
    """What a row's program holds, with the checks that all rows pass."""
    target, *_, wanted = {**ROWS, **ACTIVATIONS}[name]
    on_tpu = target.startswith("v")
    if importlib.util.find_spec("libtpu" if on_tpu else "jax_cuda12_plugin") is None:
        pytest.skip(f"no compiler for {target}: pip install '.[{'aot-tpu' if on_tpu else 'aot'}]'")
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, name],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout)
    missing = wanted - set(found["collectives"])
    assert not missing, f"{found['collectives']} without {missing}"
    assert not found["permutes_in_branches"], "a permutation in a branch that some stages do not take waits for ever"
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in PLAIN)) for name in ROWS])
def test_the_step_compiles(name: str) -> None:
    target, _, model, *_ = ROWS[name]
    found = compiled(name)
    assert found["devices"] == (16 if target == "h100:2x8" else 8)
    # What a device is given is its part of the state and of the batch, at most 2 x 32 rows x 128 int32. Arrays of a TPU
    # are padded to tiles of 8 x 128, which weighs on a model as small as this.
    padding = 4 if target.startswith("v") else 1
    assert found["state_bytes"] < found["argument_bytes"] < padding * found["state_bytes"] + 2**15 + 64
    outermost = "pipe" if "stages" in name else "data"
    assert found["crossing"] == ([outermost] if target == "h100:2x8" else [])
    if model is WIDE:
        # Inside regions that are manual over `data` or stages: forward, and two of the backward pass.
        assert found["choices"] == ["attention: splash"]
        assert found["kernel_calls"] >= 3
    if name == "8 h100 fp8":
        # Both backward products too. Of seven layers a block the compiler joins those with one input, as q, k and v.
        assert all(native >= 4 and not emulated for native, emulated in found["fp8_products"].values())
    elif "h100" in name:
        assert not any(map(any, found["fp8_products"].values()))


@pytest.mark.long
def test_1f1b_holds_less_than_half_the_activations_of_gpipe() -> None:
    """Two stages, 16 microbatches: what a device needs for a step besides state and accumulated gradients."""
    gpipe, one_f_one_b = (
        found["temporary_bytes"] - found["gradient_bytes"] for found in (compiled(name) for name in ACTIVATIONS)
    )
    assert gpipe >= 2 * one_f_one_b


if __name__ == "__main__":
    json.dump(compile_row(sys.argv[1]), sys.stdout)
