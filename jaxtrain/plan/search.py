"""Layouts of a config on a target, ranked by predicted time; `parallel: auto`; the largest batch. No jax here.

Every layout is a config, tried in the analytic model; what does not fit, or cannot be, is kept with its reason.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.load import Loaded
from jaxtrain.config.model import EncoderDecoderConfig, MLPConfig, TransformerConfig, ViTConfig
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import AXES, config_degrees, resolve_degrees
from jaxtrain.metrics.format import format_gib
from jaxtrain.models.shipped.shapes import OF_BLOCKS
from jaxtrain.parallel.division import batch_shards, microbatches_of
from jaxtrain.plan.cost import with_steps
from jaxtrain.plan.estimate import Estimate, analyse, check_can_estimate
from jaxtrain.plan.targets import Target, this_machine
from jaxtrain.plan.workload import RowSizes

# What a search varies; the batch, which changes the numbers of a run, is left alone.
VARIED = ("mesh", "zero", "remat", "microbatches", "schedule")
# Remat, batch, precision and optimizer stay as the user wrote them.
VARIED_BY_AUTO = ("mesh", "zero", "schedule")
# Below this a device has too few tokens to shard its sequence, and the axis only costs.
_LONG_SEQUENCE = 4096
_MOST_PIPE = 32
_MOST_MICROBATCHES = 1024


@dataclass(frozen=True)
class Found:
    """What a search gives.

    Attributes:
        ranked: layouts that fit, fastest first; of unknown capacity they count as fitting.
        too_large: layouts that do not fit, the smallest first.
        refused: why each layout that the model or the batch cannot take is none.
    """

    ranked: tuple[Estimate, ...]
    too_large: tuple[Estimate, ...]
    refused: tuple[str, ...]

    @property
    def tried(self) -> int:
        """Layouts that were looked at."""
        return len(self.ranked) + len(self.too_large) + len(self.refused)


def search(
    config: Config,
    target: Target,
    *,
    vary: Sequence[str] = VARIED,
    sizes: RowSizes | None = None,
) -> Found:
    """Try every layout.

    Args:
        config: the run; what is varied is replaced, everything else stays.
        target: hardware and count.
        vary: out of `VARIED`.
        sizes: as `analyse` takes them.

    Raises:
        ConfigError: sizes that only the data knows.
    """
    ranked, too_large, refused = [], [], []
    for candidate in layouts(config, target.num_devices, vary):
        try:
            estimate = analyse(candidate, target, sizes=sizes)
        except ConfigError as error:
            refused.append(str(error))
            continue
        (too_large if estimate.fits is False else ranked).append(estimate)

    ranked.sort(key=lambda one: (math.inf if one.time is None else one.time.seconds, one.memory.total_bytes))
    too_large.sort(key=lambda one: one.memory.total_bytes)
    return Found(tuple(ranked), tuple(too_large), tuple(refused))


def fitted(config: Config, target: Target) -> Config | None:
    """The config with the fastest layout of a target, or the smallest where none fits; None where there is none.

    Remat is left alone where that is possible. A batch that no layout takes grows to a row for each device, at the same
    rows of the whole run.
    """
    rows, count = config.train.global_batch_size, target.num_devices
    larger = math.ceil(rows / count) * count
    train = config.train.model_copy(update={"global_batch_size": larger, "accumulation_steps": 1})
    steps = max(1, round(config.train.steps * rows / larger))
    for tried in (config, with_steps(config.model_copy(update={"train": train}), steps)):
        found = search(tried, target, vary=("mesh", "microbatches"))
        if found.too_large and not found.ranked:
            found = search(tried, target)
        if found.ranked or found.too_large:
            return (found.ranked or found.too_large)[0].config
    return None


def layouts(config: Config, num_devices: int, vary: Sequence[str]) -> Iterator[Config]:
    """The config itself, and every one that differs from it in what is varied."""
    try:
        own = resolve_degrees(config_degrees(config.parallel), num_devices)
    except ConfigError:  # of another number of devices, whose mesh cannot stay
        own: dict[str, int] = dict.fromkeys(AXES, 1)
    is_taken = math.prod(own.values()) == num_devices
    meshes = list(_meshes(config, num_devices)) if "mesh" in vary or not is_taken else [{}]
    if "mesh" in vary and is_taken:
        meshes = [own, *(mesh for mesh in meshes if mesh != own)]
    for mesh in meshes:
        for options in _options(config, vary, mesh or own, chosen=bool(mesh)):
            yield _replaced(config, mesh, options)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _meshes(config: Config, num_devices: int) -> Iterator[dict[str, int]]:
    """Degrees that multiply to the number of devices, on axes that the model has."""
    model = config.model
    length = model.max_sequence_length if isinstance(model, TransformerConfig | EncoderDecoderConfig) else 0
    length = getattr(config.data, "sequence_length", None) or length
    experts = model.experts.num_experts if isinstance(model, TransformerConfig) and model.experts is not None else 1
    for pipe in _divisors(num_devices) if isinstance(model, TransformerConfig | ViTConfig) else [1]:
        if pipe > _MOST_PIPE:
            break
        for tensor in _divisors(num_devices // pipe) if isinstance(model, OF_BLOCKS) else [1]:
            left = num_devices // pipe // tensor
            for context in _divisors(left) if length >= _LONG_SEQUENCE else [1]:
                for expert in [d for d in _divisors(left // context) if experts % d == 0]:
                    rest = left // context // expert
                    for fsdp in _divisors(rest):
                        degrees = (pipe, rest // fsdp, fsdp, expert, context, tensor)
                        yield dict(zip(AXES, degrees, strict=True))


def _options(
    config: Config, vary: Sequence[str], degrees: Mapping[str, int], *, chosen: bool
) -> Iterator[dict[str, Any]]:
    """Options besides the mesh, as paths of the config; what the config says is the first of each.

    Degrees that the search has chosen are not those that ZeRO 3 moves to `fsdp`.
    """
    parallel, pipe = config.parallel, degrees["pipe"]
    zero = 0 if chosen and parallel.zero == 3 else parallel.zero
    policies = ("none", "dots", "full")
    if not isinstance(config.model, OF_BLOCKS):
        # A ResNet recomputes its blocks or does not.
        policies = () if isinstance(config.model, MLPConfig) else ("none", "full")
    # What is varied: path of the config, what that says, and what else is tried.
    known: dict[str, tuple[str, Any, Sequence[Any]]] = {
        "zero": ("parallel.zero", zero, (0, 1, 2)),
        "remat": ("remat.policy", config.remat.policy, policies),
        "microbatches": ("microbatches", *_microbatches(config, degrees)),
        "schedule": ("parallel.schedule", parallel.schedule, ("1f1b", "interleaved_1f1b")),
    }
    choices = {
        path: tuple(dict.fromkeys((own, *others)))
        for name, (path, own, others) in known.items()
        if name in vary and (name != "schedule" or pipe > 1)
    }
    if "zero" in vary and degrees["data"] == 1 and zero != 3:
        choices["parallel.zero"] = (0,)
    for values in itertools.product(*choices.values()):
        options = dict(zip(choices, values, strict=True))
        # Of one microbatch stage 2 shards what stage 1 does.
        one = pipe == 1 and options.get("microbatches", config.train.accumulation_steps) == 1
        if options.get("parallel.zero") == 2 != parallel.zero and one:
            continue
        yield options


def _microbatches(config: Config, degrees: Mapping[str, int]) -> tuple[int, list[int]]:
    """The config's number of microbatches, and others: by doubling to a row on each device; of a pipeline per stage."""
    pipe, accumulation = degrees["pipe"], config.train.accumulation_steps
    if pipe > 1:
        own = config.parallel.microbatches or (accumulation if accumulation > 1 else 2 * pipe)
        return own, [2 * pipe, 4 * pipe, 8 * pipe]
    most = min(max(config.train.global_batch_size // batch_shards(degrees), 16), _MOST_MICROBATCHES)
    return accumulation, [2**power for power in range(most.bit_length())]


def _replaced(config: Config, mesh: dict[str, int], options: dict[str, Any]) -> Config:
    """The config with these degrees and options."""
    groups: dict[str, dict[str, Any]] = {"parallel": dict(mesh), "train": {}}
    pipe = mesh.get("pipe", config.parallel.pipe)
    for name, value in options.items():
        group, _, key = name.partition(".")
        if name == "microbatches":
            groups["parallel"]["microbatches"] = value
            groups["train"]["accumulation_steps"] = value if pipe == 1 else 1
        else:
            groups.setdefault(group, {})[key] = value
    if pipe == 1:
        groups["parallel"]["microbatches"] = None
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=update) for name, update in groups.items()}
    )


def describe_layout(config: Config) -> str:
    """A layout in a line: degrees above 1, and the options that matter on it."""
    parallel = config.parallel
    degrees = [f"{axis}={getattr(parallel, axis)}" for axis in AXES if getattr(parallel, axis) != 1] or ["one device"]
    options = [f"remat={config.remat.policy}"]
    if parallel.zero and parallel.data != 1:
        options.append(f"zero={parallel.zero}")
    if parallel.pipe != 1:
        options.append(f"{parallel.schedule} with {microbatches_of(config)} microbatches")
    elif microbatches_of(config) > 1:
        options.append(f"accumulation={microbatches_of(config)}")
    return ", ".join([*degrees, *options])


def why_not(found: Found) -> list[str]:
    """Why the rest does not fit, in a few lines: the nearest to fitting, and the reasons by how often they came."""
    lines = []
    if found.too_large:
        nearest = found.too_large[0]
        needed, there = format_gib(nearest.memory.total_bytes), format_gib(nearest.memory.usable_bytes or 0)
        lines.append(
            f"{len(found.too_large)} layouts need more memory than {there}; the smallest needs "
            f"{needed}: {describe_layout(nearest.config)}"
        )
    # Reasons that differ in numbers only are one, shown by its first.
    kinds: dict[str, list[str]] = {}
    for reason in found.refused:
        kinds.setdefault(re.sub(r"\d+", "N", reason), []).append(reason)
    for reasons in sorted(kinds.values(), key=len, reverse=True)[:3]:
        lines.append(f"{len(reasons)} refused: {reasons[0].split(';')[0]}")
    return lines


def largest_batch(config: Config, fits: Callable[[Config], bool], *, most: int = 2**20) -> int | None:
    """The largest global batch that fits, by doubling and bisecting.

    Args:
        config: the run; its batch is where the search starts.
        fits: whether a config fits, by the analytic model or by compiling.
        most: rows from which on no more are tried.

    Returns:
        Rows, a multiple of what the layout needs; None where not even the least batch fits.
    """

    def at(multiple: int) -> bool:
        return fits(with_rows(config, multiple * least))

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


def with_rows(config: Config, rows: int) -> Config:
    """The config with another global batch, of so many rows."""
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": rows})})


def choose_layout(loaded: Loaded, *, own_model: bool = False, sizes: RowSizes | None = None) -> Loaded:
    """The config with the group `parallel` chosen for the devices of this process' run.

    Args:
        loaded: the config.
        own_model: whether a model from Python takes the place of the config's.
        sizes: of data from Python that does.

    Raises:
        ConfigError: a model from Python, a degree set besides auto, devices that are not in the catalogue, or no
            layout that fits.
    """
    if own_model:
        # Neither the memory that its backward pass keeps nor its FLOPs are known from its shapes.
        raise ConfigError(
            "parallel.auto plans the model of the config, but model= is your own, which the planner does not know; "
            "set a degree instead: parallel.data=auto replicates its parameters, parallel.fsdp=auto shards them"
        )
    check_can_estimate(loaded.config, "parallel.auto")
    target = this_machine()
    if target is None:
        raise ConfigError("parallel.auto: this device is not in jaxtrain plan --list; set a degree: parallel.fsdp=auto")
    config, reasons = chosen(loaded.config, target, sizes)
    return dataclasses.replace(loaded, config=config, notes=(*loaded.notes, *reasons))


def chosen(config: Config, target: Target, sizes: RowSizes | None = None) -> tuple[Config, list[str]]:
    """The config with the fastest layout that is predicted to fit, and lines that say why.

    Raises:
        ConfigError: a degree is set besides auto, or no layout fits.
    """
    check_auto(config)
    found = search(config, target, vary=VARIED_BY_AUTO, sizes=sizes)
    reasons = why_not(found)
    if not found.ranked:
        raise ConfigError(f"parallel.auto: no layout of {target.name} fits: {reasons[0]}; see jaxtrain plan --search")
    best = found.ranked[0]
    time = "" if best.time is None else f", {best.time.seconds * 1e3:.0f} ms per step, bound by {best.time.bound}"
    line = (
        f"parallel.auto chose {describe_layout(best.config)} out of {found.tried} layouts for {target.name}: predicted "
        f"{format_gib(best.memory.total_bytes)} per device{time}"
    )
    picked = best.config.parallel.model_copy(update={"auto": False})
    return config.model_copy(update={"parallel": picked}), [line, *(reasons[:1] if found.too_large else [])]


def check_auto(config: Config) -> None:
    """Raise where a degree is set besides auto."""
    also = [axis for axis in AXES if axis in config.parallel.model_fields_set]
    if also:
        raise ConfigError(f"parallel.auto chooses every degree, but parallel.{also[0]} is set; leave one of them out")
