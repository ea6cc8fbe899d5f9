"""One compile for absent hardware, in a process of its own: a request as JSON comes in, the answer goes out."""

import dataclasses
import json
import os
import sys
from typing import Any

from jaxtrain.config.kinds import called_parts
from jaxtrain.config.schema import Config
from jaxtrain.errors import DataError, UserError
from jaxtrain.runtime import distributed
from jaxtrain.runtime.call import user_place


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Give the fields of `ExactMemory`, or of `StepState` and `Workload`, or `error`.

    Args:
        request: `what` is asked for, memory or state; `config` and the devices.
    """
    cpu = request["topology"] is None
    os.environ["JAX_PLATFORMS"] = "cpu"
    distributed.start_alone(emulate=request["num_devices"] if cpu else 1)
    from jaxtrain.plan.compilers.exact import exact_memory
    from jaxtrain.plan.compilers.step_state import step_state
    from jaxtrain.plan.compilers.topology import topology_devices
    from jaxtrain.plan.workload.describe import describe_workload

    config = Config.model_validate(request["config"])
    try:
        if cpu:
            import jax

            devices = jax.devices()
        else:
            devices = topology_devices(request["topology"], num_slices=request["num_slices"])
        workload = describe_workload(config)
        if request["what"] == "state":
            state = step_state(config, workload, devices)
            return {"state": dataclasses.asdict(state), "workload": dataclasses.asdict(workload)}
        return dataclasses.asdict(exact_memory(config, workload, devices))
    except UserError as error:
        return {"error": str(error), "is_data": isinstance(error, DataError)}
    except Exception as error:
        place = user_place(error) if called_parts(config) else None
        if place is None:
            raise
        return {"error": f"{place} raised {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
