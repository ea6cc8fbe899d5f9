"""What train steps of 8B models for eight absent devices hold: fused attention, and no whole scores or logits.

 `python tests/plan/test_large_programs.py TARGET` inspects the train steps of a target in a
process of its own, so that the plugins that it loads stay out of this one.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

LENGTH = 8192
# One sequence a device; 8,192 tokens each.
BATCH = ["train.global_batch_size=8", "train.accumulation_steps=1", "parallel.data=1", f"data.sequence_length={LENGTH}"]
TARGETS = {"h100x8": ("cudnn", "__cudnn$fmhaSoftmaxBackward"), "v5px8": ("splash", "tpu_custom_call")}


def program(on: str, *words: str) -> str:
    """What a program of Python prints, where the compiler of a target is installed."""
    package = "jax_cuda12_plugin" if on.startswith("h") else "libtpu"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[aot,aot-tpu]'")
    # The tests' emulated devices come from a flag that libtpu ends the process for.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def inspect(name: str, *overrides: str) -> dict[str, Any]:
    """The kernels, and the arrays of the size of all scores of a head or all logits of a sequence, of a train step."""
    from jaxtrain.config import load_config
    from jaxtrain.plan.compile import planned_step
    from jaxtrain.plan.targets import parse_targets
    from jaxtrain.plan.topology import compile_for, topology_devices
    from jaxtrain.plan.workload import describe_workload
    from jaxtrain.runtime.compiler import record_choices

    target = parse_targets(name)[0]
    assert target.topology is not None
    devices = topology_devices(target.topology)
    config = load_config("llama3_8b", overrides=[*BATCH, *overrides]).config
    workload = describe_workload(config)
    step, batch = planned_step(config, workload, devices)
    with record_choices() as choices:
        lowered = step.lower(batch)
    compiles = devices[0].platform == "gpu"
    # libtpu cannot print so large a program (0.0.51: a check of async-update fails), so that what it is given is read.
    text = compile_for(devices[0], lowered).as_text() if compiles else lowered.as_text()
    lines = [line for line in text.splitlines() if "/optimizer/" not in line]
    shapes = {match for line in lines for match in re.findall(r"\[([\d,]+)\]|tensor<([\dx]+)x[a-z]", line)}
    dims = [tuple(int(n) for n in re.split("[,x]", brackets or tensor)) for brackets, tensor in shapes]
    return {
        "choices": choices,
        "kernels": sorted(set(re.findall(r'custom_call_target="([^"]+)"', text) + re.findall(r"@(tpu_\w+)", text))),
        "squares": [shape for shape in dims if shape.count(LENGTH) > 1],
        "logits": [shape for shape in dims if workload.vocab_size in shape and LENGTH in shape],
    }


@pytest.mark.parametrize("name", TARGETS)
def test_attention_is_fused_and_logits_are_never_whole(name: str) -> None:
    fused, plain = json.loads(program(name, __file__, name))
    choice, kernel = TARGETS[name]
    assert f"attention: {choice}" in fused["choices"]
    assert kernel in fused["kernels"]
    assert fused["squares"] == fused["logits"] == []
    # The same search finds the scores of a sequence and its logits in the program that has them.
    assert plain["squares"]
    assert plain["logits"]


if __name__ == "__main__":
    from jaxtrain.runtime import distributed

    distributed.start(emulate=1)
    plain = ("model.attention=reference", "loss.logits=whole")
    json.dump([inspect(sys.argv[1]), inspect(sys.argv[1], *plain)], sys.stdout)
