"""The estimate of a step with functions of the user's own: exact bytes of the state, and no guess of the rest.

The step is built in a process of its own, on as many emulated devices as the hardware has: what its shapes say does
not depend on the kind of device. No jax here.
"""

from jaxtrain.config.kinds import called_parts
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.layout.rules import AXES
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.compilers.process import ask
from jaxtrain.plan.memory.record import Memory
from jaxtrain.plan.memory.step import reserved_bytes
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.workload.record import Workload


def own_functions(config: Config) -> str:
    """The keys of a config that name functions whose work no formula knows, as text; empty: there are none.

    Data is not among them: once it is opened, its rows are like any.
    """
    names = [f"{name}.call" for name in called_parts(config) if name != "data"]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def analyse_own(config: Config, target: Target) -> Estimate:
    """The memory of the state and the batch on a target; no time and no cost.

    Args:
        config: the run, its degrees as numbers.
        target: hardware and count.

    Raises:
        ConfigError: a function that cannot be called, parts that do not fit together, or a layout that the model or
            the batch cannot take.
        DataError: the data cannot be opened.
    """
    answer = ask(
        {
            "what": "state",
            "config": config.model_dump(mode="json"),
            "topology": None,
            "num_slices": 1,
            "num_devices": target.num_devices,
        }
    )
    if "error" in answer:
        raise (DataError if answer.get("is_data") else ConfigError)(answer["error"])
    state, workload = answer["state"], answer["workload"]
    capacity = target.hardware.memory_bytes or None
    functions = own_functions(config)
    return Estimate(
        config=config,
        target=target,
        degrees={axis: int(getattr(config.parallel, axis)) for axis in AXES},
        workload=Workload(
            **{**workload, "input_shape": tuple(workload["input_shape"]), "notes": tuple(workload["notes"])}
        ),
        num_parameters=state["num_parameters"],
        memory=Memory(
            {**state["parts"], "batch": state["batch_bytes"]},
            sum(state["parts"].values()),
            capacity,
            reserved_bytes(target),
            state["host_parts"],
            is_complete=False,
        ),
        time=None,
        cost=None,
        unknown=f"no formula knows the work of {functions}",
        notes=(
            f"{functions}: the bytes of the state and the batch are those of the step itself; its activations are "
            "known where a compiler checks the plan; its FLOPs, time and cost are not (jaxtrain bench measures the "
            "time on this machine)",
        ),
    )


def check_can_estimate(config: Config, option: str) -> None:
    """Raise where an option of a plan, or a run, needs the time of a step that no formula knows.

    Args:
        config: the run.
        option: what needs it, for the message.

    Raises:
        ConfigError: the config names functions of the user's own.
    """
    functions = own_functions(config)
    if functions:
        raise ConfigError(
            f"{option} needs the time of a step, which is not known of a function of your own ({functions}); set "
            "degrees, as in parallel.fsdp=auto, and compare layouts with jaxtrain plan and jaxtrain bench"
        )
