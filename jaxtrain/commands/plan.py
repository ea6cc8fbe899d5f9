"""`jaxtrain plan`: memory, time and cost of a config on hardware that this machine does not need to have."""

import argparse
import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.commands.shared import check_or_remark, print_json, print_text, writes
from jaxtrain.config import load_config
from jaxtrain.config.files import to_yaml
from jaxtrain.config.load import Loaded
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.cost import with_tokens
from jaxtrain.plan.estimate import Estimate, analyse, check_can_estimate, own_functions
from jaxtrain.plan.hardware import catalogue, hardware_json, hardware_table
from jaxtrain.plan.plans import analytic_plan, fitted_plan, with_compiler
from jaxtrain.plan.search import (
    VARIED,
    VARIED_BY_AUTO,
    Found,
    check_auto,
    describe_layout,
    largest_batch,
    search,
    why_not,
)
from jaxtrain.plan.show import answer_lines, as_json, search_lines, table
from jaxtrain.plan.targets import Target, parse_targets
from jaxtrain.plan.workload import describe_workload
from jaxtrain.runtime.terminal import print_remark

# Layouts of a search that are compiled and shown.
_TOP = 3


@dataclass
class _Plans:
    """The plans to show; what searches found, and the compiler rejected of it; the largest batches."""

    estimates: list[Estimate] = field(default_factory=list)
    found: list[tuple[Target, Found]] = field(default_factory=list)
    rejected: list[Estimate] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    """Print a plan, or the catalogue of hardware; 0, of a plan that does not fit too."""
    hardware = catalogue(arguments.hardware)
    if arguments.list:
        rows = hardware.values()
        print_json(hardware_json(rows)) if arguments.json else print_text(hardware_table(rows))
        return 0
    if arguments.config is None:
        raise ConfigError("jaxtrain plan: CONFIG is missing; 'jaxtrain plan --list' lists the hardware")
    loaded = load_config(arguments.config, overrides=arguments.overrides, weights=False)
    loaded.check_described()
    if loaded.config.name is None:
        loaded = dataclasses.replace(loaded, config=loaded.config.model_copy(update={"name": loaded.name}))
    check_or_remark(loaded)
    _check(loaded.config, arguments)
    targets = [_measured(target) for target in parse_targets(arguments.on, hardware, told=print_remark)]
    config = _with_tokens(loaded.config, arguments.tokens)
    plans = _Plans()
    for target in targets:
        if arguments.search or loaded.config.parallel.auto:
            _search(plans, config, target, arguments)
        else:
            plans.estimates.append(_compiled(fitted_plan(config, target), arguments))
    for one in plans.estimates if arguments.exact else ():
        if one.exact is None:
            raise ConfigError(f"--exact: {one.target.name}: {one.exact_missing}; without --exact, a plan is analytic")
    if arguments.largest_batch:
        plans.batches += [_largest_batch(one, arguments) for one in plans.estimates]
    _print_answer(plans, arguments)
    if arguments.config_out is not None:
        _write_config(_to_write(plans, loaded.config, arguments.tokens), Path(arguments.config_out), loaded)
    for line in dict.fromkeys(one.exact_missing or "" for one in plans.estimates):
        if "pip install" in line:
            print_remark(f"jaxtrain: the figures are analytic; {line}")
    return 0


def _check(config: Config, arguments: argparse.Namespace) -> None:
    """Check that the options fit the config."""
    for option, given in {
        "--search": arguments.search,
        "parallel.auto": config.parallel.auto,
        "--tokens": arguments.tokens is not None,
    }.items():
        if given:
            check_can_estimate(config, option)
    if config.train.epochs is not None:
        raise ConfigError("train.epochs needs the data, which a plan does not read; set train.steps instead")
    if arguments.largest_batch and arguments.analytic and own_functions(config):
        raise ConfigError(f"--largest-batch of {own_functions(config)} needs a compiler; leave --analytic out")
    if config.parallel.auto and not arguments.search:
        check_auto(config)


def _measured(target: Target) -> Target:
    """Return the target; where it is this machine's CPU, with measured speed and memory."""
    if target.hardware.kind != "cpu":
        return target
    from jaxtrain.runtime import distributed

    distributed.start(compilation_cache=None)
    from jaxtrain.plan.targets import measure_cpu

    print_remark("measuring this machine's CPU")
    return dataclasses.replace(target, hardware=measure_cpu(target.num_devices))


def _with_tokens(config: Config, tokens: float | None) -> Config:
    return config if tokens is None else with_tokens(config, describe_workload(config), tokens)


def _compiled(estimate: Estimate, arguments: argparse.Namespace) -> Estimate:
    return estimate if arguments.analytic else with_compiler(estimate, print_remark)


def _search(plans: _Plans, config: Config, target: Target, arguments: argparse.Namespace) -> None:
    """Rank the layouts of a target, and add the plans of the fastest.

    The next layout takes the place of one that does not fit by the compiler's figures; where none fits, the plan is of
    the smallest.
    """
    began = time.monotonic()
    # A plan of `parallel: auto` shows the layout that a run would choose.
    vary = VARIED if arguments.search else VARIED_BY_AUTO
    parallel = config.parallel.model_copy(update={"auto": False})
    found = search(config.model_copy(update={"parallel": parallel}), target, vary=vary)
    print_remark(f"tried {found.tried} layouts of {target.name} in {time.monotonic() - began:.1f} s")
    plans.found.append((target, found))
    if not found.ranked:
        if not found.too_large:
            reason = found.refused[0] if found.refused else "there is none"
            raise ConfigError(f"no layout of {target.name} is possible: {reason}")
        plans.estimates.append(analytic_plan(found.too_large[0].config, target))
        return
    best: list[Estimate] = []
    rejected: list[Estimate] = []
    for estimate in found.ranked[: 2 * _TOP]:
        if len(best) == _TOP:
            break
        compiled = _compiled(estimate, arguments)
        (rejected if compiled.fits is False else best).append(compiled)
    plans.estimates += best or [min(rejected, key=lambda one: one.peak_bytes)]
    plans.rejected += rejected


def _largest_batch(estimate: Estimate, arguments: argparse.Namespace) -> dict[str, Any]:
    """The answer to `--largest-batch` for one target: rows, None where not even the least fits, and what said so."""

    def fits(config: Config) -> bool:
        tried = analyse(config, estimate.target)
        if not arguments.analytic:
            tried = with_compiler(tried, lambda line: print_remark(f"{line} with {tried.workload.rows} rows"))
        return tried.fits is not False

    rows = largest_batch(estimate.config, fits)
    checked_by = "formulas" if arguments.analytic or estimate.exact is None else "compiler"
    return {"target": estimate.target.name, "rows": rows, "checked_by": checked_by}


def _print_answer(plans: _Plans, arguments: argparse.Namespace) -> None:
    if arguments.json:
        answer: dict[str, object] = {"plans": [as_json(one) for one in plans.estimates]}
        if plans.found:
            answer["searches"] = [_search_json(target, found) for target, found in plans.found]
        if plans.batches:
            answer["largest_batch"] = plans.batches
        print_json(answer)
        return
    names = [one.target.name for one in plans.estimates]
    for name in dict.fromkeys(names):
        print_text("\n".join([*answer_lines(plans.estimates[names.index(name)]), ""]))
    for target, found in plans.found:
        print_text("\n".join([*search_lines(target, found, [*plans.estimates, *plans.rejected]), ""]))
    print_text(table(plans.estimates))
    for batch in plans.batches:
        how, rows = "by compiling" if batch["checked_by"] == "compiler" else "analytic", batch["rows"]
        largest = (
            "not even the smallest batch fits" if rows is None else f"the largest global batch that fits is {rows} rows"
        )
        print_text(f"{batch['target']}: {largest} ({how})")


def _search_json(target: Target, found: Found) -> dict[str, object]:
    """A search in numbers, with units in their names; no time where none is known."""
    ranking = [
        {
            "layout": describe_layout(one.config),
            "step_seconds": None if one.time is None else one.time.seconds,
            "rows_per_second": one.rows_per_second,
            "memory_bytes": one.memory.total_bytes,
        }
        for one in found.ranked[:20]
    ]
    fit = len(found.ranked)
    return {"target": target.name, "tried": found.tried, "fit": fit, "reasons": why_not(found), "ranking": ranking}


def _to_write(plans: _Plans, asked: Config, tokens: float | None) -> Estimate | None:
    """The first plan that fits, with the largest batch that was found for it; None: none fits.

    Its steps, and the lengths of its schedule, follow anew from those of the config that was asked for.
    """
    if not plans.batches:
        return next((one for one in plans.estimates if one.fits is not False), None)
    for estimate, batch in zip(plans.estimates, plans.batches, strict=True):
        if batch["rows"] is not None:
            steps, schedule = asked.train.steps, asked.optimizer.schedule
            train = estimate.config.train.model_copy(update={"global_batch_size": batch["rows"], "steps": steps})
            optimizer = estimate.config.optimizer.model_copy(update={"schedule": schedule})
            update = {"train": train, "optimizer": optimizer}
            return analyse(_with_tokens(estimate.config.model_copy(update=update), tokens), estimate.target)
    return None


def _write_config(best: Estimate | None, path: Path, loaded: Loaded) -> None:
    if best is None:
        raise ConfigError(f"--config {path}: no plan fits, so there is no config to write")
    if best.config.optimizer.schedule != loaded.config.optimizer.schedule:
        steps = best.config.train.steps
        print_remark(f"optimizer.schedule was scaled to train.steps={steps}")
    header = f"# {loaded.name}, planned for {best.target.name}: {describe_layout(best.config)}\n"
    with writes("--config"):
        path.write_text(header + to_yaml(best.config.model_dump(mode="json")), encoding="utf-8")
    print_remark(f"wrote {path}: jaxtrain train {path}")
