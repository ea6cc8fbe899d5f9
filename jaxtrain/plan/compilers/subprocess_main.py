"""One compile for absent hardware, in a process of its own: a request as JSON comes in, the answer goes out."""

import dataclasses
import json
import os
import sys
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.runtime import distributed


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Compile and give `ExactMemory`'s fields, or `error`."""
    cpu = request["topology"] is None
    os.environ["JAX_PLATFORMS"] = "cpu"
    distributed.start(emulate=request["num_devices"] if cpu else 1)
    from jaxtrain.plan.compilers.exact import exact_memory
    from jaxtrain.plan.compilers.topology import topology_devices
    from jaxtrain.plan.workload.describe import describe_workload

    config = Config.model_validate(request["config"])
    try:
        if cpu:
            import jax

            devices = jax.devices()
        else:
            devices = topology_devices(request["topology"], num_slices=request["num_slices"])
        return dataclasses.asdict(exact_memory(config, describe_workload(config), devices))
    except ConfigError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
