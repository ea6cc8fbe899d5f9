"""A plan: the analytic estimate, the compiler's word beside it, and advice where it does not fit."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.compilers.exact import ExactMemory
from jaxtrain.plan.compilers.process import ask
from jaxtrain.plan.search.advice import advise
from jaxtrain.plan.search.analyse import Terms, analyse
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.search.layouts import describe_layout, fitted
from jaxtrain.plan.search.own_step import own_functions

NO_COMPILER = "no compiler for it that runs without the hardware"


def analytic_plan(config: Config, target: Target, terms: Terms | None = None) -> Estimate:
    """The analytic estimate, with advice where it does not fit.

    Raises:
        ConfigError: a layout that the config cannot take.
    """
    estimate = analyse(config, target, terms)
    if estimate.memory.fits is False and estimate.unknown is None:
        estimate = dataclasses.replace(estimate, advice=advise(estimate, terms))
    return estimate


def fitted_plan(config: Config, target: Target, terms: Terms | None = None) -> Estimate:
    """The analytic plan; where the config's layout is for other devices, with the best one of a search.

    A batch that no layout takes grows to a row for each device, at the same tokens of the whole run.

    Raises:
        ConfigError: what a layout cannot mend, or a layout of functions of the user's own.
    """
    try:
        return analytic_plan(config, target, terms)
    except ConfigError as error:
        best = None if own_functions(config) else fitted(config, target, terms)
        if best is None:
            raise
        changed = ("batch",) if best.train.global_batch_size != config.train.global_batch_size else ()
        reason = str(error).split("; ")[0]
        line = f"planned for {target.name} with {describe_layout(best, changed)}, because {reason}"
    plan = analytic_plan(best, target, terms)
    rows, count = best.train.global_batch_size, target.num_devices
    few = f"{rows:,} rows a step are few for {count:,} devices: --search --vary batch tries more, at equal tokens"
    return dataclasses.replace(plan, fitted=line, advice=(*plan.advice, *([few] if rows < count else [])))


def with_compiler(estimate: Estimate, report: Callable[[str], None]) -> Estimate:
    """The estimate with the memory that the target's own compiler gives.

    The compiler runs in a process of its own: plugins of hardware that is not here stay out of this one, and what they
    print with them.

    Args:
        estimate: analytic.
        report: receives a line when a compile starts.

    Returns:
        The estimate with `exact`, or with the reason for its lack as `exact_missing`.
    """
    target = estimate.target
    if target.topology is None and target.hardware.kind != "cpu":
        return dataclasses.replace(estimate, exact_missing=NO_COMPILER)
    report(f"compiling the step for {target.name}")
    answer = _compile(estimate)
    if "error" in answer:
        return dataclasses.replace(estimate, exact_missing=answer["error"])
    after = dataclasses.replace(estimate, exact=ExactMemory(**answer))
    return dataclasses.replace(after, advice=advise(after) if after.fits is False and after.unknown is None else ())


def _compile(estimate: Estimate) -> dict[str, Any]:
    target = estimate.target
    request = {
        "what": "memory",
        "config": estimate.config.model_dump(mode="json"),
        "topology": target.topology,
        "num_slices": target.num_hosts if target.hardware.kind == "tpu" else 1,
        "num_devices": target.num_devices,
    }
    return ask(request)


def how_to_check(estimate: Estimate) -> str | None:
    """A line that says how to have an analytic estimate checked; None where no package would do it."""
    if estimate.exact_missing is None or "pip install" not in estimate.exact_missing:
        return None
    install = estimate.exact_missing[estimate.exact_missing.index("pip install") :]
    return f"the figures for {estimate.target.name} are analytic; to check them, plan again after {install}"
