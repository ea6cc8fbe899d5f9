"""The complete config of a run as one frozen tree. No jax here: `jaxtrain config` must answer at once."""

import re
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from jaxtrain.config.arguments import is_store_address, local_path, store_address
from jaxtrain.config.base import (
    CalledTask,
    Count,
    Fraction,
    Group,
    Names,
    NonNegative,
    NotBool,
    Positive,
    PositiveInt,
    Share,
    SomeNames,
    named_or_called,
)
from jaxtrain.config.data import DataConfig, TextData
from jaxtrain.config.errors import CALLED, NAMED, AlsoCalled
from jaxtrain.config.model import ModelConfig, TransformerConfig
from jaxtrain.config.optimizers import AdamWConfig, OptimizerConfig
from jaxtrain.errors import ConfigError

# The integer target that no loss counts.
IGNORED = -100
# The mesh axes, outermost first: the axes that communicate least cross the slowest links.
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")

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
    "contrastive",
]
TaskConfig = Annotated[
    Annotated[TaskName, Tag(NAMED)] | Annotated[CalledTask, Tag(CALLED)], Discriminator(named_or_called)
]


class Parallelism(Group):
    """Degrees (sizes) of the six mesh axes, and their options; the degrees multiply to the number of devices.

    `make_train_step` and `shard_model` make the mesh of these degrees, or take the mesh that they are given: then its
    degrees hold, and setting others here is an error.

    Example:
        >>> step = jt.make_train_step(
        ...     model, jt.classification(), optax.adamw(1e-3), parallelism=jt.Parallelism(fsdp=1, zero=1)
        ... )
    """

    auto: bool = False
    """Let the planner choose degrees, ZeRO and pipeline for the available devices; short form: parallel: auto."""
    pipe: Annotated[Degree, AlsoCalled("pp")] = 1
    """Number of pipeline stages."""
    data: Annotated[Degree, AlsoCalled("dp")] = "auto"
    """Replicas of the model, each with its own rows; auto: all devices that the other axes do not use."""
    fsdp: Degree = 1
    """Shards of the batch, parameters, gradients and optimizer state (ZeRO-3)."""
    expert: Degree = 1
    """Shards of the experts and of the batch."""
    context: Degree = 1
    """Shards of the sequence."""
    tensor: Annotated[Degree, AlsoCalled("tp")] = 1
    """Shards of the attention heads, the MLP width and the vocabulary."""
    zero: Annotated[Literal[0, 1, 2, 3], NotBool] = 0
    """ZeRO over data: 1 shards optimizer state and stored parameters, 2 also gradients, 3 also compute copies."""
    sequence_parallel: bool = False
    """Shard the sequence over the tensor axis between blocks."""
    context_attention: Literal["auto", "ring", "all_to_all", "gather"] = "auto"
    """Attention over context; auto: ring; with pipe > 1, all_to_all if the heads divide by context, else gather."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """Pipeline schedule."""
    microbatches: PositiveInt | None = None
    """Pipeline microbatches per step; null: train.accumulation_steps, or two per stage if that is 1."""
    chunks: PositiveInt | None = None
    """Chunks of layers per stage under interleaved_1f1b; null: 2."""
    max_replicated_fraction: Share = 0.02
    """Largest fraction of the parameter bytes that may be replicated on every device if fsdp > 1."""


class PrecisionConfig(Group):
    """Number formats of parameters and computation."""

    policy: Annotated[Literal["fp32", "tf32", "bf16", "bf16_pure", "fp16", "fp8"], AlsoCalled("bf16", "dtype")] = "fp32"
    """Compute format (bf16_pure also stores bf16 parameters); fp8: bf16 with 8-bit layers (docs/precision.md)."""


# The input of a block: every policy keeps it, so it can be offloaded but not listed in remat.names.
BLOCK_INPUT = "block_input"
# Names that blocks give to their tensors (`jax.ad_checkpoint.checkpoint_name`), for policy "names".
TensorName = Literal["query", "key", "value", "attention_output", "attention_projection", "mlp_hidden", "mlp_output"]


class Remat(Group):
    """Which activations of a block are kept for the backward pass.

    Example:
        >>> model = jt.build_model(
        ...     {"kind": "transformer", "num_layers": 2, "embed_dim": 16, "num_heads": 2},
        ...     input_shape=(8,),
        ...     vocab_size=256,
        ...     remat=jt.Remat(policy="names", names=("attention_output",)),
        ... )
    """

    policy: Annotated[Literal["none", "full", "dots", "sqrt", "names"], AlsoCalled("gradient_checkpointing")] = "dots"
    """What is kept. none: all; full: block inputs; dots: matmul results; sqrt: sqrt(N) segment inputs; names: those."""
    names: Annotated[tuple[TensorName, ...], Field(strict=False)] = ()
    """Tensors that are kept on the device under policy names."""
    offload: Annotated[tuple[TensorName | Literal["block_input"], ...], Field(strict=False)] = ()
    """Tensors kept in host memory, under policies full and names: block_input, or a tensor not in remat.names."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        wrong = None
        if self.policy == "names" and (not self.names or {*self.names} & {*self.offload}):
            wrong = "remat.policy=names needs remat.names, none of them in remat.offload"
        elif self.offload and self.policy not in ("full", "names"):
            wrong = "remat.offload needs remat.policy=full or names, which choose tensors by name"
        if wrong is not None:
            raise ValueError(wrong)
        return self


Logits = Literal["whole", "tokens", "vocabulary"]


class LossConfig(Group):
    """The loss of language models, of classes, and of preferred answers."""

    z_loss: Positive | None = None
    """Weight of the squared logsumexp added to the training loss (PaLM: 1e-4); null: not added."""
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto"
    """Logits in memory at a time: all (whole), or chunked over tokens or vocabulary; auto: by their size."""
    block: PositiveInt | None = None
    """Tokens or ids per chunk, for logits=tokens and logits=vocabulary; null: chosen by size."""
    beta: Positive = 0.1
    """Task dpo: strength of the pull towards the starting model, above 0."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of wrong labels: of pairs for dpo (below 0.5); over all classes for classification."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.block is not None and self.logits in ("auto", "whole"):
            raise ValueError(
                f"loss.block={self.block} has no effect with loss.logits={self.logits}; set tokens or vocabulary"
            )
        return self


class TrainConfig(Group):
    """The training run."""

    steps: Annotated[PositiveInt, AlsoCalled("max_steps")] = 1000
    """Total number of optimizer steps; with epochs, their number follows from the data."""
    epochs: Annotated[Positive | None, AlsoCalled("num_epochs", "num_train_epochs")] = None
    """Passes over the training rows, in place of steps."""
    global_batch_size: Annotated[PositiveInt, AlsoCalled("batch", "batch_size")] = 32
    """Rows per step over all devices and microbatches."""
    accumulation_steps: Annotated[PositiveInt, AlsoCalled("gradient_accumulation_steps")] = 1
    """Microbatches per step; gradients are accumulated over them."""
    max_skipped_in_a_row: PositiveInt = 10
    """Stop (exit code 5) after this many steps in a row with non-finite gradients."""
    prefetch: Annotated[int, Field(gt=0, le=10_000)] | Literal["auto"] = "auto"
    """Batches prepared ahead of the device; auto: up to 16 that take at most 64 MiB, but at least 2."""
    workers: Annotated[int, Field(gt=0, le=1024)] | Literal["auto"] = "auto"
    """Threads that read images; auto: the cores of this process, up to 16."""

    @model_validator(mode="after")
    def _counts_once(self) -> Self:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("steps and epochs are both set; leave one out")
        return self


# What a run that is out of memory may set.
TO_SAVE_MEMORY = (
    "lower train.global_batch_size, or set remat.policy=full, more train.accumulation_steps, "
    "or parallel.fsdp over more devices"
)
# Beginnings of the keys that an evaluation may change (the base of adapters may have moved); the others describe the
# parameters that were trained.
CHANGED_BY_EVALUATION = (
    "data.",
    "evaluation.",
    "parallel.",
    "train.global_batch_size",
    "compilation_cache",
    "model.from",
)
_PLACES = "use a folder, gs://bucket/name or s3://bucket/name"


class CheckpointConfig(Group):
    """When checkpoints are saved, which are kept, and where."""

    every: Annotated[PositiveInt | None, AlsoCalled("save_steps", "save_every")] = 1000
    """Steps between saves; null: save only at the end and on a signal."""
    every_minutes: Annotated[float, Field(gt=0, le=10_080)] | None = None
    """Minutes after the last save at which to save as well; null: only by steps."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Never delete checkpoints at multiples of this step; null: no such rule."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest eval_loss, or the best evaluation.early_stopping.metric."""
    directory: str | None = None
    """Where checkpoints are: a folder, gs://bucket/name or s3://bucket/name; null: in the run directory."""
    max_failed_in_a_row: PositiveInt = 3
    """Stop (exit code 1) after this many failed saves in a row (no space, for example)."""

    @field_validator("directory")
    @classmethod
    def _is_a_place(cls, place: str | None) -> str | None:
        try:
            if place is not None:
                _ = store_address(place) if is_store_address(place) else local_path(place, what="it", instead=_PLACES)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return place


# Whether higher values of a metric are better, by the words at the end of its name (without numbers after them).
_HIGHER_IS_BETTER = {
    **dict.fromkeys(("accuracy", "precision", "recall", "f1", "auc", "r2", "iou", "bleu"), True),
    **dict.fromkeys(("eval_top", "eval_margin", "eval_chosen_reward", "eval_chosen_score"), True),
    **dict.fromkeys(("loss", "cross_entropy", "perplexity", "mse", "rmse", "mae", "huber", "error"), False),
    **dict.fromkeys(("eval_rejected_reward", "eval_rejected_score"), False),
}


class EarlyStopping(Group):
    """Ends a run when a metric of its evaluations gets no better; `fit` and `run_config` take it as a callback too.

    The run then ends as one that is done. Going on needs another `patience`, or none of it. With `keep_best` of the
    checkpoints, the state with the best value is saved whenever there is a better one, and stays.

    Attributes:
        metric: of the evaluation, under its name in metrics.jsonl.
        patience: evaluations in a row without a better value after which the run stops.
        min_delta: a value is better if it differs from the best one by more than this.
        mode: whether lower (min) or higher (max) values are better. auto: as the end of the name says, for metrics of
            shipped tasks and others such as `auc`; a metric of another name is refused without a mode.

    Example:
        >>> jt.EarlyStopping(metric="eval_gain", patience=5, mode="max")  # in callbacks=[...] of fit and run_config
        EarlyStopping(metric='eval_gain', patience=5, min_delta=0.0, mode='max')
    """

    metric: str = "eval_loss"
    """Evaluation metric, by its name in metrics.jsonl."""
    patience: PositiveInt = 3
    """Stop after this many evaluations in a row without improvement."""
    min_delta: NonNegative = 0.0
    """Smallest change that counts as an improvement (it must be larger than this)."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower (min) or higher (max) values are better; auto: as the name says (docs/training.md)."""

    @property
    def is_higher_better(self) -> bool:
        """Whether higher values of the metric are better."""
        if self.mode != "auto":
            return self.mode == "max"
        words = re.sub(r"(_\d+)+$", "", self.metric.lower()).split("_")
        for first in range(len(words)):
            direction = _HIGHER_IS_BETTER.get("_".join(words[first:]))
            if direction is not None:
                return direction
        raise ValueError(
            f"whether higher or lower values of metric={self.metric} are better is not known; set mode=max or mode=min"
        )

    @model_validator(mode="after")
    def _has_a_direction(self) -> Self:
        _ = self.is_higher_better
        return self


class EvaluationConfig(Group):
    """Evaluation on held-out rows."""

    every: Annotated[PositiveInt | None, AlsoCalled("eval_steps", "eval_every")] = None
    """Steps between evaluations; null: evaluate only at the end."""
    max_batches: PositiveInt | None = None
    """Largest number of batches per evaluation, taken evenly from the held-out rows; null: all rows."""
    sample_prompt: str | None = None
    """Language models: prompt of a sample that is generated at the end of the run; null: no sample."""
    sample_tokens: PositiveInt = 200
    """Length of the sample, in tokens."""
    sample_temperature: Annotated[float, Field(ge=0, le=1000)] = 0.8
    """Temperature of the sample; 0 takes the most likely token."""
    early_stopping: EarlyStopping | None = None
    """Stop when a metric stops improving ({metric: eval_loss, patience: 3, min_delta: 0, mode: auto}); null: never."""

    @model_validator(mode="after")
    def _stops_between_evaluations(self) -> Self:
        if self.early_stopping is not None and self.every is None:
            raise ValueError("early_stopping needs evaluations during training; set every, such as 100")
        return self


class LoggingConfig(Group):
    """Where metrics are written in addition to metrics.jsonl."""

    every: PositiveInt = 10
    """Steps between logged rows of metrics; a row has the mean loss of the steps since the row before."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (extra: wandb)."""
    mlflow: bool = False
    """Log to MLflow at MLFLOW_TRACKING_URI, or in ./mlflow.db (extra: mlflow)."""
    project: str = "jaxtrain"
    """Project on wandb, experiment on MLflow."""
    tags: dict[str, str] = {}  # noqa: RUF012  pydantic copies it
    """Tags of the run in the trackers, as in {team: vision}."""
    report: bool = True
    """Write report.html at the end."""


class SpikeRule(Group):
    """Skips steps whose loss or gradient norm is far above that of earlier steps (docs/reliability.md).

    A step is a spike if its loss or its gradient norm (before clipping) is more than `sigmas` standard deviations above
    the mean of the last `window` accepted steps. A deviation below a thousandth of the mean counts as a thousandth. The
    history is part of the train state, in float32, so that a run that is resumed judges every step as one that was not
    interrupted.

    Example:
        >>> rule = jt.SpikeRule(window=128, sigmas=6.0)
        >>> step = jt.make_train_step(model, jt.classification(), optax.adamw(1e-3), spikes=rule)
        >>> state, metrics = step(step.init(0), step.loader(batches)(0))
        >>> int(metrics["spikes"])
        0

    Source: the rolling window of 128 steps and 6 deviations is that of OLMo 2 (Team OLMo, arXiv 2501.00656).
    """

    watch: Literal["loss", "grad_norm", "both"] = "both"
    """The metrics that are compared."""
    window: Annotated[int, Field(ge=4, le=65536)] = 128
    """Number of accepted steps to compare with; the first half window of a run is always accepted."""
    sigmas: Positive = 6.0
    """A spike is more than this many standard deviations above the mean of the window."""


# A year: whoever wants no limit at all turns the watchdog off.
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]


class WatchdogConfig(Group):
    """How long each phase may take without progress; a run that stalls for longer ends with exit code 70."""

    enabled: bool = True
    """Watch for stalls; false: a run that hangs never ends."""
    compile_seconds: Seconds = 7_200.0
    """Limit for compiling, and for the first step of a process."""
    step_seconds: Seconds = 300.0
    """Limit for a step, which may wait for other processes; 10 times the step before if that is longer."""
    data_seconds: Seconds = 1_800.0
    """Limit for waiting for a batch; 10 times the step before if that is longer."""
    save_seconds: Seconds = 3_600.0
    """Limit for a save."""
    other_seconds: Seconds = 14_400.0
    """Limit for any other phase: reading data, restoring, a batch of an evaluation, a callback, the report."""
    lost_seconds: Annotated[int, Field(ge=1, le=3600)] = 25
    """Silence after which another process counts as lost, and jax aborts this one; also with enabled: false."""


def limits(watchdog: WatchdogConfig | None) -> WatchdogConfig | None:
    """Returns the limits that the key `watchdog` stands for; None: nothing is watched."""
    chosen = WatchdogConfig() if watchdog is None else watchdog
    return chosen if chosen.enabled else None


class ProfileConfig(Group):
    """Steps to record with the profiler, which writes to the run directory."""

    start_step: Count | None = None
    """First of three steps to profile; null: no profile."""


class LoraConfig(Group):
    """Low-rank adapters of linear layers (Hu et al. 2021): a kernel W becomes W + scale * A B, and only A, B train.

    Example:
        >>> jt.LoraConfig(rank=8, targets=("query", "value")).alpha
        32.0
    """

    rank: PositiveInt = 16
    """Columns of A and rows of B."""
    alpha: Positive = 32.0
    """The product A B is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout rate of an adapter's inputs."""
    targets: SomeNames = ("*",)
    """Linear layers that get an adapter: names such as query, or patterns of paths such as 'blocks/mlp/*'; '*': all."""
    rank_stabilised: bool = False
    """Multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023)."""
    train_also: Names = ()
    """Parameters that are fully trained in addition to the adapters; path patterns such as 'head/*'."""

    @property
    def scale(self) -> float:
        """What the product A B is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


class FinetuneConfig(Group):
    """How a pretrained model is fine-tuned; without adapters, all weights are trained."""

    lora: LoraConfig | None = None
    """Train low-rank adapters (LoRA) instead of the weights; null: train the weights."""
    adapter: str | None = None
    """Adapter to start from (PEFT or `jaxtrain export`); it sets lora, and model.from is its base."""
    base: Literal["int8", "nf4"] | None = None
    """Number format of the frozen linear layers under the adapters; null: the compute dtype."""
    double_quantization: bool = True
    """nf4: also quantize the scales of the blocks (4.127 instead of 4.5 bits per weight)."""

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.base is not None and self.lora is None:
            raise ValueError(f"base={self.base} without lora trains nothing; set lora.rank, such as 16")
        return self


def check_run_name(name: str) -> str:
    """Returns the name of a run; raises a ValueError where it is no folder below runs/ (as "sweep/lr_0.1" is)."""
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or any(not part.strip() or part in (".", "..") for part in parts):
        raise ValueError(
            f"{name[:60]!r} is not a folder below runs/; use letters, digits, '-', '_' and '.', or --run-dir for a path"
        )
    return name


class Config(Group):
    """The settings of a complete run, as `load_config` reads them.

    Raises:
        ConfigError: a key or a value is wrong; one line for the first mistake.

    Example:
        >>> config = jt.load_config("quickstart", overrides=["train.steps=20"]).config
        >>> config.train.steps, config.optimizer.kind
        (20, 'adamw')
    """

    name: str | None = None
    """Name of the run directory under runs/; null: the config's name."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of every random number: parameters, data order, dropout."""
    task: TaskConfig = "language_modeling"
    """Task and loss: on tokens, classes, numbers, answers (dpo, reward), images and texts, or your own (call)."""
    compilation_cache: str | None = "auto"
    """Folder of compiled programs; auto: the user's cache folder; null: compile in every process."""
    compiler_options: dict[str, bool | int | float | str] = {}  # noqa: RUF012  pydantic copies it
    """Options for XLA, in addition to those that jaxtrain sets for the backend (docs/bench.md)."""
    model: ModelConfig = TransformerConfig()
    """The network."""
    data: DataConfig = TextData()
    """Where the rows come from."""
    finetune: FinetuneConfig = FinetuneConfig()
    """Fine-tuning with low-rank adapters (LoRA), and the number format of the frozen weights."""
    optimizer: OptimizerConfig = AdamWConfig()
    """How the parameters are updated."""
    parallel: Parallelism = Parallelism()
    """How the step is sharded over devices."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats of parameters and computation."""
    remat: Remat = Remat()
    """Which activations are kept for the backward pass, and which are recomputed."""
    loss: LossConfig = LossConfig()
    """The loss of language models, classes and preferences."""
    train: TrainConfig = TrainConfig()
    """Length of the run and size of the batch."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are saved, which are kept, and where."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on held-out rows, and samples of text."""
    logging: LoggingConfig = LoggingConfig()
    """Where metrics are written."""
    spikes: SpikeRule | None = None
    """Skip steps whose loss or gradient norm is a spike ({}: with the defaults); null: never."""
    profile: ProfileConfig = ProfileConfig()
    """Steps to record with the profiler."""
    watchdog: WatchdogConfig | None = None
    """How long a run may stall before it ends with exit code 70 ({step_seconds: 300}); null: the default limits."""

    @field_validator("name")
    @classmethod
    def _is_a_folder(cls, name: str | None) -> str | None:
        # An address is named as one where the folder is made.
        return name if name is None or "://" in name else check_run_name(name)
