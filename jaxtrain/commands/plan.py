"""`jaxtrain plan`: memory, time and cost of a config on hardware that this machine does not need to have."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.commands.kinds import check_or_remark
from jaxtrain.commands.output import print_json, print_text
from jaxtrain.config import load_config
from jaxtrain.config.load import Loaded
from jaxtrain.config.schema import Config
from jaxtrain.config.yaml_file import to_yaml
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.plan.catalogue.hardware import Target, catalogue, parse_targets, with_network
from jaxtrain.plan.catalogue.listing import hardware_json, hardware_table
from jaxtrain.plan.report.rows import answer_lines
from jaxtrain.plan.report.show import as_json, table
from jaxtrain.plan.search.analyse import Terms, analyse
from jaxtrain.plan.search.auto import VARIED_BY_AUTO, check_auto
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.search.layouts import VARIED, Found, describe_layout, largest_batch, search, why_not
from jaxtrain.plan.search.make import analytic_plan, fitted_plan, how_to_check, with_compiler
from jaxtrain.plan.search.own_step import check_can_estimate, own_functions
from jaxtrain.plan.search.run_length import with_length
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.runtime.terminal import print_remark


@dataclass(frozen=True)
class Wanted:
    """The options of `jaxtrain plan`, in the words of its help."""

    on: str | None = None
    hardware_file: str | None = None
    analytic: bool = False
    exact: bool = False
    search: bool = False
    vary: tuple[str, ...] = ()
    top: int = 3
    largest_batch: bool = False
    tokens: float | None = None
    epochs: float | None = None
    rows_per_epoch: int | None = None
    usd_per_kwh: float = 0.12
    checkpoint_minutes: float | None = None
    interruptions_per_day: float | None = None
    downtime: float | None = None
    network: str | None = None
    html: str | None = None
    config_out: str | None = None
    full: bool = False
    json: bool = False


def run_plan(config: str | None, overrides: Sequence[str], wanted: Wanted, *, list_hardware: bool) -> int:
    """Print a plan, or the catalogue of hardware.

    Args:
        config: a shipped name or a path; None only where the catalogue is listed.
        overrides: `key=value` settings that replace those of the config.
        wanted: the options of the command.
        list_hardware: whether the catalogue is printed instead of a plan.

    Returns:
        The exit code 0, of a plan that does not fit too.

    Raises:
        ConfigError: the hardware is not known, or no layout of any batch is possible on a target; with `exact`, no
            compiler checked a figure.
    """
    hardware = catalogue(wanted.hardware_file)
    if list_hardware:
        print_json(hardware_json(hardware.values())) if wanted.json else print_text(hardware_table(hardware.values()))
        return 0
    if config is None:
        raise ConfigError("jaxtrain plan: CONFIG is missing; 'jaxtrain plan --list' lists the hardware")
    loaded = load_config(config, overrides=overrides, weights=False)
    loaded.check_described()
    if loaded.config.name is None:
        loaded = dataclasses.replace(loaded, config=loaded.config.model_copy(update={"name": loaded.name}))
    check_or_remark(loaded)
    _check(loaded.config, wanted)
    targets = [_measured(target) for target in parse_targets(wanted.on or "cpu", hardware, told=print_remark)]
    if wanted.network is not None:
        targets = [with_network(target, wanted.network) for target in targets]
    terms = _terms(loaded.config, wanted)
    estimates, found, rejected = [], [], []
    for target in targets:
        if wanted.search or loaded.config.parallel.auto:
            result = _search(loaded.config, target, wanted, terms)
            found.append((target, result))
            best, too_large = _best(result, target, wanted, terms)
            estimates += best
            rejected += too_large
        else:
            estimates.append(_compiled(fitted_plan(loaded.config, target, terms), wanted))
    for one in estimates if wanted.exact else ():
        if one.exact is None:
            raise ConfigError(f"--exact: {one.target.name}: {one.exact_missing}; without --exact, a plan is analytic")
    batches = [_largest_batch(one, wanted) for one in estimates] if wanted.largest_batch else []
    _answer(estimates, found, rejected, batches, wanted)
    _write_page(estimates, found, rejected, wanted)
    if wanted.config_out is not None:
        _write_config(_to_write(estimates, batches, terms, loaded.config), Path(wanted.config_out), loaded)
    lines = dict.fromkeys(line for one in estimates if (line := how_to_check(one)) is not None)
    for line in lines:
        print_remark(f"jaxtrain: {line}")
    return 0


def _check(config: Config, wanted: Wanted) -> None:
    """Check that the options fit together."""
    asked = {
        "--search": wanted.search,
        "parallel.auto": config.parallel.auto,
        "--tokens": wanted.tokens is not None,
        "--epochs": wanted.epochs is not None,
    }
    for option in (option for option, given in asked.items() if given):
        check_can_estimate(config, option)
    if wanted.largest_batch and wanted.analytic and own_functions(config):
        raise ConfigError(f"--largest-batch of {own_functions(config)} needs a compiler; leave --analytic out")
    if wanted.search:
        return
    if config.parallel.auto:
        check_auto(config)
    elif wanted.vary:
        raise ConfigError(f"--vary {','.join(wanted.vary)} says what a search varies; add --search")


def _measured(target: Target) -> Target:
    """Return the target; where it is this machine's CPU, with measured speed and memory."""
    if target.hardware.kind != "cpu":
        return target
    from jaxtrain.runtime import distributed

    distributed.start(compilation_cache=None)
    from jaxtrain.plan.catalogue.here import measure_cpu

    print_remark("measuring this machine's CPU")
    return dataclasses.replace(target, hardware=measure_cpu(target.num_devices))


def _terms(config: Config, wanted: Wanted) -> Terms:
    tokens, epochs, rows_per_epoch = wanted.tokens, wanted.epochs, wanted.rows_per_epoch
    terms = Terms(tokens, epochs, rows_per_epoch, wanted.usd_per_kwh, downtime=wanted.downtime)
    if tokens is not None or epochs is not None:
        # Raises here what a search would take for the reason that each of its layouts is refused.
        workload = describe_workload(config)
        with_length(config, workload, tokens=tokens, epochs=epochs, rows_per_epoch=rows_per_epoch)
    if wanted.checkpoint_minutes is not None:
        terms = dataclasses.replace(terms, checkpoint_interval_seconds=wanted.checkpoint_minutes * 60)
    if wanted.interruptions_per_day is not None:
        terms = dataclasses.replace(terms, interruptions_per_node_hour=wanted.interruptions_per_day / 24)
    return terms


def _compiled(estimate: Estimate, wanted: Wanted) -> Estimate:
    return estimate if wanted.analytic else with_compiler(estimate, print_remark)


def _search(config: Config, target: Target, wanted: Wanted, terms: Terms) -> Found:
    began = time.monotonic()
    parallel = config.parallel.model_copy(update={"auto": False})
    config = config.model_copy(update={"parallel": parallel})
    # A plan of `parallel: auto` shows the layout that a run would choose.
    vary = wanted.vary or (VARIED if wanted.search else VARIED_BY_AUTO)
    found = search(config, target, vary=vary, terms=terms)
    print_remark(f"tried {found.tried} layouts of {target.name} in {time.monotonic() - began:.1f} s")
    return found


def _best(found: Found, target: Target, wanted: Wanted, terms: Terms) -> tuple[list[Estimate], list[Estimate]]:
    """Compile the fastest layouts; the next one takes the place of one that does not fit by the compiler's figures.

    Returns:
        The plans to show, and those that the compiler found too large; where these are all, the smallest is shown too.
    """
    if not found.ranked:
        if not found.too_large:
            reason = found.refused[0].reason if found.refused else "there is none"
            raise ConfigError(f"no layout of {target.name} is possible: {reason}")
        return [analytic_plan(found.too_large[0].config, target, terms)], []
    best: list[Estimate] = []
    rejected: list[Estimate] = []
    for estimate in found.ranked[: 2 * wanted.top]:
        if len(best) == wanted.top:
            break
        compiled = _compiled(estimate, wanted)
        (rejected if compiled.fits is False else best).append(compiled)
    return best or [min(rejected, key=lambda one: one.peak_bytes)], rejected


def _largest_batch(estimate: Estimate, wanted: Wanted) -> dict[str, Any]:
    """The answer to `--largest-batch` for one target: rows, None where not even the least fits, and what said so."""

    def fits(config: Config) -> bool:
        tried = analyse(config, estimate.target)
        if not wanted.analytic:
            tried = with_compiler(tried, lambda line: print_remark(f"{line} with {tried.workload.rows} rows"))
        return tried.fits is not False

    rows = largest_batch(estimate.config, fits)
    compiled = not wanted.analytic and estimate.exact is not None
    return {"target": estimate.target.name, "rows": rows, "checked_by": "compiler" if compiled else "formulas"}


def _to_write(
    estimates: Sequence[Estimate], batches: Sequence[dict[str, Any]], terms: Terms, asked: Config
) -> Estimate | None:
    """The first plan that fits, with the largest batch that was found for it; None: none fits.

    Its steps, and the lengths of its schedule, follow anew from those of the config that was asked for.
    """
    for estimate, batch in zip(estimates, batches, strict=True) if batches else ():
        if batch["rows"] is not None:
            steps, schedule = asked.train.steps, asked.optimizer.schedule
            train = estimate.config.train.model_copy(update={"global_batch_size": batch["rows"], "steps": steps})
            optimizer = estimate.config.optimizer.model_copy(update={"schedule": schedule})
            update = {"train": train, "optimizer": optimizer}
            return analyse(estimate.config.model_copy(update=update), estimate.target, terms)
    return None if batches else next((one for one in estimates if one.fits is not False), None)


def _answer(
    estimates: Sequence[Estimate],
    found: Sequence[tuple[Target, Found]],
    rejected: Sequence[Estimate],
    batches: Sequence[dict[str, Any]],
    wanted: Wanted,
) -> None:
    if wanted.json:
        answer: dict[str, object] = {"plans": [as_json(one) for one in estimates]}
        if found:
            answer["searches"] = [
                {
                    "target": target.name,
                    "tried": one.tried,
                    "fit": len(one.ranked),
                    "too_large": len(one.too_large),
                    "refused": len(one.refused),
                    "reasons": why_not(one),
                    "ranking": [_ranked(each, one.vary) for each in one.ranked[:20]],
                }
                for target, one in found
            ]
        if batches:
            answer["largest_batch"] = batches
        print_json(answer)
        return
    for name in dict.fromkeys(one.target.name for one in estimates):
        best = next(one for one in estimates if one.target.name == name)
        print_text("\n".join([*answer_lines(best), ""]))
    for target, one in found:
        if one.ranked:
            order = "by memory, since no time is known"
            if one.ranked[0].time is not None:
                unit = one.ranked[0].workload.unit
                order = f"by {unit}/s, at equal {unit} of the run" if "batch" in one.vary else "by step time"
            print_text(f"{target.name}: {len(one.ranked)} of {one.tried} layouts fit; the first {order}:")
        else:
            print_text(f"{target.name}: none of {one.tried} layouts fits; the plan is of the one of the least memory")
        for place, each in enumerate(one.ranked[:10], 1):
            print_text(_ranked_line(place, each, one.vary))
        for line in why_not(one):
            print_text(f"  {line}")
        for each in rejected:
            if each.target == target:
                layout = describe_layout(each.config, one.vary)
                print_text(f"  too large by the compiler, {format_bytes(each.peak_bytes)}: {layout}")
        print_text("")
    print_text(table(estimates, full=wanted.full))
    for batch in batches:
        how = "by compiling" if batch["checked_by"] == "compiler" else "analytic"
        found_rows = f"the largest global batch that fits is {batch['rows']} rows"
        if batch["rows"] is None:
            found_rows = "not even the smallest batch fits"
        print_text(f"{batch['target']}: {found_rows} ({how})")


def _ranked(estimate: Estimate, vary: Sequence[str]) -> dict[str, object]:
    """A layout of a search in numbers, with units in their names; no time where none is known."""
    return {
        "layout": describe_layout(estimate.config, vary),
        "step_seconds": None if estimate.time is None else estimate.time.seconds,
        "rows_per_second": estimate.rows_per_second,
        "memory_bytes": estimate.memory.total_bytes,
    }


def _ranked_line(place: int, estimate: Estimate, vary: Sequence[str]) -> str:
    speed = "no time"
    if estimate.time is not None and "batch" in vary:
        rate = estimate.tokens_per_second or estimate.rows_per_second
        speed = f"{format_count(rate)} {estimate.workload.unit}/s"
    elif estimate.time is not None:
        milliseconds = estimate.time.seconds * 1e3
        speed = f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
    memory = format_bytes(estimate.memory.total_bytes)
    return f"  {place:>2}. {speed:>10}  {memory:>10}  {describe_layout(estimate.config, vary)}"


def _write_page(
    estimates: Sequence[Estimate], found: Sequence[tuple[Target, Found]], rejected: Sequence[Estimate], wanted: Wanted
) -> None:
    """Write the page of `--html`, where one is asked for."""
    if wanted.html is None:
        return
    from jaxtrain.plan.report.page import write_page

    try:
        write_page(estimates, Path(wanted.html), searches=found, rejected=rejected)
    except OSError as error:
        raise ConfigError(f"--html {wanted.html}: {error.strerror}; give a file in a folder that exists") from None
    print_remark(f"wrote {wanted.html}")


def _write_config(best: Estimate | None, path: Path, loaded: Loaded) -> None:
    """Write the config of a plan.

    Raises:
        ConfigError: there is none, or the file cannot be written.
    """
    if best is None:
        raise ConfigError(f"--config {path}: no plan fits, so there is no config to write")
    if best.config.optimizer.schedule != loaded.config.optimizer.schedule:
        steps = best.config.train.steps
        print_remark(f"train.steps={steps}: the lengths of optimizer.schedule are in proportion to it")
    header = f"# {loaded.name}, planned for {best.target.name}: {describe_layout(best.config)}\n"
    try:
        path.write_text(header + to_yaml(best.config.model_dump(mode="json")), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; give a file in a folder that exists") from None
    print_remark(f"wrote {path}: jaxtrain train {path}")
