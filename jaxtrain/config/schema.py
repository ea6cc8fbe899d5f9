"""The whole config of a run as one frozen tree. No jax here: `jaxtrain config` must answer at once."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from jaxtrain.config.base import Group, mistakes_told_by_pydantic
from jaxtrain.config.data import DataConfig, TextData
from jaxtrain.config.loss import check_blocks
from jaxtrain.config.models import ModelConfig, PositiveInt, TransformerConfig
from jaxtrain.config.remat import check_remat

# The axes of the mesh, outermost first: what talks least crosses the slowest links.
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")

Degree = PositiveInt | Literal["auto"]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
StepCount = Annotated[int, Field(ge=0)]


class ScheduleConfig(Group):
    """Learning rate over steps: linear warmup, then a shape."""

    kind: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """Shape after warmup; wsd holds the peak and decays linearly at the end."""
    warmup_steps: StepCount = 0
    """Steps from zero to the peak."""
    decay_steps: PositiveInt | None = None
    """wsd: length of the final decay; others: step at which decay ends; null: 10 % of the steps, or all of them."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end, as a share of the peak."""


class _Optimizer(Group):
    """What every optimizer has."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""
    weight_decay: NonNegative = 0.0
    """Decoupled decay of matrices (never of biases and norm scales), times the learning rate."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradient; null: no clipping."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Evaluate a moving average of parameters and batch statistics; its decay grows to this; null: none."""
    freeze: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Parameters that stay as they are: path patterns such as 'blocks/*'."""
    offload: bool = False
    """Keep the state of the optimizer in the host's memory between steps; it passes by the device in slices."""


class SGDConfig(_Optimizer):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    """Which optimizer this group describes."""
    momentum: Beta = 0.9
    """Weight of the old direction."""
    nesterov: bool = False
    """Look ahead along the momentum."""


class AdamWConfig(_Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017)."""

    kind: Literal["adamw"] = "adamw"
    """Which optimizer this group describes."""
    b1: Beta = 0.9
    """Decay of the first moment."""
    b2: Beta = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """What both moments are stored in: 8, 4 or about 2 bytes a parameter."""


class MuonConfig(_Optimizer):
    """Orthogonal momentum for matrices (Jordan et al. 2024), AdamW for the rest, at AdamW's learning rate for both."""

    kind: Literal["muon"] = "muon"
    """Which optimizer this group describes."""
    momentum: Beta = 0.95
    """Weight of the old direction of matrices."""
    newton_schulz_steps: PositiveInt = 5
    """Iterations that make a matrix orthogonal."""
    adamw: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Matrices for AdamW too, besides embeddings and output layers: path patterns such as 'head/*'."""
    b1: Beta = 0.9
    """AdamW's decay of the first moment."""
    b2: Beta = 0.95
    """AdamW's decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of AdamW's second moment."""


class LionConfig(_Optimizer):
    """Sign of a momentum (Chen et al. 2023); wants a learning rate about ten times lower than AdamW."""

    kind: Literal["lion"] = "lion"
    """Which optimizer this group describes."""
    b1: Beta = 0.9
    """Interpolation for the update."""
    b2: Beta = 0.99
    """Decay of the momentum."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What the momentum is stored in: 4 or 2 bytes a parameter."""


class AdafactorConfig(_Optimizer):
    """Factored second moments (Shazeer and Stern 2018)."""

    kind: Literal["adafactor"] = "adafactor"
    """Which optimizer this group describes."""
    min_dim_size_to_factor: PositiveInt = 128
    """Matrices with both sides at least this are factored."""
    b1: Beta | None = None
    """Momentum; null: none, which saves its memory."""


OptimizerConfig = Annotated[
    SGDConfig | AdamWConfig | MuonConfig | LionConfig | AdafactorConfig, Field(discriminator="kind")
]


class ParallelConfig(Group):
    """Degrees of the six mesh axes, which multiply to the number of devices (one can be auto), and their options."""

    auto: bool = False
    """Let the planner choose degrees, ZeRO and pipeline for the devices at hand; also written parallel: auto."""
    pipe: Degree = 1
    """Pipeline stages."""
    data: Degree = "auto"
    """Replicas; the default takes the devices that the other axes leave."""
    fsdp: Degree = 1
    """Shards of parameters, gradients and optimizer state (ZeRO-3)."""
    expert: Degree = 1
    """Shards of experts, and of the batch."""
    context: Degree = 1
    """Shards of the sequence."""
    tensor: Degree = 1
    """Shards of heads, MLP width and vocabulary."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO over data: 1 optimizer state, 2 accumulated gradients too, 3 parameters too (data moves to fsdp)."""
    sequence_parallel: bool = False
    """Between blocks, spread the sequence over tensor."""
    context_attention: Literal["auto", "ring", "all_to_all", "gather"] = "auto"
    """Attention over context: auto is ring, and where pipe > 1 all_to_all if the heads divide, else gather."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """Pipeline schedule."""
    microbatches: PositiveInt | None = None
    """Pipeline microbatches a step; null: train.accumulation_steps, or two a stage where that is 1."""
    chunks: PositiveInt | None = None
    """Chunks of layers a stage under interleaved_1f1b; null: 2."""
    max_replicated_fraction: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Share of parameter bytes that may stay whole on every device although fsdp > 1."""


# Beyond it the scale never grows (`precision.LossScaling.maximum`).
_LARGEST_LOSS_SCALE = 2.0**24


class LossScaleConfig(Group):
    """Dynamic loss scaling for fp16."""

    initial: Annotated[float, Field(gt=0, le=_LARGEST_LOSS_SCALE)] = 32768.0
    """Scale at the start."""
    growth_interval: PositiveInt = 2000
    """Finite steps after which the scale doubles."""
    minimum: Annotated[float, Field(gt=0, le=_LARGEST_LOSS_SCALE)] = 1.0
    """The scale never falls below this."""

    @model_validator(mode="after")
    def _starts_in_range(self) -> "LossScaleConfig":
        if self.initial < self.minimum:
            raise ValueError(f"initial {self.initial:g} is below minimum {self.minimum:g}; raise it, or lower minimum")
        return self


class PrecisionConfig(Group):
    """Number formats."""

    policy: Literal["fp32", "tf32", "bf16", "bf16_pure", "fp16", "fp8"] = "fp32"
    """All but bf16_pure keep fp32 master parameters; fp8: bf16 with 8-bit linear layers (docs/precision.md)."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Used by fp16 only."""

    @field_validator("policy", mode="before")
    @classmethod
    def _trainable(cls, policy: Any) -> Any:
        if policy in ("int8", "int8_dynamic"):
            raise ValueError(
                f"{policy} is no format to train in; train with another policy, then: "
                f"jaxtrain eval RUN --quantize {policy}, or jaxtrain sample"
            )
        return policy


class RematConfig(Group):
    """Which activations of a block are kept for the backward pass."""

    policy: Literal["none", "full", "dots", "sqrt", "names"] = "dots"
    """none: keep all; full: block inputs; dots: results of weight matmuls; sqrt: inputs of sqrt(N) segments; names."""
    names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tensors to keep under policy names."""
    offload: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tensors to keep in host memory under policies full and names: block_input, or a tensor not in remat.names."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        with mistakes_told_by_pydantic():
            check_remat(self.policy, self.names, self.offload)
        return self


class LossConfig(Group):
    """The loss of language models."""

    z_loss: Annotated[float, Field(gt=0)] | None = None
    """Weight of the squared logsumexp, added in training (PaLM: 1e-4); null: none."""
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto"
    """In memory at once: whole, some tokens' or some ids' (less memory, a matmul more); auto: by their sizes."""
    block: PositiveInt | None = None
    """Tokens or ids at once; null: from the sizes."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        with mistakes_told_by_pydantic():
            check_blocks(self.logits, self.block)
        return self


class TrainConfig(Group):
    """The training run."""

    steps: PositiveInt = 1000
    """Optimizer steps in all."""
    global_batch_size: PositiveInt = 32
    """Rows a step over all devices and microbatches."""
    accumulation_steps: PositiveInt = 1
    """Microbatches a step; gradients are accumulated over them."""
    max_skipped_in_a_row: PositiveInt = 10
    """Stop (exit 5) after this many non-finite steps in a row."""
    prefetch: PositiveInt | Literal["auto"] = "auto"
    """Batches prepared ahead of the device; auto: 16, or as many as make 64 MiB, but at least 2."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Threads that decode and augment rows read one by one (images); auto: this process's cores, up to 16."""


class CheckpointConfig(Group):
    """When state is saved and which checkpoints stay."""

    every: PositiveInt | None = 1000
    """Steps between saves; null: only at the end and on a signal."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that stay."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this stay for good."""
    keep_best: bool = False
    """The one with the lowest eval_loss stays."""


class EvaluationConfig(Group):
    """Evaluation on held-out rows."""

    every: PositiveInt | None = None
    """Steps between evaluations; null: only at the end."""
    max_batches: PositiveInt | None = 50
    """Batches at most; null: all held-out rows."""
    sample_prompt: str | None = None
    """Text models: write a sample that continues this text at the end; null: none."""
    sample_tokens: PositiveInt = 200
    """Length of that sample."""
    sample_temperature: NonNegative = 0.8
    """Its temperature; 0 is greedy."""


class LoggingConfig(Group):
    """Where metrics go besides metrics.jsonl."""

    every: PositiveInt = 10
    """Steps between logged rows."""
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
    """A profiler window, written to the run directory."""

    start_step: StepCount | None = None
    """First profiled step; null: no profile."""
    num_steps: PositiveInt = 3
    """Steps in the window."""


class Config(Group):
    """A complete run."""

    name: str | None = None
    """Name of the run directory under runs/; null: the name of the config."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Root of every random number: parameters, data order, dropout."""
    task: Literal["language_modeling", "classification", "regression"] = "language_modeling"
    """What the outputs are compared with."""
    compilation_cache: str | None = "auto"
    """Folder of compiled programs; auto: the user's cache folder; null: none."""
    compiler_options: dict[str, bool | int | float | str] = {}  # noqa: RUF012  pydantic copies it
    """Options for XLA, over those that its backend gets by itself (docs/bench.md)."""
    model: ModelConfig = TransformerConfig()
    """The network."""
    data: DataConfig = TextData()
    """Where rows come from."""
    optimizer: OptimizerConfig = AdamWConfig()
    """How parameters move."""
    parallel: ParallelConfig = ParallelConfig()
    """How the step is laid out over devices."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    remat: RematConfig = RematConfig()
    """Activation memory against compute."""
    loss: LossConfig = LossConfig()
    """The loss of language models."""
    train: TrainConfig = TrainConfig()
    """Length and batch."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out rows and samples."""
    logging: LoggingConfig = LoggingConfig()
    """Metrics."""
    profile: ProfileConfig = ProfileConfig()
    """Profiler."""
