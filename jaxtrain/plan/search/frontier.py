"""Remat policies of a config on a target: peak memory against compute that is done twice. No jax here."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtrain.config.models import ResNetConfig, TransformerConfig
from jaxtrain.config.schema import Config, RematConfig
from jaxtrain.errors import ConfigError
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.search.analyse import analyse
from jaxtrain.plan.search.estimate import Estimate

_QUERIES = ("query", "key", "value")
_KEPT = (*_QUERIES, "attention_output", "attention_projection")
_ANY = (
    RematConfig(policy="none"),
    RematConfig(policy="full"),
    RematConfig(policy="sqrt"),
    RematConfig(policy="full", offload=("block_input",)),
)
# What is worth a look, out of all the sets of names that there are.
_TRANSFORMER = (
    *_ANY,
    RematConfig(policy="dots"),
    RematConfig(policy="names", names=("attention_output",)),
    RematConfig(policy="names", names=(*_QUERIES, "attention_output")),
    RematConfig(policy="names", names=(*_KEPT, "mlp_hidden", "mlp_output")),
    RematConfig(policy="names", names=(*_KEPT, "mlp_output"), offload=("mlp_hidden",)),
)


@dataclass(frozen=True)
class Point:
    """One policy.

    Attributes:
        name: as the keys of a config.
        estimate: of the config with this policy, with the compiler's memory where it was asked.
        extra_compute: FLOPs that are done again, as a share of those of a step that does nothing twice.
        peak_bytes: of one device, by the compiler where there is one.
        host_bytes: on the host for one device.
        dominated: another policy takes no more of memory, compute and the host's memory, and less of one of them.
    """

    name: str
    estimate: Estimate
    extra_compute: float
    peak_bytes: int
    host_bytes: int
    dominated: bool = False


def remat_frontier(config: Config, target: Target, compiled: Callable[[Estimate], Estimate]) -> list[Point]:
    """Every policy, the one with the highest peak first.

    Args:
        config: the run; its remat is replaced.
        target: hardware and count.
        compiled: gives an estimate the compiler's memory, or leaves it as it is.

    Raises:
        ConfigError: a model without blocks to recompute, or a layout that it cannot take.
    """
    match config.model:
        case TransformerConfig():
            policies = _TRANSFORMER
        case ResNetConfig():
            policies = _ANY
        case _:
            raise ConfigError(f"model.kind={config.model.kind} has no blocks whose activations could be recomputed")
    least = _flops(analyse(_with(config, RematConfig(policy="none")), target))
    points = [_point(compiled(analyse(_with(config, remat), target)), least) for remat in policies]
    points = [dataclasses.replace(one, dominated=any(_beats(other, one) for other in points)) for one in points]
    return sorted(points, key=lambda one: (-one.peak_bytes, one.extra_compute))


def _with(config: Config, remat: RematConfig) -> Config:
    return config.model_copy(update={"remat": remat})


def _point(estimate: Estimate, least_flops: float) -> Point:
    remat = estimate.config.remat
    lists = {"names": remat.names, "offload": remat.offload}
    keys = [
        f"remat.policy={remat.policy}",
        *(f"remat.{key}=[{','.join(names)}]" for key, names in lists.items() if names),
    ]
    exact = estimate.exact
    host = sum(estimate.memory.host_parts.values()) if exact is None else exact.host_bytes
    peak = estimate.memory.total_bytes if exact is None else exact.peak_bytes
    return Point(" ".join(keys), estimate, _flops(estimate) / least_flops - 1, peak, host)


def _flops(estimate: Estimate) -> float:
    if estimate.time is None:
        config, name = estimate.config, estimate.target.hardware.name
        raise ConfigError(f"no peak of {name} is known for precision.policy={config.precision.policy}; use another")
    return sum(block.flops for block in estimate.time.blocks)


def _beats(one: Point, other: Point) -> bool:
    ours, theirs = ((p.peak_bytes, p.extra_compute, p.host_bytes) for p in (one, other))
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def frontier_table(points: Sequence[Point]) -> str:
    """The points as lines: peak, host, extra compute, predicted step, policy; dominated ones marked."""
    lines = [f"{'peak GiB':>9} {'host GiB':>9} {'recomputed':>10} {'step ms':>9}  policy"]
    for point in points:
        time = point.estimate.time
        step = "-" if time is None else f"{1e3 * time.seconds:,.0f}"
        how = "" if point.estimate.exact is not None else " (analytic)"
        worse = "  [dominated]" if point.dominated else ""
        lines.append(
            f"{point.peak_bytes / 2**30:9.2f} {point.host_bytes / 2**30:9.2f} {point.extra_compute:10.1%} {step:>9}  "
            f"{point.name}{how}{worse}"
        )
    return "\n".join(lines)
