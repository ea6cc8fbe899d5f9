"""What a plan says: the answer in lines, its rows in words, a table for the terminal, JSON for tools. No jax here."""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxtrain.config.model import CalledModel
from jaxtrain.config.optimizers import CalledOptimizer
from jaxtrain.metrics.format import format_bytes, format_clock, format_count, format_duration
from jaxtrain.parallel.division import microbatches_of
from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.search import Found, describe_layout, why_not
from jaxtrain.plan.state import finetuned
from jaxtrain.plan.targets import Target
from jaxtrain.plan.time import StepTime, Traffic
from jaxtrain.plan.workload import model_tensors
from jaxtrain.runtime.files import strict_json

UNKNOWN = "not known"
_WIDTH, _MOST_COLUMNS, _MOST_LABEL, _GAP = 120, 4, 30, "  "
# What stands in the answer above a table of one plan, and is compared in a table of several.
_ANSWERED = (
    "step time",
    "tokens/s",
    "examples/s",
    "MFU",
    "bound by",
    "steps",
    "time to train",
    "on demand",
    "spot",
    "cost",
)


def hours(count: float) -> str:
    """A time with its unit: hours, or minutes or seconds where it is less than one of the larger."""
    if count < 1 / 60:
        return format_duration(3600 * count)
    if count < 1:
        return f"{60 * count:.3g} minutes"
    return f"{count:,.1f} hours" if count >= 10 else f"{count:.3g} hours"


def dollars(usd: float | None) -> str:
    """An amount of US dollars, with cents where they count."""
    if usd is None:
        return UNKNOWN
    return "under $0.01" if 0 < usd < 0.005 else f"${usd:,.0f}" if usd >= 100 else f"${usd:.2f}"


def seconds_text(seconds: float) -> str:
    """A time of one step with its unit: `37.5 ms`, `2.31 s`."""
    if not math.isfinite(seconds):
        return UNKNOWN
    scaled, unit = (1e6 * seconds, "µs") if 0 < seconds < 1e-3 else (1e3 * seconds, "ms")
    scaled, unit = (seconds, "s") if seconds >= 1 else (scaled, unit)
    return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"


def step_text(time: StepTime) -> str:
    """A step's time with its range: `147 ms (118 ms to 200 ms)`."""
    return f"{seconds_text(time.seconds)} ({seconds_text(time.low_seconds)} to {seconds_text(time.high_seconds)})"


def size_text(count: float) -> str:
    """Bytes of a device: `72.78 GiB`, and in smaller units where there is less than a tenth of one."""
    return f"{count / 2**30:,.2f} GiB" if count >= 0.1 * 2**30 else format_bytes(count)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:7.1f} %" if 0 < whole < math.inf else ""


def labels(estimates: Sequence[Estimate]) -> list[str]:
    """A name for each estimate: its target, with a number where several are for that."""
    names = [one.target.name for one in estimates]
    numbered = [f"{name} #{names[: index + 1].count(name)}" for index, name in enumerate(names)]
    return [name if names.count(name) == 1 else other for name, other in zip(names, numbered, strict=True)]


def merged(lists: Iterable[Iterable[str]]) -> list[str]:
    """All names once; one that only some lists have comes after what is before it there."""
    names: list[str] = []
    for some in lists:
        place = 0
        for name in some:
            if name in names:
                place = names.index(name) + 1
            else:
                names.insert(place, name)
                place += 1
    return names


def answer_lines(estimate: Estimate) -> list[str]:
    """The answer: whether it fits; step, time and cost of the run, or what makes it fit; a layout that was chosen."""
    cost, workload = estimate.cost, estimate.workload
    facts = _time(estimate, alone=False) | _cost(estimate)
    lines = [f"{estimate.target.name} {verdict(estimate)}"]
    if estimate.fits is False:
        lines += [f"to change: {line}" for line in estimate.advice]
    elif cost is None:
        lines += [f"step: {facts['step time']}"]
    else:
        total, unit = cost.steps * (workload.tokens or workload.rows), workload.unit
        lines += [
            f"step: {facts['step time']}, bound by {facts['bound by']}",
            f"speed: {facts[f'{unit}/s']}, MFU {facts['MFU']}",
            f"time: {facts['time to train']} for {format_count(total)} {unit} in {cost.steps:,} steps",
            f"cost: {facts['on demand']} on demand; {facts['spot']} at the spot price, if nothing is interrupted",
        ]
    return lines if estimate.fitted is None else [*lines, f"layout: {estimate.fitted}"]


def search_lines(target: Target, found: Found, plans: Sequence[Estimate]) -> list[str]:
    """What a search found: the first ten layouts that fit, of which `plans` may be compiled, and why others do not."""
    first, lines = found.ranked[:10], []
    if not first:
        lines.append(f"{target.name}: none of {found.tried} layouts fits; the plan shows the one of the least memory")
    else:
        order = "by memory, since no time is known" if first[0].time is None else "by step time"
        lines.append(f"{target.name}: {len(found.ranked)} of {found.tried} layouts fit; the first {order}:")
    for place, one in enumerate(first, 1):
        speed = "no time" if one.time is None else seconds_text(one.time.seconds)
        layout = describe_layout(one.config)
        compiled = next((each for each in plans if each.exact is not None and each.config == one.config), None)
        layout += "; too large according to the compiler" if compiled is not None and compiled.fits is False else ""
        lines.append(f"  {place:>2}. {speed:>10}  {size_text((compiled or one).peak_bytes):>10}  {layout}")
    return [*lines, *(f"  {line}" for line in why_not(found))]


def search_json(target: Target, found: Found) -> dict[str, Any]:
    """Return a search in types of strict JSON, with units in the names; no time if none is known."""
    ranking = []
    for layout in found.ranked[:20]:
        ranking.append(
            {
                "layout": describe_layout(layout.config),
                "step_seconds": None if layout.time is None else layout.time.seconds,
                "rows_per_second": layout.rows_per_second,
                "memory_bytes": layout.memory.total_bytes,
            }
        )
    return {
        "target": target.name,
        "tried": found.tried,
        "fit": len(found.ranked),
        "reasons": why_not(found),
        "ranking": ranking,
    }


def verdict(estimate: Estimate) -> str:
    """Whether it fits, with what it takes, what there is, and who says so."""
    needed, room, exact = estimate.peak_bytes, estimate.room_bytes, estimate.exact
    if estimate.fits is None and estimate.unknown is not None and exact is None:
        return f"{UNKNOWN}: the parts below take {size_text(needed)}; {estimate.unknown}"
    says = "by formulas"
    if exact is not None:
        says = f"by its compiler (by formulas {size_text(estimate.memory.total_bytes)})"
    if estimate.fits is None or room is None:
        return f"takes {size_text(needed)}, {says}; the capacity is {UNKNOWN}"
    if estimate.fits:
        return f"fits: {size_text(needed)} of {size_text(room)}, {says}"
    return f"does not fit: {size_text(needed)} of {size_text(room)}, {says}"


def sections(estimates: Sequence[Estimate]) -> dict[str, dict[str, list[str]]]:
    """Title -> label -> a cell of each estimate, empty where it does not apply."""
    alone = len(estimates) == 1
    makers: dict[str, Callable[[Estimate], dict[str, str]]] = {
        "setup": _setup,
        "memory of one device, at its peak": lambda one: _memory(one, alone=alone),
        "step, predicted": lambda one: _time(one, alone=alone),
        "whole run": _cost,
    }
    found = {}
    for title, maker in makers.items():
        cells = [maker(estimate) for estimate in estimates]
        found[title] = {label: [one.get(label, "") for one in cells] for label in merged(cells)}
    return found


def _setup(estimate: Estimate) -> dict[str, str]:
    config, target, degrees, workload = estimate.config, estimate.target, estimate.degrees, estimate.workload
    parallel, remat, hardware = config.parallel, config.remat, target.hardware
    place = "slice" if hardware.kind == "tpu" else "host"
    sharded = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    rows = {
        "hardware": hardware.title,
        "devices": f"{target.num_devices:,} on {target.num_hosts} {place}{'s' if target.num_hosts > 1 else ''}",
        "layout": ", ".join(sharded) or ("not split" if target.num_devices > 1 else "one device"),
    }
    if target.num_hosts > 1:
        rate, between = hardware.network_bandwidth, "slices" if hardware.kind == "tpu" else "nodes"
        rows["network"] = f"{rate / 1e9:g} GB/s ({8 * rate / 1e9:g} Gbit/s) per device between {between}"
    if parallel.zero:
        rows["ZeRO"] = f"stage {parallel.zero}"
    if degrees["pipe"] > 1:
        chunks = f", {parallel.chunks or 2} chunks a stage" if parallel.schedule == "interleaved_1f1b" else ""
        rows["pipeline"] = f"{parallel.schedule}, {microbatches_of(config)} microbatches{chunks}"
    elif microbatches_of(config) > 1:
        rows["accumulation"] = f"{microbatches_of(config)} microbatches"
    named = f": {', '.join(remat.names)}" if remat.policy == "names" else ""
    offloaded = [*remat.offload, *(["optimizer state"] if config.optimizer.offload else [])]
    rows["remat"] = f"{remat.policy}{named}" + (f"; on the host: {', '.join(offloaded)}" if offloaded else "")
    rows["precision"] = config.precision.policy
    if isinstance(config.optimizer, CalledOptimizer):
        rows["optimizer"] = config.optimizer.call
    else:
        count = len(config.optimizer.groups)
        rows["optimizer"] = config.optimizer.kind + (f" and {count} groups of parameters" if count else "")
    if config.finetune.lora is not None:
        rows["fine-tuning"] = f"LoRA rank {config.finetune.lora.rank} over {config.finetune.base or 'float'} kernels"
        if not isinstance(config.model, CalledModel):
            stored = finetuned(config, model_tensors(config.model, workload))
            trained = sum(math.prod(stored.tensors.params[path]) for path in stored.trained or ())
            share = 100 * trained / estimate.num_parameters
            rows["trained"] = f"{format_count(trained)} ({trained:,}), {share:.2g} % of the parameters"
    rows["parameters"] = f"{format_count(estimate.num_parameters)} ({estimate.num_parameters:,})"
    length = workload.sequence_length
    rows["batch"] = f"{workload.rows:,} " + (f"rows of {length:,} tokens" if length is not None else workload.unit)
    return rows


def _memory(estimate: Estimate, *, alone: bool) -> dict[str, str]:
    memory = estimate.memory
    total, capacity = memory.total_bytes, memory.capacity_bytes
    counts = {**memory.parts, "total": total, "between steps": memory.state_bytes}
    rows = {name: f"{size_text(n):>12}" + (_share(n, total) if alone else "") for name, n in counts.items()}
    if estimate.exact is not None:
        rows["by the compiler"] = f"{size_text(estimate.exact.peak_bytes):>12}"
    rows |= {f"on the host: {name}": f"{size_text(count):>12}" for name, count in memory.host_parts.items()}
    reserved = f", {size_text(memory.reserved_bytes)} of it reserved" if memory.reserved_bytes else ""
    return rows | {"capacity": f"{size_text(capacity):>12}{reserved}" if capacity else UNKNOWN}


def _time(estimate: Estimate, *, alone: bool) -> dict[str, str]:
    """What a step takes; side by side its blocks would be as many rows again."""
    time = estimate.time
    if estimate.fits is False:
        return {}
    if time is None:
        reason = estimate.unknown or f"no peak for {estimate.config.precision.policy} on this hardware"
        return {"step time": f"{UNKNOWN}: {reason}"}
    whole = time.seconds
    rate, devices = estimate.tokens_per_second or estimate.rows_per_second or 0.0, estimate.target.num_devices
    each = f" ({format_count(rate / devices)} per device)" if devices > 1 else ""
    likely = time.model_flops_utilization
    ends = [f"{100 * likely * whole / end:.1f}" for end in (time.high_seconds, time.low_seconds) if whole < math.inf]
    rows = {
        "step time": step_text(time),
        f"{estimate.workload.unit}/s": f"{format_count(rate)} {estimate.workload.unit}/s{each}",
        "MFU": f"{100 * likely:.1f} %" + (f" ({' to '.join(ends)} %)" if len(ends) == 2 else ""),
        "bound by": time.bound,
    }
    for block in time.blocks if alone else ():
        work = f"{_three_digits(block.intensity)} FLOPs per byte" if block.flops else "only moves data"
        rows[block.name] = (
            f"{seconds_text(block.seconds):>12}{_share(block.seconds, whole)}  bound by {block.bound}, {work}"
        )
    for traffic in time.traffic:
        label = f"traffic over {traffic.axis}"
        label = f"{label}: {traffic.kind}" if label in rows else label
        rows[label] = _traffic(traffic, whole if alone else None)
    if time.bubble_fraction:
        share = _share(time.bubble_seconds, whole) if alone else ""
        rows["pipeline bubble"] = (
            f"{seconds_text(time.bubble_seconds):>12}{share}  {100 * time.bubble_fraction:.1f} % of a stage"
        )
    return rows


def _traffic(traffic: Traffic, whole: float | None) -> str:
    if whole is None:
        return f"{seconds_text(traffic.exposed_seconds)} exposed of {seconds_text(traffic.seconds)}"
    exposed = f"{seconds_text(traffic.exposed_seconds):>12}{_share(traffic.exposed_seconds, whole)}"
    sent = f"{size_text(traffic.bytes)} over the {traffic.link} link"
    return f"{exposed}  exposed of {seconds_text(traffic.seconds)}: {sent}"


def _cost(estimate: Estimate) -> dict[str, str]:
    cost = estimate.cost
    if estimate.fits is False:
        return {}
    if cost is None:
        return {"cost": UNKNOWN}
    return {
        "steps": f"{cost.steps:,}",
        "time to train": hours(cost.hours) + (f" ({format_clock(3600 * cost.hours)})" if cost.hours >= 1 else ""),
        "on demand": dollars(cost.on_demand_usd),
        "spot": dollars(cost.spot_usd),
    }


def remarks(estimates: Sequence[Estimate]) -> dict[str, list[str]]:
    """Assumptions and notes as lines, each said once and with the targets that it is about, if not all."""
    kinds: dict[str, Callable[[Estimate], Iterable[str]]] = {
        "assumptions": lambda one: one.time.assumptions if one.time else (),
        "notes": lambda one: (*one.notes, *one.workload.notes),
    }
    found = {}
    for title, lines_of in kinds.items():
        about: dict[str, list[str]] = {}
        for name, estimate in zip(labels(estimates), estimates, strict=True):
            for line in dict.fromkeys(lines_of(estimate)):
                about.setdefault(line, []).append(name)
        all_of = len(estimates)
        found[title] = [line if len(some) == all_of else f"{', '.join(some)}: {line}" for line, some in about.items()]
    return {title: lines for title, lines in found.items() if lines}


def table(estimates: Sequence[Estimate]) -> str:
    """Estimates side by side, for people: a column each, or one column with shares.

    Args:
        estimates: one or more; more than four take several tables.

    Returns:
        Lines of at most 120 characters, without a line end after the last.
    """
    left_out = _ANSWERED if len(estimates) == 1 else ()
    names, blocks = labels(estimates), []
    # Even tables: five estimates are better read as three and two than as four and one.
    num_tables = math.ceil(len(estimates) / _MOST_COLUMNS)
    ends = [math.ceil(len(estimates) * index / num_tables) for index in range(num_tables + 1)]
    parts = sections(estimates)
    for start, end in itertools.pairwise(ends):
        lines = [("", names[start:end])] if len(estimates) > 1 else []
        for title, rows in parts.items():
            shown = {label: cells[start:end] for label, cells in rows.items() if label not in left_out}
            rows = [("  " + label, cells) for label, cells in shown.items() if any(cells)]
            lines += [("", []), (title, []), *rows] if rows else []
        blocks.append(_lay_out(lines, end - start).strip("\n"))
    for title, lines in remarks(estimates).items():
        wrapped = (textwrap.fill(line, _WIDTH, initial_indent="- ", subsequent_indent="  ") for line in lines)
        blocks.append("\n".join([title, *wrapped]))
    return "\n\n".join(blocks)


def _lay_out(rows: Sequence[tuple[str, Sequence[str]]], num_columns: int) -> str:
    """Rows of a label and its cells; columns of one width, cells wrapped where they are longer."""
    most_label = min(_MOST_LABEL, max(len(label) for label, cells in rows if cells))
    width = (_WIDTH - most_label) // num_columns - len(_GAP)
    lines = []
    for label, cells in rows:
        if not cells:
            lines.append(label)
            continue
        columns = [textwrap.wrap(label, most_label, subsequent_indent="    ")]
        columns += [[cell] if len(cell) <= width else textwrap.wrap(cell.strip(), width) for cell in cells]
        for line in itertools.zip_longest(*columns, fillvalue=""):
            first, *rest = line
            lines.append(_GAP.join([first.ljust(most_label), *(one.ljust(width) for one in rest)]).rstrip())
    return "\n".join(lines)


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Everything an estimate says, with what follows from it, in types of strict JSON.

    Returns:
        Nested objects; units are in the keys, and infinities are null.
    """
    target, workload, memory, time = estimate.target, estimate.workload, estimate.memory, estimate.time
    answer: dict[str, Any] = dataclasses.asdict(estimate)
    answer |= {"config": estimate.config.model_dump(mode="json"), "fits": estimate.fits}
    answer["target"]["name"] = target.name
    answer["workload"] |= {name: getattr(workload, name) for name in ("sequence_length", "tokens", "row_bytes")}
    answer["memory"] |= {name: getattr(memory, name) for name in ("total_bytes", "usable_bytes", "fits")}
    answer["memory"]["parts_bytes"] = answer["memory"].pop("parts")
    answer["memory"]["host_parts_bytes"] = answer["memory"].pop("host_parts")
    capacity = memory.capacity_bytes
    answer["memory"]["capacity_fraction"] = memory.total_bytes / capacity if capacity else None
    if time is not None:
        blocks = [{**dataclasses.asdict(one), "intensity_flops_per_byte": one.intensity} for one in time.blocks]
        answer["time"] |= {
            "blocks": blocks,
            "bubble_seconds": time.bubble_seconds,
            "exposed_traffic_seconds": sum(one.exposed_seconds for one in time.traffic),
            "tokens_per_second": estimate.tokens_per_second,
            "rows_per_second": estimate.rows_per_second,
        }
    return strict_json(answer)
