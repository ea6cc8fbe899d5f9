"""`jaxtrain plan`: memory, time and cost of a config on hardware that this machine does not need to have."""

import argparse
import dataclasses
from typing import Any

from jaxtrain.commands.shared import load_described, print_json, print_text, write_output
from jaxtrain.config.files import to_yaml
from jaxtrain.config.load import Loaded
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.cost import with_tokens
from jaxtrain.plan.estimate import Estimate, analyse, check_can_estimate
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
    config = _with_tokens(loaded.config, arguments)
    plans: list[Estimate] = []
    searches: list[dict[str, Any]] = []
    lines: list[str] = []
    for target in parse_targets(arguments.on, hardware, told=print_remark):
        target = _measured(target)
        found = None
        if arguments.search or config.parallel.auto:
            found = _search(config, target, arguments)
            fastest = _plan_fastest(found, target, arguments)
        else:
            fastest = [_compiled(fitted_plan(config, target), arguments)]
        if arguments.largest_batch:
            fastest = [_with_largest_batch(plan, arguments) for plan in fastest]
        plans += fastest
        lines += [*answer_lines(fastest[0]), ""]
        if found is not None:
            searches.append(search_json(target, found))
            lines += [*search_lines(target, found, fastest), ""]
    if arguments.json:
        print_json({"plans": [as_json(plan) for plan in plans], "searches": searches})
    else:
        print_text("\n".join([*lines, table(plans)]))
    if arguments.config_out is not None:
        _write_config(arguments.config_out, plans, loaded.name)
    for reason in {plan.exact_missing for plan in plans} - {None}:
        print_remark(f"jaxtrain: the figures are analytic; {reason}")
    return 0


def _load(arguments: argparse.Namespace) -> Loaded:
    """Load the config, and check that the options fit it."""
    loaded = load_described(arguments)
    config = loaded.config
    needs = {
        "--search": arguments.search,
        "--tokens": arguments.tokens,
        "--largest-batch --analytic": arguments.largest_batch and arguments.analytic,
        "parallel.auto": config.parallel.auto,
    }
    for option, is_used in needs.items():
        if is_used:
            check_can_estimate(config, option)
    if config.parallel.auto and not arguments.search:
        check_auto(config)
    if config.train.epochs is not None:
        raise ConfigError("train.epochs needs the data, which a plan does not read; set train.steps instead")
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


def _with_tokens(config: Config, arguments: argparse.Namespace) -> Config:
    if arguments.tokens is None:
        return config
    return with_tokens(config, describe_workload(config), arguments.tokens)


def _compiled(plan: Estimate, arguments: argparse.Namespace) -> Estimate:
    """Return a plan with the compiler's figures, if there is a compiler and it is wanted."""
    if arguments.analytic:
        return plan
    plan = with_compiler(plan, print_remark)
    if arguments.exact and plan.exact is None:
        raise ConfigError(f"--exact: {plan.target.name}: {plan.exact_missing}; without --exact, a plan is analytic")
    return plan


def _search(config: Config, target: Target, arguments: argparse.Namespace) -> Found:
    """Try the layouts of a target."""
    parallel = config.parallel.model_copy(update={"auto": False})
    # A plan of `parallel: auto` shows the layout that a run would choose.
    vary = VARIED if arguments.search else VARIED_BY_AUTO
    found = search(config.model_copy(update={"parallel": parallel}), target, vary=vary)
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


def _with_largest_batch(plan: Estimate, arguments: argparse.Namespace) -> Estimate:
    """Plan the largest batch that fits; a plan of which not even the smallest batch fits stays as it is."""

    def planned(config: Config) -> Estimate:
        return _compiled(analyse(config, plan.target), arguments)

    rows = largest_batch(plan.config, lambda config: planned(config).fits is not False)
    if rows is None:
        return plan
    return planned(_with_tokens(with_rows(plan.config, rows), arguments))


def _write_config(path: str, plans: list[Estimate], name: str) -> None:
    """Write the config of the first plan that fits."""
    plan = next((plan for plan in plans if plan.fits is not False), None)
    if plan is None:
        raise ConfigError(f"--config {path}: no plan fits, so there is no config to write")
    header = f"# {name}, planned for {plan.target.name}: {describe_layout(plan.config)}\n"
    text = to_yaml(plan.config.model_dump(mode="json"))
    write_output("--config", path, header + text)
    print_remark(f"train it: jaxtrain train {path}")
