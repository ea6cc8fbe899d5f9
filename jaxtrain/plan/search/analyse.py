"""A config on hardware: memory, time and cost, from arithmetic alone. Milliseconds, and no jax."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.config.kinds import PREFERENCES, check_roll_back, task_name
from jaxtrain.config.model import EncoderDecoderConfig, TransformerConfig, ViTConfig
from jaxtrain.config.optimizers import check_schedule
from jaxtrain.config.schema import BLOCK_INPUT, Config
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import (
    AXES,
    DEFAULT_RULES,
    check_replicated_share,
    check_tensor_used,
    config_degrees,
    entry_axes,
    resolve_degrees,
)
from jaxtrain.parallel.division import (
    batch_shards,
    check_model_axes,
    check_rows,
    check_sequence,
    check_task_stages,
    check_zero,
    microbatches_by_name,
    pipeline_schedule,
    sequence_axes,
    step_microbatches,
)
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.plan.catalogue.hardware import Target, rented_devices
from jaxtrain.plan.cost.spot import INTERRUPTIONS_PER_NODE_HOUR
from jaxtrain.plan.cost.training import Cost, training_cost, unplanned_downtime
from jaxtrain.plan.memory.step import step_memory
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.search.own_step import analyse_own, own_functions
from jaxtrain.plan.search.run_length import with_length
from jaxtrain.plan.time.step import has_fp8, step_time
from jaxtrain.plan.work.attention import AttentionWork, stack_attention
from jaxtrain.plan.work.block import DeviceBatch
from jaxtrain.plan.work.experts import ExpertWork, expert_work
from jaxtrain.plan.work.state import Parameter, shard_parameters, state_bytes
from jaxtrain.plan.workload.describe import RowSizes, describe_workload
from jaxtrain.plan.workload.parameters import model_structure, model_tensors
from jaxtrain.plan.workload.record import Workload

# What cloud disks and object stores take of one host. Saves are written while training goes on, so this is the most
# that one can cost.
_SAVE_BYTES_PER_SECOND = 1e9
# A new machine, the program compiled or read from the cache, the state read.
_RESTART_SECONDS = 300.0
_LEAST_SAVE_SECONDS = 5.0
_MAY_BE_ZERO = ("usd_per_kwh", "downtime")


@dataclass(frozen=True)
class Terms:
    """What a cost depends on besides hardware and time.

    Attributes:
        tokens: to train on; None, without `epochs` too: as many steps as the config says.
        epochs: to train for, with `rows_per_epoch`.
        rows_per_epoch: rows of the data.
        usd_per_kwh: of electricity.
        interruptions_per_node_hour: how often spot devices are taken away.
        checkpoint_interval_seconds: on spot devices; None: the one that wastes least.
        downtime: unplanned, as a share of the time to train; None: `unplanned_downtime`.

    Raises:
        ConfigError: a number that is not positive.
    """

    tokens: float | None = None
    epochs: float | None = None
    rows_per_epoch: int | None = None
    usd_per_kwh: float = 0.12
    interruptions_per_node_hour: float = INTERRUPTIONS_PER_NODE_HOUR
    checkpoint_interval_seconds: float | None = None
    downtime: float | None = None

    def __post_init__(self):
        if self.downtime is not None and not 0 <= self.downtime < 1:
            raise ConfigError(f"downtime is {self.downtime}; give a share of the time, as in 0.1")
        for name, number in dataclasses.asdict(self).items():
            if number is not None and not (0 < number < math.inf or (number == 0 and name in _MAY_BE_ZERO)):
                raise ConfigError(f"{name} is {number}; give a positive number")


def with_degrees(config: Config, num_devices: int) -> Config:
    """The config with every degree a number.

    Raises:
        ConfigError: degrees that do not multiply to the device count.
    """
    degrees = resolve_degrees(config_degrees(config.parallel), num_devices)
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=degrees)})


def analyse(config: Config, target: Target, terms: Terms | None = None, *, sizes: RowSizes | None = None) -> Estimate:
    """Memory, time and cost of a config on a target.

    Args:
        config: the run; a degree `auto` is computed from the number of devices of the target.
        target: hardware and count.
        terms: what the cost assumes (steps, electricity, interruptions); None: `Terms()`.
        sizes: of rows from Python that replace the config's data; None: the config's data.

    Returns:
        An estimate; its time and cost are None where no peak is known for the number format, and for functions of the
        user's own. Its config has the steps that the terms ask for.

    Raises:
        ConfigError: a layout that the model or the batch cannot take, a size that only the data gives, or terms that
            the data cannot meet.
    """
    if config.precision.policy == "fp8" and config.model.kind == "resnet":
        raise ConfigError(
            "precision.policy=fp8 is for linear layers, and a resnet has none: nothing would run in it; "
            "use precision.policy=bf16"
        )
    check_roll_back(config.spikes, config.checkpoint)
    if config.optimizer.learning_rate is not None:
        # Of the run that the config describes: `--tokens` asks what others cost.
        check_schedule(config.optimizer.schedule, config.train.steps)
    config = with_degrees(config, target.num_devices)
    if target.hardware.kind == "cpu":
        config = _on_one_memory(config)
    if own_functions(config):
        return analyse_own(config, target)
    workload, terms = describe_workload(config, sizes), terms or Terms()
    config = with_length(
        config, workload, tokens=terms.tokens, epochs=terms.epochs, rows_per_epoch=terms.rows_per_epoch
    )
    degrees = {axis: getattr(config.parallel, axis) for axis in AXES}
    schedule = _schedule(config, degrees)
    # What most layouts of a search are refused for comes before what takes longer.
    check_rows(config.train.global_batch_size, degrees, microbatches_by_name(schedule, config.train.accumulation_steps))
    tensors = model_tensors(config.model, workload)
    attention = stack_attention(config, target, model_structure(config.model, workload))
    # It refuses experts that do not divide, which are counted per device next.
    placed = shard_parameters(config, tensors, degrees)
    rows = workload.rows / batch_shards(degrees) / microbatches_of(config)
    experts = expert_work(config, target, rows * (workload.sequence_length or 1) / degrees["context"])
    batch = device_batch(config, workload, schedule, attention, experts)
    _check_tensor(config, placed, degrees["tensor"])
    _check_replicated(config, placed, degrees["fsdp"])
    state = state_bytes(config, tensors, placed, degrees)
    memory = step_memory(config, workload, target, placed, state, batch, schedule)
    time = step_time(config, workload, target, placed, state, batch, schedule, memory.host_parts)
    alone: dict[str, int] = {axis: 1 for axis in AXES}
    whole = state_bytes(config, tensors, shard_parameters(config, tensors, alone), alone)
    # Checkpoints of adapters name their base and do not hold it; what `optimizer.freeze` names is saved like the rest.
    saved = whole.total - (whole.frozen if config.finetune.lora is not None else 0)
    cost = None if time is None else run_cost(config, target, saved, time.seconds, terms)
    return Estimate(
        config=config,
        target=target,
        degrees=degrees,
        workload=workload,
        num_parameters=tensors.num_parameters,
        memory=memory,
        time=time,
        cost=cost,
        notes=_notes(config, target, workload, batch, has_time=time is not None),
    )


def _check_tensor(config: Config, placed: Sequence[Parameter], tensor: int) -> None:
    """Raise where the step would refuse that no parameter is sharded over `tensor`."""
    sizes = {one.path: math.prod(one.shape) for one in placed}
    sharded = [one.path for one in placed if any("tensor" in entry_axes(entry) for entry in one.entries)]
    name = getattr(config.model, "size", None) or config.model.kind
    check_tensor_used(sizes, sharded, tensor, DEFAULT_RULES, model=name)


def _check_replicated(config: Config, placed: Sequence[Parameter], fsdp: int) -> None:
    """Raise where the step would refuse that so many parameters are not sharded over `fsdp`."""
    if fsdp == 1:
        return
    sizes = {one.path: math.prod(one.shape) for one in placed}
    sharded = {one.path for one in placed if any("fsdp" in entry_axes(entry) for entry in one.entries)}
    replicated = {path: size for path, size in sizes.items() if path not in sharded}
    check_replicated_share(replicated, sum(sizes.values()), fsdp, config.parallel.max_replicated_fraction)


def _schedule(config: Config, degrees: dict[str, int]) -> Schedule | None:
    """The pipeline's table, by the rules of the step.

    Raises:
        ConfigError: an axis that the model or the task cannot use, or layers that do not divide.
    """
    model = config.model
    check_zero(degrees, config.parallel.zero)
    check_model_axes(
        degrees,
        model=model.kind,
        task=task_name(config),
        has_parts=isinstance(model, TransformerConfig | ViTConfig),
        has_sequence=isinstance(model, TransformerConfig | EncoderDecoderConfig),
        has_experts=isinstance(model, TransformerConfig) and model.experts is not None,
    )
    # The losses that compare two answers call the model for each.
    check_task_stages(degrees, task=task_name(config), calls_model=config.task in PREFERENCES)
    num_layers = model.num_layers if isinstance(model, TransformerConfig | ViTConfig) else None
    return pipeline_schedule(config.parallel, degrees["pipe"], num_layers, config.train.accumulation_steps)


def microbatches_of(config: Config) -> int:
    """Microbatches of a step, of accumulation or of a pipeline."""
    return step_microbatches(config.parallel, int(config.parallel.pipe), config.train.accumulation_steps)


def _on_one_memory(config: Config) -> Config:
    """The config as a CPU runs it, whose device memory is the host's: what is offloaded stays where it is."""
    remat, optimizer = config.remat, config.optimizer
    kept = tuple(name for name in remat.offload if name != BLOCK_INPUT)
    remat = remat.model_copy(update={"names": (*remat.names, *kept), "offload": ()})
    if kept and remat.policy == "full":
        remat = remat.model_copy(update={"policy": "names"})
    return config.model_copy(update={"remat": remat, "optimizer": optimizer.model_copy(update={"offload": False})})


def device_batch(
    config: Config,
    workload: Workload,
    schedule: Schedule | None,
    attention: tuple[AttentionWork, ...],
    experts: ExpertWork | None,
) -> DeviceBatch:
    """What one device gets of a batch.

    Raises:
        ConfigError: the sequence does not divide.
    """
    degrees = {axis: getattr(config.parallel, axis) for axis in AXES}
    if workload.sequence_length is not None:
        axes = sequence_axes(sequence_parallel=config.parallel.sequence_parallel)
        check_sequence(workload.sequence_length, degrees, axes)
    shards, microbatches = batch_shards(degrees), microbatches_of(config)
    scaled = config.precision.policy == "fp8"
    rows = workload.rows / shards / microbatches
    return DeviceBatch(microbatches, rows, degrees, attention, scaled, experts)


def run_cost(config: Config, target: Target, saved_bytes: int, step_seconds: float, terms: Terms) -> Cost:
    """The cost of a whole run at a step time, with checkpoints of so many bytes."""
    hardware = target.hardware
    num_machines = max(target.num_hosts, math.ceil(target.num_devices / hardware.devices_per_host))
    return training_cost(
        step_seconds=step_seconds,
        steps=config.train.steps,
        num_devices=target.num_devices,
        num_nodes=target.num_hosts,
        rented_devices=rented_devices(target),
        watts=hardware.board_watts,
        on_demand_usd_hour=hardware.on_demand_usd_hour,
        spot_usd_hour=hardware.spot_usd_hour,
        purchase_usd=hardware.purchase_usd,
        interruptions_per_node_hour=terms.interruptions_per_node_hour,
        # All hosts write at once, each its part; what is replicated is written once.
        save_seconds=max(_LEAST_SAVE_SECONDS, saved_bytes / num_machines / _SAVE_BYTES_PER_SECOND),
        restart_seconds=_RESTART_SECONDS,
        checkpoint_interval_seconds=terms.checkpoint_interval_seconds,
        usd_per_kwh=terms.usd_per_kwh,
        downtime=unplanned_downtime(target.num_devices) if terms.downtime is None else terms.downtime,
    )


def _notes(
    config: Config, target: Target, workload: Workload, batch: DeviceBatch, *, has_time: bool
) -> tuple[str, ...]:
    notes = list(workload.notes)
    if not has_time:
        notes.append(
            f"{target.hardware.title} has no published rate for precision.policy={config.precision.policy}: no time"
        )
    hardware, rented = target.hardware, rented_devices(target)
    if has_time and rented != target.num_devices and (hardware.on_demand_usd_hour or hardware.spot_usd_hour):
        notes.append(
            f"{hardware.name} is rented in counts of {', '.join(map(str, hardware.shapes))}: the rent is that of "
            f"{rented} devices, of which {target.num_devices} {'is' if target.num_devices == 1 else 'are'} used"
        )
    if config.precision.policy == "fp8":
        if not has_fp8(target):
            notes.append(
                f"{target.hardware.title} has no fp8 units that jaxtrain uses: precision.policy=fp8 gives the same "
                "numbers through bf16 matmuls, with the rounding on top; bf16 is faster"
            )
        elif isinstance(config.model, TransformerConfig) and config.model.experts is not None:
            notes.append("precision.policy=fp8: the experts' matmuls run in bf16")
    return tuple(notes)
