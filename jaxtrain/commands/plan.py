"""`jaxtrain plan`: memory, time and cost of a config on hardware that this machine does not need to have."""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from jaxtrain.commands.shared import load_described, print_json, print_text, write_output
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
    with_rows,
)
from jaxtrain.plan.show import answer_lines, as_json, search_json, search_lines, table
from jaxtrain.plan.targets import Target, parse_targets
from jaxtrain.plan.workload import describe_workload
from jaxtrain.runtime.terminal import print_remark

# Layouts of a search that are compiled and shown.
_NUM_COMPILED = 3


def run(arguments: argparse.Namespace) -> int:
    """Print a plan, or the catalogue of hardware; return 0, also for a plan that does not fit."""
    hardware = catalogue(arguments.hardware)
    if arguments.list:
        rows = hardware.values()
        if arguments.json:
            print_json(hardware_json(rows))
        else:
            print_text(hardware_table(rows))
        return 0
    if arguments.config is None:
        raise ConfigError("jaxtrain plan: CONFIG is missing; 'jaxtrain plan --list' lists the hardware")
    loaded = _load(arguments)
    config = _with_tokens(loaded.config, arguments.tokens)
    plans: list[Estimate] = []
    searches: list[tuple[Target, Found]] = []
    for target in parse_targets(arguments.on, hardware, told=print_remark):
        target = _measured(target)
        if arguments.search or config.parallel.auto:
            found = _search(config, target, arguments)
            searches.append((target, found))
            plans += _plan_fastest(found, target, arguments)
        else:
            plans.append(_compiled(fitted_plan(config, target), arguments))
        if arguments.exact and plans[-1].exact is None:
            reason = plans[-1].exact_missing
            raise ConfigError(f"--exact: {target.name}: {reason}; without --exact, a plan is analytic")
    batches = []
    if arguments.largest_batch:
        batches = [_largest_batch(plan, arguments) for plan in plans]
    _print_answer(plans, searches, batches, arguments)
    if arguments.config_out is not None:
        best = _to_write(plans, batches, arguments.tokens)
        _write_config(arguments.config_out, best, loaded.name)
    for reason in dict.fromkeys(plan.exact_missing for plan in plans):
        if reason is not None and "pip install" in reason:
            print_remark(f"jaxtrain: the figures are analytic; {reason}")
    return 0


def _load(arguments: argparse.Namespace) -> Loaded:
    """Load the config, and check that the options fit it."""
    loaded = load_described(arguments)
    config = loaded.config
    if arguments.search:
        check_can_estimate(config, "--search")
    if arguments.tokens is not None:
        check_can_estimate(config, "--tokens")
    if config.parallel.auto:
        check_can_estimate(config, "parallel.auto")
        if not arguments.search:
            check_auto(config)
    if config.train.epochs is not None:
        raise ConfigError("train.epochs needs the data, which a plan does not read; set train.steps instead")
    if arguments.largest_batch and arguments.analytic and own_functions(config):
        raise ConfigError(f"--largest-batch of {own_functions(config)} needs a compiler; leave --analytic out")
    return loaded


def _measured(target: Target) -> Target:
    """Return the target; if it is this machine's CPU, with measured speed and memory."""
    if target.hardware.kind != "cpu":
        return target
    from jaxtrain.runtime import distributed

    distributed.start(compilation_cache=None)
    from jaxtrain.plan.targets import measure_cpu

    print_remark("measuring this machine's CPU")
    return dataclasses.replace(target, hardware=measure_cpu(target.num_devices))


def _with_tokens(config: Config, tokens: float | None) -> Config:
    return config if tokens is None else with_tokens(config, describe_workload(config), tokens)


def _compiled(plan: Estimate, arguments: argparse.Namespace) -> Estimate:
    return plan if arguments.analytic else with_compiler(plan, print_remark)


def _search(config: Config, target: Target, arguments: argparse.Namespace) -> Found:
    """Try the layouts of a target."""
    began = time.monotonic()
    parallel = config.parallel.model_copy(update={"auto": False})
    # A plan of `parallel: auto` shows the layout that a run would choose.
    vary = VARIED if arguments.search else VARIED_BY_AUTO
    found = search(config.model_copy(update={"parallel": parallel}), target, vary=vary)
    print_remark(f"tried {found.tried} layouts of {target.name} in {time.monotonic() - began:.1f} s")
    if not found.ranked and not found.too_large:
        raise ConfigError(f"no layout of {target.name} is possible: {found.refused[0]}")
    return found


def _plan_fastest(found: Found, target: Target, arguments: argparse.Namespace) -> list[Estimate]:
    """Plan the fastest layouts of a search, or the smallest if none fits.

    Those that do not fit by the compiler's figures come last.
    """
    if not found.ranked:
        return [analytic_plan(found.too_large[0].config, target)]
    plans = [_compiled(layout, arguments) for layout in found.ranked[:_NUM_COMPILED]]
    return sorted(plans, key=lambda plan: plan.fits is False)


def _largest_batch(plan: Estimate, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of the largest batch that fits, None if not even the smallest does, and what was asked."""
    rows = largest_batch(
        plan.config, lambda config: _compiled(analyse(config, plan.target), arguments).fits is not False
    )
    checked_by = "formulas" if plan.exact is None else "compiler"
    return {"target": plan.target.name, "rows": rows, "checked_by": checked_by}


def _print_answer(
    plans: Sequence[Estimate],
    searches: Sequence[tuple[Target, Found]],
    batches: Sequence[dict[str, Any]],
    arguments: argparse.Namespace,
) -> None:
    if arguments.json:
        answer: dict[str, object] = {"plans": [as_json(plan) for plan in plans]}
        if searches:
            answer["searches"] = [search_json(target, found) for target, found in searches]
        if batches:
            answer["largest_batch"] = batches
        print_json(answer)
        return
    first_plans: dict[str, Estimate] = {}
    for plan in plans:
        first_plans.setdefault(plan.target.name, plan)
    for plan in first_plans.values():
        lines = answer_lines(plan)
        print_text("\n".join([*lines, ""]))
    for target, found in searches:
        lines = search_lines(target, found, plans)
        print_text("\n".join([*lines, ""]))
    print_text(table(plans))
    for batch in batches:
        largest = f"the largest global batch that fits is {batch['rows']} rows"
        if batch["rows"] is None:
            largest = "not even the smallest batch fits"
        print_text(f"{batch['target']}: {largest} ({batch['checked_by']})")


def _to_write(plans: Sequence[Estimate], batches: Sequence[dict[str, Any]], tokens: float | None) -> Estimate | None:
    """Return the first plan that fits, with the largest batch that was found for it; None: none fits."""
    if not batches:
        return next((plan for plan in plans if plan.fits is not False), None)
    for plan, batch in zip(plans, batches, strict=True):
        if batch["rows"] is not None:
            config = with_rows(plan.config, batch["rows"])
            return analyse(_with_tokens(config, tokens), plan.target)
    return None


def _write_config(path: str, plan: Estimate | None, name: str) -> None:
    if plan is None:
        raise ConfigError(f"--config {path}: no plan fits, so there is no config to write")
    header = f"# {name}, planned for {plan.target.name}: {describe_layout(plan.config)}\n"
    text = to_yaml(plan.config.model_dump(mode="json"))
    write_output("--config", path, header + text)
    print_remark(f"train it: jaxtrain train {path}")
