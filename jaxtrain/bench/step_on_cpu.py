"""The step of a config on this machine's CPU, as a separate process: reads a request as JSON and prints seconds."""

import json
import os
import statistics
import sys
import time
from typing import Any


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the step of a config.

    Args:
        request: a dict with the entry `config`, the config as JSON.

    Returns:
        A dict with the entry `seconds`: the median of three steps after the first.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxtrain.config.schema import Config
    from jaxtrain.runtime import distributed

    distributed.start_alone(emulate=1, compilation_cache=None)
    import jax

    from jaxtrain.bench.whole_step import workload_step
    from jaxtrain.plan.workload.describe import describe_workload

    config = Config.model_validate(request["config"])
    workload = describe_workload(config)
    step, batches = workload_step(config, workload)
    step.compile(batches.spec())
    state, batch, seconds = step.init(config.seed), step.loader(batches)(0), []
    for _ in range(4):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds[1:])}


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
