"""The complete config of a run as one frozen tree. No jax here: `jaxtrain config` must answer at once."""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from jaxtrain.config.base import Group, mistakes_told_by_pydantic
from jaxtrain.config.call import CALLED, NAMED, Call, CalledTask, named_or_called
from jaxtrain.config.data import DataConfig, TextData
from jaxtrain.config.loss import check_blocks
from jaxtrain.config.models import ModelConfig, PositiveInt, TransformerConfig
from jaxtrain.config.remat import check_remat

# The mesh axes, outermost first: the axes that communicate least cross the slowest links.
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")

Degree = PositiveInt | Literal["auto"]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
StepCount = Annotated[int, Field(ge=0)]


class ScheduleConfig(Group):
    """The learning rate at each step: a linear warmup, then a decay of the chosen shape."""

    kind: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """Shape after warmup; wsd (warmup, stable, decay) holds the peak and decays linearly at the end."""
    warmup_steps: StepCount = 0
    """Steps over which the learning rate rises from zero to the peak."""
    decay_steps: PositiveInt | None = None
    """wsd: steps of the final decay (null: 10 % of the run); other kinds: step where decay ends (null: the last)."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end, as a fraction of the peak."""


class _Rate(Group):
    """The settings of a direction that a learning rate scales."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate changes over the steps."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, multiplied by the learning rate; for matrices, never for biases and norm scales."""


class _Update(Group):
    """The settings that every optimizer has."""

    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradient; null: no clipping."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Largest decay of the moving average of parameters and batch statistics, which evaluation uses; null: none."""
    freeze: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Parameters that are not trained, as path patterns such as 'blocks/*'."""
    offload: bool = False
    """Keep the optimizer state in host memory between steps; it is updated on the device, in slices where possible."""


class _Optimizer(_Update, _Rate):
    """The settings of the optimizers that a config describes by their kind."""


class SGDConfig(_Optimizer):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    """Which optimizer this group describes."""
    momentum: Beta = 0.9
    """Decay of the momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""


class AdamWConfig(_Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017)."""

    kind: Literal["adamw"] = "adamw"
    """Which optimizer this group describes."""
    b1: Beta = 0.9
    """Decay of the first moment."""
    b2: Beta = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the square root of the second moment."""
    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """Number format of both moments, which take 8, 4 or about 2 bytes per parameter."""


class MuonConfig(_Optimizer):
    """Orthogonal momentum for matrices (Jordan et al. 2024), AdamW for the rest; both have the same learning rate."""

    kind: Literal["muon"] = "muon"
    """Which optimizer this group describes."""
    momentum: Beta = 0.95
    """Decay of the momentum of matrices."""
    newton_schulz_steps: PositiveInt = 5
    """Newton-Schulz iterations that make the momentum of a matrix orthogonal."""
    adamw: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Matrices that AdamW updates, besides embeddings and output layers; path patterns such as 'head/*'."""
    b1: Beta = 0.9
    """Decay of AdamW's first moment."""
    b2: Beta = 0.95
    """Decay of AdamW's second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the square root of AdamW's second moment."""


class LionConfig(_Optimizer):
    """Updates by the sign of a momentum (Chen et al. 2023); needs about a tenth of AdamW's learning rate."""

    kind: Literal["lion"] = "lion"
    """Which optimizer this group describes."""
    b1: Beta = 0.9
    """Weight of the momentum in the update; the gradient has the rest."""
    b2: Beta = 0.99
    """Decay of the momentum."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Number format of the momentum, which takes 4 or 2 bytes per parameter."""


class AdafactorConfig(_Optimizer):
    """Factored second moments (Shazeer and Stern 2018)."""

    kind: Literal["adafactor"] = "adafactor"
    """Which optimizer this group describes."""
    min_dim_size_to_factor: PositiveInt = 128
    """Matrices with both sides at least this long keep a factored second moment."""
    b1: Beta | None = None
    """Decay of the first moment; null: no first moment, which saves its memory."""


class CalledOptimizer(_Update, Call):
    """An optimizer of your own: a function that returns an optax transformation."""

    kind: Literal["called"] = "called"
    """Which optimizer this group describes."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak of the schedule that the function gets as learning_rate; null: the function has a learning rate itself."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How that learning rate changes over the steps."""


OptimizerConfig = Annotated[
    SGDConfig | AdamWConfig | MuonConfig | LionConfig | AdafactorConfig | CalledOptimizer, Field(discriminator="kind")
]
TaskName = Literal["language_modeling", "classification", "regression"]
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
    """ZeRO stage over data: 1 optimizer state, 2 also accumulated gradients, 3 also parameters (data becomes fsdp)."""
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
    max_replicated_fraction: Annotated[float, Field(ge=0, le=1)] = 0.02
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
    """The loss of language models."""

    z_loss: Annotated[float, Field(gt=0)] | None = None
    """Weight of the squared logsumexp that is added to the training loss (PaLM: 1e-4); null: not added."""
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto"
    """Logits in memory at once: whole is all of them, tokens or vocabulary a block of that dim; auto: by their size."""
    block: PositiveInt | None = None
    """Tokens or ids per block, for logits tokens and vocabulary; null: chosen from the sizes."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        with mistakes_told_by_pydantic():
            check_blocks(self.logits, self.block)
        return self


class TrainConfig(Group):
    """The training run."""

    steps: PositiveInt = 1000
    """Total number of optimizer steps."""
    global_batch_size: PositiveInt = 32
    """Rows per step over all devices and microbatches."""
    accumulation_steps: PositiveInt = 1
    """Microbatches per step; gradients are accumulated over them."""
    max_skipped_in_a_row: PositiveInt = 10
    """Stop (exit code 5) after this many steps in a row with non-finite gradients."""
    prefetch: PositiveInt | Literal["auto"] = "auto"
    """Batches prepared ahead of the device; auto: 16, or fewer so that they take at most 64 MiB, but at least 2."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Threads that read image rows one by one; auto: the cores of this process, up to 16."""


class CheckpointConfig(Group):
    """When the state is saved, and which checkpoints are kept."""

    every: PositiveInt | None = 1000
    """Steps between saves; null: save only at the end and on a signal."""
    keep_last: PositiveInt = 2
    """Number of the newest checkpoints that are kept."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this step are never deleted; null: no such rule."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest eval_loss."""


class EvaluationConfig(Group):
    """Evaluation on held-out rows."""

    every: PositiveInt | None = None
    """Steps between evaluations; null: evaluate only at the end."""
    max_batches: PositiveInt | None = 50
    """Largest number of batches per evaluation; null: all held-out rows."""
    sample_prompt: str | None = None
    """Language models: write a sample that continues this text at the end of the run; null: no sample."""
    sample_tokens: PositiveInt = 200
    """Length of that sample, in tokens."""
    sample_temperature: NonNegative = 0.8
    """Temperature of that sample; 0 takes the most likely token."""


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
    project: str = "jaxtrain"
    """Project name for wandb and trackio."""
    report: bool = True
    """Write report.html at the end."""


class ProfileConfig(Group):
    """Steps that the profiler records, written to the run directory."""

    start_step: StepCount | None = None
    """First profiled step; null: no profile."""
    num_steps: PositiveInt = 3
    """Number of profiled steps."""


class Config(Group):
    """The settings of a complete run."""

    name: str | None = None
    """Name of the run directory under runs/; null: the name of the config."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of every random number: parameters, data order, dropout."""
    task: TaskConfig = "language_modeling"
    """What the loss compares the outputs with: the next token, a class, or numbers; or a loss of your own (call)."""
    compilation_cache: str | None = "auto"
    """Folder of compiled programs; auto: the user's cache folder; null: compile in every process."""
    compiler_options: dict[str, bool | int | float | str] = {}  # noqa: RUF012  pydantic copies it
    """Options for XLA, in addition to those that jaxtrain sets for the backend (docs/bench.md)."""
    model: ModelConfig = TransformerConfig()
    """The network."""
    data: DataConfig = TextData()
    """Where the rows come from."""
    optimizer: OptimizerConfig = AdamWConfig()
    """How the parameters are updated."""
    parallel: ParallelConfig = ParallelConfig()
    """How the step is sharded over devices."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats of parameters and computation."""
    remat: RematConfig = RematConfig()
    """Which activations are kept for the backward pass, and which are computed again."""
    loss: LossConfig = LossConfig()
    """The loss of language models."""
    train: TrainConfig = TrainConfig()
    """Length of the run and size of the batch."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the state is saved, and which checkpoints are kept."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on held-out rows, and samples of text."""
    logging: LoggingConfig = LoggingConfig()
    """Where metrics are written."""
    profile: ProfileConfig = ProfileConfig()
    """Steps that the profiler records."""
