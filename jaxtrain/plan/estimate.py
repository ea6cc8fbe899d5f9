"""A config on hardware: memory, time and cost, from arithmetic alone. Milliseconds, and no jax."""

from dataclasses import dataclass

from jaxtrain.config.kinds import called_parts
from jaxtrain.config.model import TransformerConfig
from jaxtrain.config.optimizers import check_schedule
from jaxtrain.config.schema import BLOCK_INPUT, Config
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.layout.rules import AXES
from jaxtrain.plan.compile import ExactMemory, ask
from jaxtrain.plan.cost import Cost, run_cost
from jaxtrain.plan.memory import Memory, reserved_bytes, step_memory
from jaxtrain.plan.state import state_bytes
from jaxtrain.plan.step import device_step, with_degrees
from jaxtrain.plan.targets import Target, rented_devices
from jaxtrain.plan.time import StepTime, has_fp8, step_time
from jaxtrain.plan.workload import RowSizes, Workload, describe_workload, model_tensors


@dataclass(frozen=True)
class Estimate:
    """A config on a target.

    Attributes:
        config: the run, its degrees as numbers.
        target: hardware and count.
        degrees: mesh axis -> degree.
        workload: rows of a step.
        num_parameters: of the model.
        memory: analytic.
        time: None where no peak of the hardware is known for the run's number format.
        cost: of the whole run; None without a time.
        exact: memory by the target's own compiler; None: not compiled.
        exact_missing: why there is none, in a line; None where there is one or none was asked for.
        unknown: what is not known of functions of the user's own, in a few words; None: all is estimated.
        fitted: the layout that was taken in place of the config's, and why, in a line; None: it is the config's.
        notes: assumptions and warnings for people.
        advice: changes that make it fit, where it does not.
    """

    config: Config
    target: Target
    degrees: dict[str, int]
    workload: Workload
    num_parameters: int
    memory: Memory
    time: StepTime | None
    cost: Cost | None
    exact: ExactMemory | None = None
    exact_missing: str | None = None
    unknown: str | None = None
    fitted: str | None = None
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Of one device, by the compiler where it was asked, else by the analytic model."""
        return self.memory.total_bytes if self.exact is None else self.exact.peak_bytes

    @property
    def room_bytes(self) -> int | None:
        """What one device has for a step; None where it is not known."""
        return (self.exact and self.exact.capacity_bytes) or self.memory.usable_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the peak has room; None where the capacity is not known."""
        if self.exact is None or self.memory.capacity_bytes is None:
            return self.memory.fits
        return self.peak_bytes <= (self.room_bytes or 0)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second over all devices; None for other rows or without a time."""
        return self.workload.tokens / self.time.seconds if self.time and self.workload.tokens else None

    @property
    def rows_per_second(self) -> float | None:
        """Rows a second over all devices."""
        return self.workload.rows / self.time.seconds if self.time else None


def analyse(config: Config, target: Target, *, sizes: RowSizes | None = None) -> Estimate:
    """Memory, time and cost of a config on a target.

    Args:
        config: the run; a degree `auto` is computed from the number of devices of the target.
        target: hardware and count.
        sizes: of rows from Python that replace the config's data.

    Returns:
        An estimate; its time and cost are None where no peak is known for the number format, and for functions of the
        user's own.

    Raises:
        ConfigError: a layout that the model or the batch cannot take, or a size that only the data gives.
    """
    if config.precision.policy == "fp8" and config.model.kind == "resnet":
        raise ConfigError("precision.policy=fp8 is for linear layers, and a resnet has none; use precision.policy=bf16")
    if config.optimizer.learning_rate is not None and config.train.epochs is None:
        check_schedule(config.optimizer.schedule, config.train.steps)
    config = with_degrees(config, target.num_devices)
    if target.hardware.kind == "cpu":
        config = _on_one_memory(config)
    if own_functions(config):
        return _analyse_own(config, target)
    workload = describe_workload(config, sizes)
    step = device_step(config, target, workload)
    degrees = dict(step.degrees)
    state = state_bytes(config, step.stored, step.placed, degrees)
    memory = step_memory(step, state, target)
    time = step_time(step, state, target, memory.host_parts)
    cost = None if time is None else run_cost(config.train.steps, time.seconds, target)
    num_parameters = model_tensors(config.model, workload).num_parameters
    notes = (*workload.notes, *_notes(config, target, has_time=time is not None))
    return Estimate(config, target, degrees, workload, num_parameters, memory, time, cost, notes=notes)


def _on_one_memory(config: Config) -> Config:
    """The config as a CPU runs it, whose device memory is the host's: what is offloaded stays where it is."""
    remat, optimizer = config.remat, config.optimizer
    kept = tuple(name for name in remat.offload if name != BLOCK_INPUT)
    remat = remat.model_copy(update={"names": (*remat.names, *kept), "offload": ()})
    if kept and remat.policy == "full":
        remat = remat.model_copy(update={"policy": "names"})
    return config.model_copy(update={"remat": remat, "optimizer": optimizer.model_copy(update={"offload": False})})


def _notes(config: Config, target: Target, *, has_time: bool) -> list[str]:
    hardware, rented, notes = target.hardware, rented_devices(target), []
    if not has_time:
        lacks = f"{hardware.title} has no published rate for precision.policy={config.precision.policy}: no time"
        notes.append(f"{lacks}; set precision.policy=fp16" if "fp16" in hardware.peak_flops else lacks)
    elif rented != target.num_devices and (hardware.on_demand_usd_hour or hardware.spot_usd_hour):
        notes.append(
            f"{hardware.name} is rented in units of {', '.join(map(str, hardware.shapes))}: the cost is for "
            f"{rented} devices, of which {target.num_devices} {'is' if target.num_devices == 1 else 'are'} used"
        )
    if config.precision.policy == "fp8" and not has_fp8(target):
        notes.append(
            f"{hardware.title} has no fp8 units that jaxtrain uses: precision.policy=fp8 gives the same "
            "numbers through bf16 matmuls, with the rounding on top; bf16 is faster"
        )
    elif config.precision.policy == "fp8" and isinstance(config.model, TransformerConfig) and config.model.experts:
        notes.append("precision.policy=fp8: the experts' matmuls run in bf16")
    return notes


def own_functions(config: Config) -> str:
    """The keys of a config that name functions whose work no formula knows, as text; empty: there are none.

    Data is not among them: once it is opened, its rows are like any.
    """
    names = [f"{name}.call" for name in called_parts(config) if name != "data"]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def check_can_estimate(config: Config, option: str) -> None:
    """Raise where an option of a plan, or a run, needs the time of a step that no formula knows.

    Raises:
        ConfigError: the config names functions of the user's own.
    """
    if functions := own_functions(config):
        raise ConfigError(
            f"{option} needs the step time, which is unknown for your own functions ({functions}); set "
            "degrees, as in parallel.fsdp=auto, and compare layouts with jaxtrain plan and jaxtrain bench"
        )


def _analyse_own(config: Config, target: Target) -> Estimate:
    """The memory of the state and the batch of functions of the user's own, from emulated devices; no time, no cost."""
    answer = ask("state", config, target)
    if "error" in answer:
        raise (DataError if answer.get("is_data") else ConfigError)(answer["error"])
    state, workload, functions = answer["state"], answer["workload"], own_functions(config)
    between = sum(size for name, size in state["parts"].items() if name != "batch")
    capacity, reserved = target.hardware.memory_bytes or None, reserved_bytes(target)
    memory = Memory(state["parts"], between, capacity, reserved, state["host_parts"], is_complete=False)
    shape, notes = tuple(workload["input_shape"]), tuple(workload["notes"])
    return Estimate(
        config=config,
        target=target,
        degrees={axis: int(getattr(config.parallel, axis)) for axis in AXES},
        workload=Workload(**{**workload, "input_shape": shape, "notes": notes}),
        num_parameters=state["num_parameters"],
        memory=memory,
        time=None,
        cost=None,
        unknown=f"no formula covers the work of {functions}",
    )
