"""What one device of a layout works on in a step: the record that memory and time are computed from. No jax here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxtrain.config.kinds import PREFERENCES, READS_REFERENCE, task_name
from jaxtrain.config.model import EncoderDecoderConfig, TransformerConfig, ViTConfig
from jaxtrain.config.schema import Config
from jaxtrain.layout.rules import (
    AXES,
    DEFAULT_RULES,
    check_replicated_share,
    check_tensor_used,
    config_degrees,
    resolve_degrees,
)
from jaxtrain.metrics.flops import lowest_trained_block
from jaxtrain.models.shipped.shapes import Stack, Structure
from jaxtrain.parallel.division import (
    batch_shards,
    check_batch,
    check_model_axes,
    check_sequence,
    check_task_stages,
    check_whole_batch,
    check_zero,
    microbatches_of,
    pipeline_schedule,
    sequence_axes,
)
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.plan.layers import AttentionWork, ExpertWork, expert_work, stack_attention
from jaxtrain.plan.state import Finetuned, Parameter, finetuned, shard_parameters
from jaxtrain.plan.targets import Target
from jaxtrain.plan.workload import Workload, model_structure, model_tensors
from jaxtrain.precision.dtypes import POLICY_DTYPES


@dataclass(frozen=True)
class DeviceStep:
    """What one device works on.

    Attributes:
        config: the run, its degrees as numbers.
        workload: its rows.
        degrees: of the mesh.
        microbatches: of a step.
        rows: of one microbatch on one device.
        structure: stacks of transformer blocks and the layers around them; None: the model has none.
        stored: what it stores in the place of kernels, and what it trains.
        attention: of each stack of transformer blocks to itself, then that of a decoder to the encoder's output.
        experts: what they multiply; None: the model has none.
        schedule: of the pipeline; None: there is none.
        placed: parameters on the mesh.
    """

    config: Config
    workload: Workload
    degrees: Mapping[str, int]
    microbatches: int
    rows: float
    structure: Structure | None
    stored: Finetuned
    attention: tuple[AttentionWork, ...]
    experts: ExpertWork | None
    schedule: Schedule | None = None
    placed: Sequence[Parameter] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the compute dtype."""
        return POLICY_DTYPES[self.config.precision.policy].compute_bytes

    @cached_property
    def lowest(self) -> int:
        """Number of the first block that is trained (`metrics/flops.py`); those below it run forward alone."""
        return lowest_trained_block(self.config.model, self.stored.trained)

    @property
    def reads_reference(self) -> bool:
        """Whether the loss also calls the model that training starts from."""
        return self.config.task in READS_REFERENCE

    @property
    def forwards(self) -> int:
        """Forward passes of a microbatch, without those of remat.

        A stage of a pipeline keeps its inputs only, and runs forward once more before its backward.
        """
        return 1 + (self.schedule is not None) + self.reads_reference

    @cached_property
    def bubble(self) -> float:
        """Idle share of the pipeline; 0 without one."""
        return 0.0 if self.schedule is None else self.schedule.bubble_fraction()

    @property
    def trained(self) -> list[Parameter]:
        """The parameters that have gradients."""
        return [one for one in self.placed if one.trained]

    def tokens(self, stack: Stack) -> float:
        """Positions of one microbatch on one device in a stack."""
        return self.rows * stack.length / self.degrees["context"]

    def layers(self, stack: Stack) -> int:
        """Layers of a stack that one device runs; those of a leading one are all on the first stage of a pipeline."""
        return stack.blocks.num_layers // (1 if stack.is_leading else self.degrees["pipe"])


def with_degrees(config: Config, num_devices: int) -> Config:
    """The config with every degree a number.

    Raises:
        ConfigError: degrees that do not multiply to the device count.
    """
    degrees = resolve_degrees(config_degrees(config.parallel), num_devices)
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=degrees)})


def device_step(config: Config, target: Target, workload: Workload) -> DeviceStep:
    """What one device gets of a config, whose degrees are numbers.

    Raises:
        ConfigError: a layout that the model, the batch or the sequence cannot take, in the words of the step.
    """
    degrees: dict[str, int] = {axis: getattr(config.parallel, axis) for axis in AXES}
    schedule = _schedule(config, degrees)
    # What most layouts of a search are refused for comes before what takes longer.
    check_batch(config, degrees)
    stored = finetuned(config, model_tensors(config.model, workload))
    structure = model_structure(config.model, workload)
    attention = stack_attention(config, target, structure)
    # It refuses experts that do not divide, which are counted per device next.
    placed = shard_parameters(config, stored, degrees)
    microbatches = microbatches_of(config)
    rows = workload.rows / batch_shards(degrees) / microbatches
    experts = expert_work(config, target, rows * (workload.sequence_length or 1) / degrees["context"])
    if workload.sequence_length is not None:
        axes = sequence_axes(sequence_parallel=config.parallel.sequence_parallel)
        check_sequence(workload.sequence_length, degrees, axes)
    sizes = {one.path: math.prod(one.shape) for one in placed}
    name = getattr(config.model, "size", None) or config.model.kind
    sharded = [one.path for one in placed if one.is_over("tensor")]
    check_tensor_used(sizes, sharded, degrees["tensor"], DEFAULT_RULES, model=name)
    if degrees["fsdp"] > 1:
        replicated = {one.path: sizes[one.path] for one in placed if not one.is_over("fsdp")}
        most = config.parallel.max_replicated_fraction
        check_replicated_share(replicated, sum(sizes.values()), degrees["fsdp"], most)
    return DeviceStep(
        config, workload, degrees, microbatches, rows, structure, stored, attention, experts, schedule, placed
    )


def _schedule(config: Config, degrees: dict[str, int]) -> Schedule | None:
    """The pipeline's table, by the rules of the step."""
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
    if config.task == "contrastive":
        check_whole_batch(config.train.accumulation_steps, task="contrastive")
    num_layers = model.num_layers if isinstance(model, TransformerConfig | ViTConfig) else None
    return pipeline_schedule(config.parallel, degrees["pipe"], num_layers, config.train.accumulation_steps)
