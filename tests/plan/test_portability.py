"""The train step compiles for TPUs and GPUs that are not here, on every layout, with the collectives it should have.

To add a layout, add a row to LAYOUTS.
"""

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# target: devices. How a step is partitioned does not depend on the generation of a TPU, so every layout is compiled
# for the first and, for the second, one of each kind: gathered in every layer, in stages, and with experts exchanged.
TPUS = {"v5e:2x4": 8, "v6e:2x4": 8}
V6E_LAYOUTS = ("fsdp=8", "pipe=2,fsdp=2,tensor=2,1f1b", "expert=4")
GPUS = {"h100:1x8": 8, "h100:2x8": 16}

# id: (degrees, keys of the model, arguments of make_train_step, collectives that must be in the program).
# `data` takes the devices that the degrees leave. A collective is its kind and the axis that it crosses.
LAYOUTS = {
    "fsdp=8": (dict(fsdp=8), {}, {}, {"all-gather fsdp", "reduce-scatter fsdp"}),
    "fsdp=4,tensor=2": (
        dict(fsdp=4, tensor=2),
        {},
        {},
        {"all-gather fsdp", "reduce-scatter fsdp", "all-reduce tensor"},
    ),
    "pipe=2,fsdp=2,tensor=2,1f1b": (
        dict(pipe=2, fsdp=2, tensor=2),
        {},
        dict(parallelism=dict(schedule="1f1b", microbatches=4)),
        {"collective-permute pipe", "all-gather fsdp", "all-reduce tensor"},
    ),
    "context=4,ring": (
        dict(context=4),
        {},
        dict(parallelism=dict(context_attention="ring")),
        {"collective-permute context"},
    ),
    "expert=4": (dict(expert=4), dict(experts=dict(num_experts=8, experts_per_token=2)), {}, {"all-to-all expert"}),
    "data": (dict(), {}, {}, {"all-reduce data"}),
    "data,zero=1": (
        dict(),
        {},
        dict(accumulation_steps=2, parallelism=dict(zero=1)),
        {"reduce-scatter data", "all-gather data"},
    ),
}

NEEDS = {
    "tpu": ("libtpu", "pip install 'jaxtrain[aot-tpu]'"),
    "gpu": ("jax_cuda12_plugin", "pip install 'jaxtrain[aot]'"),
}


# Stages whose inputs outweigh what a layer needs at once; compiled for the first TPU only.
ACTIVATIONS = {
    f"activations {schedule}": dict(
        target="v5e:2x4",
        degrees=dict(pipe=4),
        model=dict(num_layers=4, embed_dim=512, num_heads=4, mlp_dim=512),
        step=dict(parallelism=dict(schedule=schedule, microbatches=16)),
        rows=2 * 16 * 64,
        length=64,
        remat="full",
    )
    for schedule in ("gpipe", "1f1b")
}
# A model wide enough that the padding of arrays to tiles of 8 x 128 hides nothing; few rows, which compile faster.
STATE = {
    name: dict(target="v5e:2x4", degrees=degrees, model=dict(embed_dim=512), step={}, rows=8, length=32)
    for name, degrees in {"state zero-0": {}, "state zero-3": dict(fsdp=8)}.items()
}
# Layouts under which the linear layers run in 8 bits, and the sequence of the second is spread over two axes.
FP8 = {
    f"fp8 {target} {name}": dict(target=target, degrees=degrees, model=dict(num_kv_heads=4), step=step)
    for target, name, degrees, step in (
        ("h100:1x8", "fsdp=8", dict(fsdp=8), dict(policy="fp8")),
        (
            "h100:1x8",
            "fsdp=2,tensor=2,context=2",
            dict(fsdp=2, tensor=2, context=2),
            dict(policy="fp8", parallelism=dict(sequence_parallel=True)),
        ),
        ("v5e:2x4", "fsdp=4,tensor=2", dict(fsdp=4, tensor=2), dict(policy="fp8")),
    )
}
# Where a sequence and a head fill the kernel's tiles: accumulation (manual over data) and a pipeline, heads spread.
SPLASH = {
    f"splash {name}": dict(target="v5e:2x4", degrees=degrees, model=dict(embed_dim=256, num_heads=4), step=step)
    for name, degrees, step in (
        ("data=2,fsdp=2,tensor=2", dict(data=2, fsdp=2, tensor=2), dict(accumulation_steps=2)),
        (
            "pipe=2,fsdp=2,tensor=2",
            dict(pipe=2, fsdp=2, tensor=2),
            dict(parallelism=dict(schedule="1f1b", microbatches=4)),
        ),
    )
}


def layouts_of(target):
    return V6E_LAYOUTS if target.startswith("v6e") else tuple(LAYOUTS)


def rows(targets):
    more = {**ACTIVATIONS, **STATE, **SPLASH} if "v5e:2x4" in targets else {}
    more |= {name: row for name, row in FP8.items() if row["target"] in targets}
    return more | {
        f"{target} {layout}": dict(zip(("degrees", "model", "step"), LAYOUTS[layout], strict=False), target=target)
        for target in targets
        for layout in layouts_of(target)
    }


def compile_all(platform: str, targets, folder: Path) -> dict:
    """All rows in one process of their own: the plugins load once, and not here. Workers share what came out."""
    package, mend = NEEDS[platform]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: {mend}")
    with (folder / f"portability-{platform}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = folder / f"portability-{platform}.json"
        if not answer.exists():
            program = Path(__file__).with_name("compile_rows.py")
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(
                [sys.executable, "-W", "error", str(program)],
                input=json.dumps(rows(targets)),
                capture_output=True,
                text=True,
                timeout=600,
                env=environment,
            )
            answer.write_text(done.stdout if done.returncode == 0 else json.dumps({"failed": done.stderr[-5000:]}))
        results = json.loads(answer.read_text())
    assert "failed" not in results, results["failed"]
    return results


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder that the workers of one run of the tests share, and no other run."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def compiled_for_tpu(shared_folder):
    return compile_all("tpu", TPUS, shared_folder)


@pytest.fixture(scope="session")
def compiled_for_gpu(shared_folder):
    return compile_all("gpu", GPUS, shared_folder)


def check(result: dict, num_devices: int, layout: str, padding: int) -> None:
    assert "error" not in result, result["error"]
    assert result["devices"] == num_devices
    # What a device is given is its part of the state and of the batch, at most 2 x 32 rows x 128 int32.
    assert result["state_bytes"] < result["argument_bytes"] < padding * result["state_bytes"] + 2**15 + 64
    assert not result["permutes_in_branches"], "a permutation in a branch that some stages do not take waits for ever"
    missing = LAYOUTS[layout][3] - set(result["collectives"])
    assert not missing, f"{result['collectives']} without {missing}"


@pytest.mark.parametrize(("target", "layout"), [(target, layout) for target in TPUS for layout in layouts_of(target)])
def test_the_step_compiles_for_a_tpu(compiled_for_tpu, target, layout):
    # Arrays of a TPU are padded to tiles of 8 x 128, which weighs on a model as small as this.
    result = compiled_for_tpu[f"{target} {layout}"]
    # Temporaries of so small a program may all stand in the vector memory of a core, which is not counted.
    check(result, TPUS[target], layout, padding=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", GPUS)
def test_the_step_compiles_for_a_gpu(compiled_for_gpu, target, layout):
    result = compiled_for_gpu[f"{target} {layout}"]
    check(result, GPUS[target], layout, padding=1)
    assert result["temporary_bytes"] > 0
    outermost = "pipe" if "pipe" in layout else "data"
    assert result["crossing"] == ([] if target == "h100:1x8" else [outermost])


def test_1f1b_holds_less_than_half_the_activations_of_gpipe(compiled_for_tpu):
    """Four stages, 16 microbatches: what a device needs for a step besides state and accumulated gradients."""
    found = {name: compiled_for_tpu[name] for name in ACTIVATIONS}
    held = {name: result["temporary_bytes"] - result["gradient_bytes"] for name, result in found.items()}
    assert held["activations gpipe"] >= 2 * held["activations 1f1b"]


def test_zero_3_needs_a_quarter_of_the_state_at_most(compiled_for_tpu):
    """What a device is given of state and batch, as its compiler lays it out."""
    whole, spread = (compiled_for_tpu[name]["argument_bytes"] for name in STATE)
    assert spread <= whole / 4


def test_zero_3_sends_each_parameter_three_times(compiled_for_gpu):
    """Stage 3 on an H100: two gathers of P elements at most and one sum of P gradients, 2 bytes each."""
    found = compiled_for_gpu["h100:1x8 fsdp=8"]
    # Of float32, without what is gathered once because it stands outside the stack.
    once = found["gradient_bytes"] / 2
    sent = found["sent_bytes"]
    assert sent["reduce-scatter"] == pytest.approx(once, rel=0.02)
    assert once < sent["all-gather"] <= 2 * once
    # Counted twice; the gradients of norms may be summed so.
    assert sent["all-reduce"] / 2 <= 0.02 * once


@pytest.mark.parametrize("name", SPLASH)
def test_splash_attention_compiles_inside_manual_regions(compiled_for_tpu, name):
    result = compiled_for_tpu[name]
    assert "error" not in result, result["error"]
    assert result["choices"] == ["attention: splash"]
    assert result["kernel_calls"] >= 3  # forward, and two of the backward pass
    assert not result["permutes_in_branches"]


@pytest.mark.parametrize("name", [name for name, row in FP8.items() if row["target"] in GPUS])
def test_fp8_reaches_the_units_of_an_h100(compiled_for_gpu, name):
    """Forward and both backward products of every linear layer, and no wider product among them."""
    result = compiled_for_gpu[name]
    assert "error" not in result, result["error"]
    assert not result["permutes_in_branches"]
    for product, (native, emulated) in result["fp8_products"].items():
        # Of seven layers a block; the compiler joins those with one input, as q, k and v.
        assert native >= 4, product
        assert emulated == 0, product
    in_bf16 = compiled_for_gpu["h100:1x8 fsdp=8"]["fp8_products"]
    assert set(map(tuple, in_bf16.values())) == {(0, 0)}


def test_fp8_compiles_for_a_tpu(compiled_for_tpu):
    """There its products are emulated."""
    for name in [name for name, row in FP8.items() if row["target"] in TPUS]:
        result = compiled_for_tpu[name]
        assert "error" not in result, result["error"]
        assert result["temporary_bytes"] >= 0
