"""Remat policies of a config on a target: peak memory and recomputed FLOPs, as a table and a picture.

    python scripts/remat_frontier.py gpt2_124m --on h100 parallel.data=1 train.accumulation_steps=64
    python scripts/remat_frontier.py quickstart --on here --analytic --picture frontier.png

The peak is the figure of the target's compiler where that is installed (pip install 'jaxtrain[aot]'; half a minute per
policy for a GPU, more for a TPU), else the analytic figure, which is marked. A policy is dominated where another one
needs no more memory and no more FLOPs.
"""

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config import load_config
from jaxtrain.config.model import ResNetConfig, TransformerConfig
from jaxtrain.config.schema import Config, RematConfig
from jaxtrain.errors import ConfigError
from jaxtrain.plan.catalogue.hardware import Target, parse_targets
from jaxtrain.plan.search.analyse import analyse
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.search.make import with_compiler

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


def main() -> None:
    """Print the table, and draw the picture where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--on", default="here", help="a target such as h100x8, v5p-8 or v5p:2x2x2; here: this machine")
    parser.add_argument("--analytic", action="store_true", help="do not compile")
    parser.add_argument("--picture", type=Path, help="file for the picture, .png or .svg")
    arguments = parser.parse_intermixed_args()
    try:
        target = read_target(arguments.on)
        config = load_config(arguments.config, overrides=arguments.overrides).config

        def compiled(estimate: Estimate) -> Estimate:
            if arguments.analytic:
                return estimate
            after = with_compiler(estimate, lambda line: print(line, file=sys.stderr, flush=True))
            if after.exact is None:
                print(f"analytic only: {after.exact_missing}", file=sys.stderr)
            return after

        points = remat_frontier(config, target, compiled)
    except ConfigError as error:
        sys.exit(str(error))
    usable = points[0].estimate.memory.usable_bytes
    fits = "" if usable is None else f"; {usable / 2**30:.1f} GiB are usable"
    print(f"{arguments.config} on {target.name}, of one device{fits}")
    print(frontier_table(points))
    if arguments.picture is not None:
        title = f"{' '.join([arguments.config, *arguments.overrides])} on {target.name}"
        draw(points, usable, arguments.picture, title)
        print(f"wrote {arguments.picture}")


def read_target(text: str) -> Target:
    """Parse the target of `--on`."""
    if text == "here":
        from jaxtrain.plan.catalogue.here import this_machine
        from jaxtrain.runtime import distributed

        distributed.start(compilation_cache=None)
        target = this_machine()
        if target is None:
            raise ConfigError("this machine is not in the catalogue (jaxtrain plan --list); give --on")
        return target
    slice_shape = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", text)
    if slice_shape is not None:
        text = f"{slice_shape[1]}-{math.prod(map(int, slice_shape[2].split('x')))}"
    targets = parse_targets(text)
    if len(targets) != 1:
        raise ConfigError(f"--on {text} names {len(targets)} targets; give one")
    return targets[0]


def draw(points: list[Point], usable: int | None, path: Path, title: str) -> None:
    """Draw the peak over the recomputed FLOPs.

    A line joins the policies that need no host memory (blue); dominated policies are hollow.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    alone = [one for one in points if not one.dominated and not one.host_bytes]
    best = sorted((one.extra_compute, one.peak_bytes / 2**30) for one in alone)
    axes.plot(*zip(*best, strict=True), color="#888888", linewidth=1, zorder=1)
    for index, one in enumerate(points):
        peak = one.peak_bytes / 2**30
        color = "none" if one.dominated else "#c04000" if one.host_bytes else "#0050a0"
        axes.scatter([one.extra_compute], [peak], facecolor=color, edgecolor="#404040", zorder=2)
        label = one.name.replace("remat.", "").replace("policy=", "").replace("names names=", "")
        # Policies of similar height follow each other in the list: their labels alternate above and below.
        below = {"xytext": (6, 5 if index % 2 else -11), "textcoords": "offset points"}
        axes.annotate(label, (one.extra_compute, peak), fontsize=7, **below)
    if usable is not None and usable / 2**30 < 2 * best[0][1]:
        axes.axhline(usable / 2**30, color="#a00000", linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.35)
    axes.set_xlabel("recomputed FLOPs, share of a step")
    axes.set_ylabel("peak per device, GiB")
    axes.set_title(title, fontsize=9, wrap=True)
    figure.savefig(path, dpi=140)


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


if __name__ == "__main__":
    main()
