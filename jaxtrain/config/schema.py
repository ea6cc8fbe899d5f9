"""The complete config of a run as one frozen tree. No jax here: `jaxtrain config` must answer at once."""

from html import escape
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from jaxtrain.config.base import Group, first_mistake, mistakes_told_by_pydantic
from jaxtrain.config.call import CALLED, NAMED, Call, CalledTask, named_or_called
from jaxtrain.config.checkpoint import CheckpointConfig
from jaxtrain.config.data import DataConfig, TextData
from jaxtrain.config.early_stopping import EarlyStoppingConfig
from jaxtrain.config.finetune import FinetuneConfig
from jaxtrain.config.loss import check_blocks, check_preference
from jaxtrain.config.models import ModelConfig
from jaxtrain.config.notices import NoticesConfig
from jaxtrain.config.numbers import Length, PositiveInt, Rows, Scale, Share, StepCount
from jaxtrain.config.optimizers import AdamWConfig, OptimizerConfig
from jaxtrain.config.remat import check_remat
from jaxtrain.config.run_name import check_run_name
from jaxtrain.config.spikes import ChecksConfig, SpikesConfig
from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.config.watchdog import WatchdogConfig
from jaxtrain.config.yaml_file import to_yaml
from jaxtrain.errors import ConfigError

# The mesh axes, outermost first: the axes that communicate least cross the slowest links.
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")

# No point: it would part a key from the one below it.
TagName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$")]
TagText = Annotated[str, Field(max_length=500)]
Degree = Annotated[int, Field(gt=0, le=2**20)] | Literal["auto"]
TaskName = Literal[
    "language_modeling",
    "masked_language_modeling",
    "sequence_to_sequence",
    "classification",
    "token_classification",
    "regression",
    "dpo",
    "reward",
]
TaskConfig = Annotated[
    Annotated[TaskName, Tag(NAMED)] | Annotated[CalledTask, Tag(CALLED)], Discriminator(named_or_called)
]


class ParallelConfig(Group):
    """Degrees of the six mesh axes and their options; the product of the degrees is the number of devices."""

    auto: bool = False
    """Let the planner choose degrees, ZeRO and pipeline for the available devices; also written parallel: auto."""
    pipe: Degree = 1
    """Pipeline stages."""
    data: Degree = "auto"
    """Replicas of the model, each with its own rows; auto: all devices that the other axes leave."""
    fsdp: Degree = 1
    """Shards of the batch, parameters, gradients and optimizer state (ZeRO-3)."""
    expert: Degree = 1
    """Shards of the experts, and of the batch."""
    context: Degree = 1
    """Shards of the sequence."""
    tensor: Degree = 1
    """Shards of the heads, the MLP width and the vocabulary."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO over data: 1 optimizer state and stored parameters, 2 also gradients, 3 also their copy (becomes fsdp)."""
    sequence_parallel: bool = False
    """Shard the sequence over tensor between blocks."""
    context_attention: Literal["auto", "ring", "all_to_all", "gather"] = "auto"
    """Attention over context; auto: ring, but with pipe > 1 all_to_all if the heads divide by context, else gather."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """Pipeline schedule."""
    microbatches: PositiveInt | None = None
    """Pipeline microbatches per step; null: train.accumulation_steps, or two per stage where that is 1."""
    chunks: PositiveInt | None = None
    """Chunks of layers per stage under interleaved_1f1b; null: 2."""
    max_replicated_fraction: Share = 0.02
    """Fraction of the parameter bytes that may be replicated on every device although fsdp > 1."""


# The scale never grows above this (`precision.LossScaling.maximum`).
_LARGEST_LOSS_SCALE = 2.0**24


class LossScaleConfig(Group):
    """Dynamic loss scaling for fp16."""

    initial: Annotated[float, Field(gt=0, le=_LARGEST_LOSS_SCALE)] = 32768.0
    """Scale at the start."""
    growth_interval: PositiveInt = 2000
    """Number of finite steps in a row after which the scale doubles."""
    minimum: Annotated[float, Field(gt=0, le=_LARGEST_LOSS_SCALE)] = 1.0
    """The scale never falls below this."""

    @model_validator(mode="after")
    def _starts_in_range(self) -> "LossScaleConfig":
        if self.initial < self.minimum:
            raise ValueError(f"initial {self.initial:g} is below minimum {self.minimum:g}; raise it, or lower minimum")
        return self


class PrecisionConfig(Group):
    """Number formats of parameters and computation."""

    policy: Literal["fp32", "tf32", "bf16", "bf16_pure", "fp16", "fp8"] = "fp32"
    """Format to compute in (only bf16_pure stores bf16 parameters); fp8: bf16 with 8-bit layers (docs/precision.md)."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Dynamic loss scaling, used by policy fp16 only."""

    @field_validator("policy", mode="before")
    @classmethod
    def _trainable(cls, policy: object) -> object:
        if policy in ("int8", "int8_dynamic"):
            raise ValueError(
                f"{policy} is not a format to train in; train with another policy, then run "
                f"jaxtrain eval RUN --quantize {policy}, or jaxtrain sample"
            )
        return policy


class RematConfig(Group):
    """Which activations of a block are kept for the backward pass."""

    policy: Literal["none", "full", "dots", "sqrt", "names"] = "dots"
    """What is kept. none: all; full: block inputs; dots: matmul results; sqrt: sqrt(N) segment inputs; names: those."""
    names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tensors that policy names keeps on the device."""
    offload: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tensors kept in host memory, under policies full and names: block_input, or a tensor not in remat.names."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        with mistakes_told_by_pydantic():
            check_remat(self.policy, self.names, self.offload)
        return self


class LossConfig(Group):
    """The loss of language models, of classes, and of preferred answers."""

    z_loss: Scale | None = None
    """Weight of the squared logsumexp that is added to the training loss (PaLM: 1e-4); null: not added."""
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto"
    """Logits in memory at once: whole is all of them, tokens or vocabulary a block of that dim; auto: by their size."""
    block: PositiveInt | None = None
    """Tokens or ids per block, for logits tokens and vocabulary; null: chosen from the sizes."""

    beta: Annotated[float, Field(le=1e6)] = 0.1
    """Task dpo: how near the model stays to where it starts, above 0; a larger value keeps it nearer."""
    label_smoothing: float = 0.0
    """Share of wrong labels that is assumed: dpo, of pairs, below 0.5; classification, spread over all classes."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        with mistakes_told_by_pydantic():
            check_blocks(self.logits, self.block)
            check_preference(self.beta, self.label_smoothing)
        return self


class TrainConfig(Group):
    """The training run."""

    steps: PositiveInt = 1000
    """Total number of optimizer steps."""
    global_batch_size: Rows = 32
    """Rows per step over all devices and microbatches."""
    accumulation_steps: PositiveInt = 1
    """Microbatches per step; gradients are accumulated over them."""
    max_skipped_in_a_row: PositiveInt = 10
    """Stop (exit code 5) after this many steps in a row with non-finite gradients."""
    prefetch: Annotated[int, Field(gt=0, le=10_000)] | Literal["auto"] = "auto"
    """Batches prepared ahead of the device; auto: 16, or fewer so that they take at most 64 MiB, but at least 2."""
    workers: Annotated[int, Field(gt=0, le=1024)] | Literal["auto"] = "auto"
    """Threads that read image rows one by one; auto: the cores of this process, up to 16."""


class EvaluationConfig(Group):
    """Evaluation on held-out rows."""

    every: PositiveInt | None = None
    """Steps between evaluations; null: evaluate only at the end."""
    max_batches: PositiveInt | None = 50
    """Largest number of batches per evaluation, whose rows are spread over all held-out rows; null: all of them."""
    sample_prompt: str | None = None
    """Language models: write a sample that continues this text at the end of the run; null: no sample."""
    sample_tokens: Length = 200
    """Length of that sample, in tokens."""
    sample_temperature: Annotated[float, Field(ge=0, le=1000)] = 0.8
    """Temperature of that sample; 0 takes the most likely token."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop when a metric gets no better ({metric: eval_loss, patience: 3, min_delta: 0, mode: auto}); null: never."""

    @model_validator(mode="after")
    def _stops_between_evaluations(self) -> Self:
        if self.early_stopping is not None and self.every is None:
            raise ValueError("early_stopping compares evaluations, and every is null; set every, such as 100")
        return self


class LoggingConfig(Group):
    """Where metrics are written besides metrics.jsonl."""

    every: PositiveInt = 10
    """Steps between rows of metrics."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (extra: wandb)."""
    trackio: bool = False
    """Log to trackio (extra: trackio)."""
    mlflow: bool = False
    """Log to MLflow at MLFLOW_TRACKING_URI, or in ./mlflow.db (extra: mlflow)."""
    project: str = "jaxtrain"
    """Project of wandb and trackio, experiment of MLflow."""
    tags: dict[TagName, TagText] = {}  # noqa: RUF012  pydantic copies it
    """Tags of the run on trackers, as in {team: vision}."""
    report: bool = True
    """Write report.html at the end."""


class ProfileConfig(Group):
    """Steps that the profiler records, written to the run directory."""

    start_step: StepCount | None = None
    """First profiled step; null: no profile."""
    num_steps: PositiveInt = 3
    """Number of profiled steps."""


def _short(group: Any) -> str:
    """A task or group for people: its name, its kind, or the function that makes it."""
    return group if isinstance(group, str) else group.call if isinstance(group, Call) else group.kind


class Config(Group):
    """The settings of a complete run, as `load_config` reads them.

    Raises:
        ConfigError: a key or a value is wrong; one line for the first mistake.

    Example:
        >>> config = jt.load_config("quickstart", overrides=["train.steps=20"]).config
        >>> config.train.steps, config.optimizer.kind
        (20, 'adamw')
    """

    # Keywords of a pydantic model are its fields, which pydantic checks itself.
    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(first_mistake(error)) from error

    name: str | None = None
    """Name of the run directory under runs/; null: the name of the config."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of every random number: parameters, data order, dropout."""
    task: TaskConfig = "language_modeling"
    """What the loss compares: tokens, classes, numbers, or two answers (dpo, reward); or a loss of your own (call)."""
    compilation_cache: str | None = "auto"
    """Folder of compiled programs; auto: the user's cache folder; null: compile in every process."""
    compiler_options: dict[str, bool | int | float | str] = {}  # noqa: RUF012  pydantic copies it
    """Options for XLA, in addition to those that jaxtrain sets for the backend (docs/bench.md)."""
    model: ModelConfig = TransformerConfig()
    """The network."""
    data: DataConfig = TextData()
    """Where the rows come from."""
    finetune: FinetuneConfig = FinetuneConfig()
    """Low-rank adapters in place of the weights, and the number format of the weights below them."""
    optimizer: OptimizerConfig = AdamWConfig()
    """How the parameters are updated."""
    parallel: ParallelConfig = ParallelConfig()
    """How the step is sharded over devices."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats of parameters and computation."""
    remat: RematConfig = RematConfig()
    """Which activations are kept for the backward pass, and which are computed again."""
    loss: LossConfig = LossConfig()
    """The loss of language models, and of preferred answers."""
    train: TrainConfig = TrainConfig()
    """Length of the run and size of the batch."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the state is saved, which checkpoints are kept, and where a second copy is."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on held-out rows, and samples of text."""
    logging: LoggingConfig = LoggingConfig()
    """Where metrics are written."""
    spikes: SpikesConfig | None = None
    """What is done about spikes of the loss or the gradient norm ({action: skip}, or roll_back); null: nothing."""
    checks: ChecksConfig | None = None
    """Comparisons that find devices at fault ({replay_every: 1000, replicas_every: 1000}); null: none."""
    profile: ProfileConfig = ProfileConfig()
    """Steps that the profiler records."""
    notices: NoticesConfig | None = None
    """How a run hears that it must stop ({metadata: auto, patience_seconds: 5}); null: the usual."""
    watchdog: WatchdogConfig | None = None
    """How long a run may stand still before it ends with exit code 70 ({step_seconds: 300}); null: the usual limits."""

    @field_validator("name")
    @classmethod
    def _is_a_folder(cls, name: str | None) -> str | None:
        # An address is named as one where the folder is made.
        return name if name is None or "://" in name else check_run_name(name)

    def __repr__(self) -> str:
        groups = {"task": self.task, "model": self.model, "data": self.data, "optimizer": self.optimizer}
        kinds = ", ".join(f"{name}={_short(group)}" for name, group in groups.items())
        named = "" if self.name is None else f"name={self.name!r}, "
        return f"Config({named}{kinds}, steps={self.train.steps}, global_batch_size={self.train.global_batch_size})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        changed = escape(to_yaml(self.model_dump(mode="json", exclude_defaults=True)))
        return f"<p><strong>{escape(repr(self))}</strong></p><p>What differs from the defaults:</p><pre>{changed}</pre>"
