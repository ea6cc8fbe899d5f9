"""Number of products of the linear layers that a step computes in 8 bits on absent hardware, as JSON.

    python scripts/fp8_program.py h100x8 "llama3_8b data.sequence_length=4096 train.global_batch_size=8"

The script adds precision.policy=fp8 to the config. It needs the compiler of the target (pip install 'jaxtrain[aot]')
and takes half a minute.
"""

import argparse
import dataclasses
import json
import sys

import jax

from jaxtrain.bench.fp8_program import fp8_products
from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.compilers.exact import batch_shapes
from jaxtrain.plan.compilers.topology import compile_for, topology_devices
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.runtime import distributed
from jaxtrain.runtime.compiler import compile_trying
from jaxtrain.train.assemble import build_step


def main(on: str, configs: list[str]) -> None:
    """Print one row per config."""
    distributed.start(emulate=1, compilation_cache=None)
    target = parse_targets(on)[0]
    if target.topology is None:
        sys.exit(f"no compiler for {target.name}")
    devices = topology_devices(target.topology)
    for words in configs:
        name, *overrides = words.split()
        config = load_config(name, overrides=[*overrides, "precision.policy=fp8"]).config
        workload = describe_workload(config)
        step = build_step(
            config,
            input_shape=workload.input_shape,
            vocab_size=workload.vocab_size,
            num_outputs=workload.num_outputs,
            devices=devices,
        )
        lowered = step.lower(batch_shapes(workload))
        taken = compile_trying(
            lambda more, lowered=lowered: compile_for(devices[0], lowered, options=more), step.compiler_options.tried
        )
        text = taken.compiled.as_text() or ""
        products = {name: dataclasses.asdict(found) for name, found in fp8_products(text).items()}
        print(json.dumps({"target": target.name, "config": words, "jax": jax.__version__, **products}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("configs", nargs="+")
    asked = parser.parse_args()
    main(asked.target, asked.configs)
