"""Compile whole configs for hardware that is not here; what `test_structures_compiled.py` runs.

A program of its own, so that the plugins that it loads stay out of the process of the other tests. Reads rows as JSON
from standard input, {id: [target, config, overrides]}, and prints {id: what came out}.
"""

import json
import sys

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.compilers.exact import exact_memory
from jaxtrain.plan.compilers.topology import topology_devices
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.runtime import distributed

if __name__ == "__main__":
    distributed.start(emulate=1, compilation_cache=None)
    results = {}
    for row_id, (target_name, name, overrides) in json.load(sys.stdin).items():
        try:
            (target,) = parse_targets(target_name, None)
            assert target.topology is not None, "these targets have compilers"
            config = load_config(name, overrides=overrides).config
            memory = exact_memory(config, describe_workload(config), topology_devices(target.topology))
            found = {"state_bytes": memory.state_bytes, "peak_bytes": memory.peak_bytes}
            results[row_id] = {**found, "compile_seconds": memory.compile_seconds}
        except Exception as error:
            results[row_id] = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
    json.dump(results, sys.stdout)
