"""What the step of Llama-3 8B holds for hardware that is not here; what `test_large_programs.py` runs.

A program of its own, so that the plugins that it loads stay out of the process of the other tests. Takes a target and
key=value words, and prints {target: what stands in the program}.
"""

import json
import re
import sys
from typing import Any

import jax

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.compilers.exact import batch_shapes
from jaxtrain.plan.compilers.topology import compile_for, topology_devices
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.runtime import distributed
from jaxtrain.runtime.choices import record_choices
from jaxtrain.train.assemble import build_step

LENGTH = 8192
# One sequence a device; 8,192 tokens each.
ROWS = ["train.global_batch_size=8", "train.accumulation_steps=1", "parallel.data=1"]


def inspect(name: str, overrides: list[str]) -> dict[str, Any]:
    target = parse_targets(name)[0]
    devices = topology_devices(target.topology)
    config = load_config("llama3_8b", overrides=[f"data.sequence_length={LENGTH}", *ROWS, *overrides]).config
    workload = describe_workload(config)
    step = build_step(config, input_shape=workload.input_shape, vocab_size=workload.vocab_size, devices=devices)
    with record_choices() as choices:
        lowered = step.lower(batch_shapes(workload))
    compiles = devices[0].platform == "gpu"
    # libtpu cannot print so large a program (0.0.51: a check of async-update fails), so that what it is given is read.
    text = compile_for(devices[0], lowered).as_text() if compiles else lowered.as_text()
    lines = [line for line in text.splitlines() if "/optimizer/" not in line]
    shapes = {match for line in lines for match in re.findall(r"\[([\d,]+)\]|tensor<([\dx]+)x[a-z]", line)}
    dims = [tuple(int(n) for n in re.split("[,x]", brackets or tensor)) for brackets, tensor in shapes]
    vocabulary = workload.vocab_size
    return {
        "choices": choices,
        "kernels": sorted(set(re.findall(r'custom_call_target="([^"]+)"', text) + re.findall(r"@(tpu_\w+)", text))),
        # Of the size of all scores of a head, and of all logits of a sequence.
        "squares": [shape for shape in dims if shape.count(LENGTH) > 1],
        "logits": [shape for shape in dims if vocabulary in shape and LENGTH in shape],
    }


if __name__ == "__main__":
    distributed.start(emulate=1)
    jax.config.update("jax_platforms", "cpu")
    json.dump({sys.argv[1]: inspect(sys.argv[1], sys.argv[2:])}, sys.stdout)
