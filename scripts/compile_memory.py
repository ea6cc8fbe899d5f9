"""Memory of steps on absent hardware, as its compilers report it, as JSON: the source of tests/plan/compiled.json.

    python scripts/compile_memory.py h100x8 "gpt2_124m" "llama3_8b data.sequence_length=4096 train.global_batch_size=8"

The script needs the compilers of the targets (pip install '.[aot]'). A row takes half a minute for a GPU and two
minutes for a TPU.
"""

import argparse
import json
import sys
from datetime import date

import jax

from jaxtrain.config import load_config
from jaxtrain.plan.compile import exact_memory
from jaxtrain.plan.targets import parse_targets
from jaxtrain.plan.topology import topology_devices
from jaxtrain.plan.workload import describe_workload
from jaxtrain.runtime import distributed


def main(on: str, configs: list[str]) -> None:
    """Print one row per config."""
    distributed.start(emulate=1, compilation_cache=None)
    target = parse_targets(on)[0]
    if target.topology is None:
        sys.exit(f"no compiler for {target.name}")
    devices = topology_devices(target.topology)
    for words in configs:
        name, *overrides = words.split()
        config = load_config(name, overrides=overrides, weights=False).config
        memory = exact_memory(config, describe_workload(config), devices)
        row = {
            "target": f"{target.hardware.name} x {target.num_devices}",
            "config": words,
            "state_bytes": memory.state_bytes,
            "peak_bytes": memory.peak_bytes,
            **({"host_bytes": memory.host_bytes} if memory.host_bytes else {}),
            "compile_seconds": round(memory.compile_seconds),
            "jax": jax.__version__,
            "date": date.today().isoformat(),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("configs", nargs="+")
    asked = parser.parse_args()
    main(asked.target, asked.configs)
