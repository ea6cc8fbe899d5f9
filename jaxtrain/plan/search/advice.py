"""The smallest change that makes a config fit, tried in the analytic model. No jax here."""

from collections.abc import Iterator
from operator import attrgetter

from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import AXES
from jaxtrain.models.shipped.structure import OF_BLOCKS
from jaxtrain.plan.catalogue.hardware import Target, target_of
from jaxtrain.plan.search.analyse import Terms, analyse
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.search.layouts import fitted, with_optimizer

_GIB = 2**30
_SHOWN = 4
# Besides the degrees, what a search may set.
_OF_LAYOUT = (
    *("parallel.zero", "parallel.schedule", "parallel.microbatches", "remat.policy"),
    *("train.accumulation_steps", "train.global_batch_size"),
)


def advise(estimate: Estimate, terms: Terms | None = None) -> tuple[str, ...]:
    """Lines that say what makes it fit, each with the memory and time that the model predicts for it.

    Single changes first, those that leave the numbers of a run alone before those that do not; where none is enough,
    two together; where none of these is, more devices.
    """
    changes = list(_changes(estimate.config, estimate.target))
    works = [line for name, config, target in changes if (line := _try(name, config, target, estimate, terms))]
    if not works:
        works = [
            line
            for name, config, target in _pairs(estimate.config, estimate.target)
            if (line := _try(name, config, target, estimate, terms))
        ]
    if not works:
        now = estimate.target
        more = (_grown(estimate, target_of(now.hardware, now.num_devices * factor), terms) for factor in (2, 4, 8))
        works = [line for line in more if line][:1]
    if not works:
        return ("no single change, pair of changes or eight times the devices makes it fit; jaxtrain plan --search",)
    return tuple(works[:_SHOWN])


def _try(name: str, config: Config, target: Target, before: Estimate, terms: Terms | None) -> str | None:
    try:
        after = analyse(config, target, terms)
    except ConfigError:
        return None
    if not _fits(after, before):
        return None
    slower = ""
    if before.time is not None and after.time is not None:
        slower = f", step {after.time.seconds / before.time.seconds:.2f} x as long"
    return f"{name}: {after.memory.total_bytes / _GIB:.1f} GiB{slower}"


def _fits(after: Estimate, before: Estimate) -> bool:
    """Whether a change fits; where a compiler asked for more than the model said, by so much more."""
    exact, usable = before.exact, after.memory.usable_bytes
    if exact is None or usable is None:
        return bool(after.memory.fits)
    more = max(1.0, exact.peak_bytes / before.memory.total_bytes)
    return after.memory.total_bytes * more <= (exact.capacity_bytes or usable)


def _changes(config: Config, target: Target) -> Iterator[tuple[str, Config, Target]]:
    """Single changes, the cheapest first."""
    parallel, train = config.parallel, config.train
    order = ("none", "dots", "full", "sqrt") if isinstance(config.model, OF_BLOCKS) else ("none", "full")
    if config.remat.policy in order:
        for policy in order[order.index(config.remat.policy) + 1 :]:
            # Only full (and names, which are the user's) take tensors that are offloaded.
            offload = config.remat.offload if policy == "full" else ()
            remat = config.remat.model_copy(update={"policy": policy, "offload": offload})
            yield f"remat.policy={policy}", config.model_copy(update={"remat": remat}), target
    if parallel.data != 1 and isinstance(parallel.data, int):
        if parallel.zero == 0:
            sharded = parallel.model_copy(update={"zero": 1})
            yield "parallel.zero=1", config.model_copy(update={"parallel": sharded}), target
        shards = parallel.data * int(parallel.fsdp)
        sharded = parallel.model_copy(update={"zero": 0, "data": 1, "fsdp": shards})
        yield f"parallel.fsdp={shards}", config.model_copy(update={"parallel": sharded}), target
    if isinstance(config.model, OF_BLOCKS):
        yield from _inward(config, target)
    if parallel.pipe == 1:
        for factor in (2, 4, 8, 16):
            steps = train.accumulation_steps * factor
            more = train.model_copy(update={"accumulation_steps": steps})
            yield f"train.accumulation_steps={steps}", config.model_copy(update={"train": more}), target
    if config.finetune.lora is not None:
        formats = ("int8", "nf4")
        for base in formats[0 if config.finetune.base is None else 1 + formats.index(config.finetune.base) :]:
            smaller = config.finetune.model_copy(update={"base": base})
            yield f"finetune.base={base}", config.model_copy(update={"finetune": smaller}), target
    if not config.optimizer.offload and target.hardware.kind != "cpu":
        moved = config.optimizer.model_copy(update={"offload": True})
        yield "optimizer.offload=true", config.model_copy(update={"optimizer": moved}), target
    if config.precision.policy == "fp32":
        lower = config.precision.model_copy(update={"policy": "bf16"})
        yield "precision.policy=bf16", config.model_copy(update={"precision": lower}), target
    if config.optimizer.kind == "adamw" and config.optimizer.moments != "int8":
        smaller = config.optimizer.model_copy(update={"moments": "int8"})
        yield "optimizer.moments=int8", config.model_copy(update={"optimizer": smaller}), target
    for kind in ("lion", "adafactor"):
        if config.optimizer.kind == "adamw":
            other = config.model_copy(update={"optimizer": with_optimizer(config, kind)})
            # Adafactor keeps a first moment where adamw's b1 stays in the config.
            name = "optimizer.kind=lion" if kind == "lion" else "optimizer.kind=adafactor and optimizer.b1=null"
            yield f"{name} (another optimizer: its learning rate too)", other, target
    if config.precision.policy == "bf16":
        lower = config.precision.model_copy(update={"policy": "bf16_pure"})
        pure = config.model_copy(update={"precision": lower})
        yield "precision.policy=bf16_pure (no fp32 master parameters)", pure, target


def _pairs(config: Config, target: Target) -> Iterator[tuple[str, Config, Target]]:
    """Two changes of different keys, each two once."""
    seen: set[frozenset[str]] = set()
    for first, changed, _ in list(_changes(config, target)):
        for second, both, _ in _changes(changed, target):
            names = frozenset((first, second))
            if first.partition("=")[0] != second.partition("=")[0] and names not in seen:
                seen.add(names)
                yield f"{first} and {second}", both, target


def _inward(config: Config, target: Target) -> Iterator[tuple[str, Config, Target]]:
    """Devices moved from the batch's axes to heads or sequence, for activations of few long rows."""
    parallel = config.parallel
    for axis in ("tensor", "context"):
        for factor in (2, 4, 8):
            for source in ("fsdp", "data"):
                degree = int(getattr(parallel, source))
                if degree % factor:
                    continue
                degrees = {axis: int(getattr(parallel, axis)) * factor, source: degree // factor}
                moved = config.model_copy(update={"parallel": parallel.model_copy(update=degrees)})
                yield " and ".join(f"parallel.{name}={size}" for name, size in degrees.items()), moved, target
                break


def _grown(estimate: Estimate, target: Target, terms: Terms | None) -> str | None:
    """The same run on other devices, with the layout of a search."""
    config = fitted(estimate.config, target, terms)
    if config is None:
        return None
    words = []
    for key in (*(f"parallel.{axis}" for axis in AXES), *_OF_LAYOUT):
        before, after = (attrgetter(key)(one) for one in (estimate.config, config))
        words += [f"{key}={'null' if after is None else after}"] if after != before else []
    return _try(f"{target.name} with {' and '.join(words)}", config, target, estimate, terms)
