"""Layouts of a config on a target, ranked by predicted time; the largest batch that fits. No jax here.

Every layout is a config, tried in the analytic model; what does not fit, or cannot be, is kept with its reason.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.model import EncoderDecoderConfig, MLPConfig, TransformerConfig, ViTConfig
from jaxtrain.config.optimizers import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig, SGDConfig
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import AXES, config_degrees, resolve_degrees
from jaxtrain.metrics.format import format_gib
from jaxtrain.models.shipped.structure import OF_BLOCKS
from jaxtrain.parallel.division import batch_shards
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.search.analyse import Terms, analyse, microbatches_of
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.search.run_length import with_steps
from jaxtrain.plan.workload.describe import RowSizes

# What a search may vary; the rest changes the numbers of a run, and is left alone unless asked for.
VARIED = ("mesh", "zero", "remat", "microbatches", "schedule")
ASKED_FOR = ("precision", "optimizer", "base", "rank", "batch")
_PRECISIONS = ("bf16", "bf16_pure")
_BASES = (None, "int8", "nf4")
_RANKS = (8, 16, 32, 64, 128)
_MOST_ROWS = 256
_OPTIMIZERS = ("adamw", "lion", "adafactor")
# Below this a device has too few tokens to shard its sequence, and the axis only costs.
_LONG_SEQUENCE = 4096
_MOST_PIPE = 32
_MOST_MICROBATCHES = 1024
Options = dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """A layout that cannot be: its degrees and options, and why."""

    layout: str
    reason: str


@dataclass(frozen=True)
class Found:
    """What a search gives.

    Attributes:
        ranked: layouts that fit, fastest first; of unknown capacity they count as fitting.
        too_large: layouts that do not fit, the smallest first.
        refused: layouts that the model or the batch cannot take.
        vary: what was varied.
    """

    ranked: tuple[Estimate, ...]
    too_large: tuple[Estimate, ...]
    refused: tuple[Refused, ...]
    vary: tuple[str, ...] = VARIED

    @property
    def tried(self) -> int:
        """Layouts that were looked at."""
        return len(self.ranked) + len(self.too_large) + len(self.refused)


def search(
    config: Config,
    target: Target,
    *,
    vary: Sequence[str] = VARIED,
    terms: Terms | None = None,
    sizes: RowSizes | None = None,
) -> Found:
    """Try every layout.

    Args:
        config: the run; what is varied is replaced, everything else stays.
        target: hardware and count.
        vary: out of `VARIED` and `ASKED_FOR`.
        terms: of the cost.
        sizes: of data that takes the place of the config's.

    Raises:
        ConfigError: an unknown thing to vary, or sizes that only the data knows.
    """
    for name in vary:
        if name not in (*VARIED, *ASKED_FOR):
            raise ConfigError(f"cannot search over {name!r}; known: {', '.join((*VARIED, *ASKED_FOR))}")
        if name in ("base", "rank") and config.finetune.lora is None:
            raise ConfigError(f"cannot search over {name!r} without adapters; set finetune.lora.rank, such as 16")
    ranked, too_large, refused = [], [], []
    for candidate in layouts(config, target.num_devices, vary):
        try:
            estimate = analyse(candidate, target, terms, sizes=sizes)
        except ConfigError as error:
            refused.append(Refused(describe_layout(candidate, vary), str(error)))
            continue
        (too_large if estimate.fits is False else ranked).append(estimate)
    ranked.sort(key=lambda one: (_seconds(one), one.memory.total_bytes))
    too_large.sort(key=lambda one: one.memory.total_bytes)
    return Found(tuple(ranked), tuple(too_large), tuple(refused), tuple(vary))


def fitted(config: Config, target: Target, terms: Terms | None = None) -> Config | None:
    """The config with the fastest layout of a target, or the smallest where none fits; None where there is none.

    Remat is left alone where that is possible. A batch that no layout takes grows to a row for each device, at the same
    rows of the whole run.
    """
    rows, count = config.train.global_batch_size, target.num_devices
    larger = math.ceil(rows / count) * count
    train = config.train.model_copy(update={"global_batch_size": larger, "accumulation_steps": 1})
    steps = max(1, round(config.train.steps * rows / larger))
    for tried in (config, with_steps(config.model_copy(update={"train": train}), steps)):
        found = search(tried, target, vary=("mesh", "microbatches"), terms=terms)
        if found.too_large and not found.ranked:
            found = search(tried, target, terms=terms)
        if found.ranked or found.too_large:
            return (found.ranked or found.too_large)[0].config
    return None


def _seconds(estimate: Estimate) -> float:
    """Of a row, since batches may differ."""
    return float("inf") if estimate.time is None else estimate.time.seconds / estimate.workload.rows


def layouts(config: Config, num_devices: int, vary: Sequence[str]) -> Iterator[Config]:
    """The config itself, and every one that differs from it in what is varied."""
    model = config.model
    stages = _divisors(num_devices) if isinstance(model, TransformerConfig | ViTConfig) else [1]
    pipes = [degree for degree in stages if degree <= _MOST_PIPE]
    try:
        own = resolve_degrees(config_degrees(config.parallel), num_devices)
    except ConfigError:  # of another number of devices
        own = {axis: 1 for axis in AXES}
    # A mesh of another number of devices cannot stay.
    varies = "mesh" in vary or math.prod(own.values()) != num_devices
    meshes = list(_meshes(config, num_devices, pipes)) if varies else [{}]
    if "mesh" in vary and math.prod(own.values()) == num_devices:
        meshes = [own, *(mesh for mesh in meshes if mesh != own)]
    for mesh in meshes:
        for options in _options(config, vary, mesh or own, chosen=bool(mesh)):
            yield _replaced(config, mesh, options)


def _batches(degrees: Mapping[str, int]) -> list[int]:
    """Powers of two up to 256 rows, or up to four for each device."""
    most = max(_MOST_ROWS, 4 * math.prod(degrees.values()))
    return [2**power for power in range(most.bit_length())]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _meshes(config: Config, num_devices: int, pipes: Sequence[int]) -> Iterator[dict[str, int]]:
    """Degrees that multiply to the number of devices, on axes that the model has."""
    model = config.model
    has_heads = isinstance(model, OF_BLOCKS)
    length = model.max_sequence_length if isinstance(model, TransformerConfig | EncoderDecoderConfig) else 0
    length = getattr(config.data, "sequence_length", None) or length
    experts = model.experts.num_experts if isinstance(model, TransformerConfig) and model.experts is not None else 1
    for pipe in pipes:
        for tensor in _divisors(num_devices // pipe) if has_heads else [1]:
            left = num_devices // pipe // tensor
            for context in _divisors(left) if length >= _LONG_SEQUENCE else [1]:
                for expert in [d for d in _divisors(left // context) if experts % d == 0]:
                    rest = left // context // expert
                    for fsdp in _divisors(rest):
                        degrees = (pipe, rest // fsdp, fsdp, expert, context, tensor)
                        yield dict(zip(AXES, degrees, strict=True))


def _remat_policies(config: Config) -> tuple[str, ...]:
    """The policies that differ for a model."""
    if isinstance(config.model, OF_BLOCKS):
        return ("none", "dots", "full")
    if isinstance(config.model, MLPConfig):
        return ()
    # A ResNet recomputes its blocks or does not.
    return ("none",) if config.remat.policy != "none" else ("none", "full")


def _options(config: Config, vary: Sequence[str], degrees: Mapping[str, int], *, chosen: bool) -> Iterator[Options]:
    """Options besides the mesh, as paths of the config; what the config says is the first of each.

    Args:
        config: the run.
        vary: what a search varies.
        degrees: of the mesh.
        chosen: whether the search chose them; they are then not those that ZeRO 3 moves to `fsdp`.
    """
    choices: dict[str, Sequence[Any]] = {}
    parallel, pipe = config.parallel, degrees["pipe"]
    if "zero" in vary:
        zero = 0 if chosen and parallel.zero == 3 else parallel.zero
        choices["parallel.zero"] = _with_own(zero, (0, 1, 2)) if degrees["data"] > 1 or zero == 3 else (0,)
    if "remat" in vary:
        choices["remat.policy"] = _with_own(config.remat.policy, _remat_policies(config))
    if "microbatches" in vary or "batch" in vary:  # a batch has its own number of them
        choices["microbatches"] = _microbatches(config, vary, degrees)
    if "schedule" in vary and pipe > 1:
        choices["parallel.schedule"] = _with_own(parallel.schedule, ("1f1b", "interleaved_1f1b"))
    if "precision" in vary:
        choices["precision.policy"] = _with_own(config.precision.policy, _PRECISIONS)
    if "optimizer" in vary:
        choices["optimizer.kind"] = _with_own(config.optimizer.kind, _OPTIMIZERS)
    if "base" in vary:
        choices["finetune.base"] = _with_own(config.finetune.base, _BASES)
    if "rank" in vary and config.finetune.lora is not None:
        choices["finetune.rank"] = _with_own(config.finetune.lora.rank, _RANKS)
    if "batch" in vary:
        choices["train.global_batch_size"] = _with_own(config.train.global_batch_size, _batches(degrees))
    for values in itertools.product(*choices.values()):
        options = dict(zip(choices, values, strict=True))
        # Of one microbatch stage 2 shards what stage 1 does.
        one = pipe == 1 and options.get("microbatches", config.train.accumulation_steps) == 1
        if options.get("parallel.zero") == 2 != parallel.zero and one:
            continue
        rows = options.get("train.global_batch_size", 0)
        if pipe == 1 and rows % (batch_shards(degrees) * options.get("microbatches", 1)):
            continue
        yield options


def _with_own(own: Any, others: Sequence[Any]) -> tuple[Any, ...]:
    """What a config says, and after it the other choices."""
    return tuple(dict.fromkeys((own, *others)))


def _microbatches(config: Config, vary: Sequence[str], degrees: Mapping[str, int]) -> tuple[int, ...]:
    """Numbers of microbatches: by doubling to one row on each device; of a pipeline, two, four and eight per stage."""
    pipe, accumulation = degrees["pipe"], config.train.accumulation_steps
    if pipe > 1:
        own = config.parallel.microbatches or (accumulation if accumulation > 1 else 2 * pipe)
        return _with_own(own, (2 * pipe, 4 * pipe, 8 * pipe))
    rows = max(config.train.global_batch_size, *(_batches(degrees) if "batch" in vary else (1,)))
    most = min(max(rows // batch_shards(degrees), 16), _MOST_MICROBATCHES)
    return _with_own(accumulation, [2**power for power in range(most.bit_length())])


def _replaced(config: Config, mesh: dict[str, int], options: dict[str, Any]) -> Config:
    """The config with these degrees and options."""
    parallel: dict[str, Any] = dict(mesh)
    train: dict[str, Any] = {}
    finetune: dict[str, Any] = {}
    updates: dict[str, Any] = {}
    pipe = mesh.get("pipe", config.parallel.pipe)
    for name, value in options.items():
        group, _, key = name.partition(".")
        if name == "microbatches":
            if pipe == 1:
                parallel["microbatches"], train["accumulation_steps"] = None, value
            else:
                parallel["microbatches"], train["accumulation_steps"] = value, 1
        elif group == "parallel":
            parallel[key] = value
        elif group == "optimizer":
            updates["optimizer"] = with_optimizer(config, value)
        elif group == "train":
            train[key] = value
        elif name == "finetune.rank" and config.finetune.lora is not None:
            finetune["lora"] = config.finetune.lora.model_copy(update={"rank": value})
        elif group == "finetune":
            finetune[key] = value
        else:
            updates[group] = getattr(config, group).model_copy(update={key: value})
    if pipe == 1 and "schedule" not in options:
        parallel["microbatches"] = None
    # A degree that a layout names is chosen, as if the user had written it.
    updates["parallel"] = config.parallel.model_copy(update=parallel)
    updates["finetune"] = config.finetune.model_copy(update=finetune)
    updates["train"] = config.train.model_copy(update=train)
    replaced = config.model_copy(update=updates)
    # Batches are compared at the tokens of the whole run.
    rows, own = replaced.train.global_batch_size, config.train.global_batch_size
    return with_steps(replaced, max(1, round(config.train.steps * own / rows)))


def with_optimizer(config: Config, kind: str) -> Any:
    """The optimizer group of another kind, with what all kinds share."""
    if kind == config.optimizer.kind:
        return config.optimizer
    kinds = {
        "adamw": AdamWConfig,
        "muon": MuonConfig,
        "lion": LionConfig,
        "adafactor": AdafactorConfig,
        "sgd": SGDConfig,
    }
    shared = ("learning_rate", "schedule", "weight_decay", "clip_norm", "ema_decay", "freeze", "offload", "groups")
    return kinds[kind](**{name: getattr(config.optimizer, name) for name in shared})


def describe_layout(config: Config, vary: Sequence[str] = ()) -> str:
    """A layout in a line: degrees above 1, the options that matter on it, and what else a search varied."""
    parallel, remat = config.parallel, config.remat.policy
    degrees = [f"{axis}={getattr(parallel, axis)}" for axis in AXES if getattr(parallel, axis) != 1] or ["one device"]
    options = [f"remat={remat}"]
    if parallel.zero and parallel.data != 1:
        options.append(f"zero={parallel.zero}")
    if parallel.pipe != 1:
        options.append(f"{parallel.schedule} with {microbatches_of(config)} microbatches")
    elif config.train.accumulation_steps > 1:
        options.append(f"accumulation={config.train.accumulation_steps}")
    if "precision" in vary:
        options.append(config.precision.policy)
    if "optimizer" in vary:
        options.append(config.optimizer.kind)
    if "base" in vary:
        options.append(f"base {config.finetune.base or 'float'}")
    if "rank" in vary and config.finetune.lora is not None:
        options.append(f"rank {config.finetune.lora.rank}")
    if "batch" in vary:
        options.append(f"batch {config.train.global_batch_size}")
    return ", ".join([*degrees, *options])


def why_not(found: Found) -> list[str]:
    """Why the rest does not fit, in a few lines: the nearest to fitting, and the reasons by how often they came."""
    lines = []
    if found.too_large:
        nearest = found.too_large[0]
        assert nearest.memory.capacity_bytes is not None
        room = nearest.memory.capacity_bytes - nearest.memory.reserved_bytes
        needed, there = format_gib(nearest.memory.total_bytes), format_gib(room)
        lines.append(
            f"{len(found.too_large)} layouts need more memory than the {there} there are; the smallest "
            f"{needed}: {describe_layout(nearest.config, found.vary)}"
        )
        heaviest = Counter(
            max(one.memory.parts, key=lambda name: one.memory.parts[name]) for one in found.too_large
        ).most_common(3)
        lines.append("their largest part: " + ", ".join(f"{name} ({count})" for name, count in heaviest))
    # Reasons that differ in numbers only are one, shown by its first.
    kinds = Counter(re.sub(r"\d+", "N", one.reason) for one in found.refused)
    for kind, count in kinds.most_common(3):
        example = next(one.reason for one in found.refused if re.sub(r"\d+", "N", one.reason) == kind)
        lines.append(f"{count} refused: {example.split(';')[0]}")
    return lines


def largest_batch(config: Config, fits: Callable[[Config], bool], *, most: int = 2**20) -> int | None:
    """The largest global batch that fits, by doubling and bisecting.

    Args:
        config: the run; its batch is where the search starts.
        fits: whether a config fits, by the analytic model or by compiling; a compiler never runs out of memory itself.
        most: rows from which on no more are tried.

    Returns:
        Rows, a multiple of what the layout needs; None where not even the least batch fits.
    """

    def at(multiple: int) -> bool:
        rows = multiple * least
        return fits(config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": rows})}))

    least = batch_shards({axis: int(getattr(config.parallel, axis)) for axis in AXES}) * microbatches_of(config)
    if not at(1):
        return None
    low, high = 1, 2
    while at(high):
        if high * least >= most:
            return high * least
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) else (low, middle)
    return low * least
