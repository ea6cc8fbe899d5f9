"""What a plan says: its rows and lines in words, a table for the terminal, JSON for tools. No jax here."""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.model import CalledModel
from jaxtrain.config.optimizers import CalledOptimizer
from jaxtrain.metrics.format import format_bytes, format_clock, format_count, format_duration, format_gib
from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.state import finetuned
from jaxtrain.plan.step import microbatches_of
from jaxtrain.plan.time import Traffic
from jaxtrain.plan.workload import model_tensors
from jaxtrain.runtime.files import strict_json

UNKNOWN = "not known"
# What cannot run takes no time and costs nothing; `plan --json` has the figures that it would have with more memory.
_NONE = "none: it does not fit"
_WIDTH, _MOST_COLUMNS, _MOST_LABEL, _GAP = 120, 4, 30, "  "
# Of a single estimate: shares would otherwise stand far from what they are shares of.
_SINGLE_WIDTH = 64
# What a table has of these sections unless all of it is asked for.
_BRIEF = {
    "step, predicted": ("step time", "tokens/s", "examples/s", "MFU", "bound by"),
    "whole run": ("steps", "time to train", "unplanned downtime", "on demand", "spot", "cost"),
}


@dataclass(frozen=True)
class Fact:
    """A cell of one estimate, and its part of the whole where it is a part of one."""

    text: str
    share: float | None = None


@dataclass(frozen=True)
class Units:
    """Units that all estimates of a table share, so that a column compares with the next."""

    memory_name: str
    memory_bytes: int
    decimals: int

    def memory(self, count: float) -> str:
        """Bytes in GiB, or in MiB where all are small."""
        size = count / self.memory_bytes
        return f"< 0.01 {self.memory_name}" if 0 < size < 0.005 else f"{size:,.2f} {self.memory_name}"

    def milliseconds(self, seconds: float) -> str:
        """A time of a step in ms."""
        return f"{1e3 * seconds:,.{self.decimals}f} ms" if math.isfinite(seconds) else UNKNOWN


def units_of(estimates: Sequence[Estimate]) -> Units:
    """The units in which some estimates can be compared."""
    most = max(max(one.memory.total_bytes, one.peak_bytes) for one in estimates)
    name, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    longest = max((one.time.seconds for one in estimates if one.time and math.isfinite(one.time.seconds)), default=0.0)
    return Units(name, size, 0 if longest >= 10 else 1 if longest >= 0.1 else 3)


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


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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


def sections(estimates: Sequence[Estimate], units: Units) -> dict[str, dict[str, list[Fact]]]:
    """Title -> label -> a cell of each estimate, empty where it does not apply."""
    makers = {
        "setup": _setup,
        "memory of one device, at its peak": _memory,
        "step, predicted": lambda one, units: _time(one, units, alone=len(estimates) == 1),
        "whole run": _cost,
    }
    found = {}
    for title, maker in makers.items():
        facts = [maker(estimate, units) for estimate in estimates]
        found[title] = {label: [one.get(label, Fact("")) for one in facts] for label in merged(facts)}
    return found


def _setup(estimate: Estimate, units: Units) -> dict[str, Fact]:
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
        rows["network"] = f"{rate / 1e9:g} GB/s ({8 * rate / 1e9:g} Gbit/s) a device between {between} (--network)"
    if parallel.zero:
        rows["ZeRO"] = f"stage {parallel.zero}"
    if degrees["pipe"] > 1:
        chunks = f", {parallel.chunks or 2} chunks a stage" if parallel.schedule == "interleaved_1f1b" else ""
        rows["pipeline"] = f"{parallel.schedule}, {microbatches_of(config)} microbatches{chunks}"
    elif config.train.accumulation_steps > 1:
        rows["accumulation"] = f"{config.train.accumulation_steps} microbatches"
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
        doubled = "" if config.finetune.base != "nf4" or config.finetune.double_quantization else ", scales in float32"
        base = config.finetune.base or "float"
        rows["fine-tuning"] = f"LoRA rank {config.finetune.lora.rank} over {base} kernels{doubled}"
        if not isinstance(config.model, CalledModel):
            stored = finetuned(config, model_tensors(config.model, workload))
            trained = sum(math.prod(stored.tensors.params[path]) for path in stored.trained or ())
            share = 100 * trained / estimate.num_parameters
            rows["trained"] = f"{format_count(trained)} ({trained:,}), {share:.2g} % of the parameters"
    rows["parameters"] = f"{format_count(estimate.num_parameters)} ({estimate.num_parameters:,})"
    length = workload.sequence_length
    rows["batch"] = f"{workload.rows:,} " + (f"rows of {length:,} tokens" if length is not None else workload.unit)
    return {label: Fact(text) for label, text in rows.items()}


def _memory(estimate: Estimate, units: Units) -> dict[str, Fact]:
    memory, exact = estimate.memory, estimate.exact
    total, capacity = memory.total_bytes, memory.capacity_bytes
    counts = {**memory.parts, "total": total, "of it between steps": memory.state_bytes}
    rows = {name: Fact(f"{units.memory(n):>12}", n / total if total else None) for name, n in counts.items()}
    for name, count in memory.host_parts.items():
        rows[f"on the host: {name}"] = Fact(f"{units.memory(count):>12}")
    rows["of capacity"] = Fact(UNKNOWN if not capacity else f"{100 * total / capacity:.1f} % of {_capacity(capacity)}")
    if exact is not None:
        how = "compiled in" if exact.temporary_bytes is not None else "ran out of memory after"
        took = f"{how} {format_duration(exact.compile_seconds)}"
        peak = f"analytic {units.memory(total)}, compiler {units.memory(exact.peak_bytes)} ({took})"
    else:
        missing = f": {estimate.exact_missing}" if estimate.exact_missing else ""
        peak = f"{'at least ' if estimate.unknown else ''}{units.memory(total)}, analytic only{missing}"
    return {**rows, "peak": Fact(peak), "verdict": Fact(verdict(estimate, units))}


def _capacity(count: float) -> str:
    # Of a device and not of the model: in MiB where small models are, it would be a row of digits.
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else format_bytes(count)


def verdict(estimate: Estimate, units: Units | None = None) -> str:
    """Whether it fits, with what it takes and what there is."""
    needed, room = (units or units_of([estimate])).memory(estimate.peak_bytes), estimate.room_bytes
    if estimate.fits is None and estimate.unknown is not None and estimate.exact is None:
        return f"{UNKNOWN}: the parts above take {needed}; {estimate.unknown}"
    if estimate.fits is None or room is None:
        return f"takes {needed}; the capacity is {UNKNOWN}"
    amounts = f"fits: {needed} of {_capacity(room)}"
    if not estimate.fits:
        amounts = f"does not fit: {format_gib(estimate.peak_bytes)} of {format_gib(room)}"
    if estimate.exact is not None:
        return f"{amounts}, by the compiler"
    reserved = estimate.memory.reserved_bytes
    return f"{amounts} ({_capacity(reserved)} more is reserved)" if reserved else amounts


def _time(estimate: Estimate, units: Units, *, alone: bool = False) -> dict[str, Fact]:
    time = estimate.time
    if estimate.fits is False:
        return {"step time": Fact(_NONE)}
    if time is None:
        reason = estimate.unknown or f"no peak for {estimate.config.precision.policy} on this hardware"
        return {"step time": Fact(f"{UNKNOWN}: {reason}")}
    ms, whole = units.milliseconds, time.seconds if 0 < time.seconds < math.inf else None

    def part(seconds: float) -> float | None:
        return seconds / whole if whole else None

    span = f"{ms(time.low_seconds).removesuffix(' ms')} to {ms(time.high_seconds).removesuffix(' ms')}"
    rows = {"step time": Fact(f"{ms(time.seconds)} ({span})")}
    rate, devices = estimate.tokens_per_second or estimate.rows_per_second or 0.0, estimate.target.num_devices
    each = f" ({format_count(rate / devices)} per device)" if devices > 1 else ""
    rows[f"{estimate.workload.unit}/s"] = Fact(format_count(rate) + each)
    likely = time.model_flops_utilization
    rows["MFU"] = Fact(UNKNOWN)
    if likely is not None:
        ends = (100 * likely * time.seconds / seconds for seconds in (time.high_seconds, time.low_seconds) if seconds)
        span = [f"{end:.1f}" for end in ends if math.isfinite(end)]
        rows["MFU"] = Fact(f"{100 * likely:.1f} %" + (f" ({' to '.join(span)} %)" if len(span) == 2 else ""))
    rows["bound by"] = Fact(time.bound)
    # Side by side they would be as many rows again; the page has them as bars.
    for block in time.blocks if alone else ():
        work = f"{_three_digits(block.intensity)} FLOPs per byte" if block.flops else "only moves data"
        rows[block.name] = Fact(f"{ms(block.seconds):>12}, bound by {block.bound}, {work}", part(block.seconds))
    for traffic in time.traffic:
        label = f"traffic over {traffic.axis}"
        label = f"{label}: {traffic.kind}" if label in rows else label
        more = f"; {traffic.link} link: {traffic.kind}" if alone else ""
        rows[label] = Fact(_traffic(traffic, units) + more, part(traffic.exposed_seconds))
    if time.bubble_fraction:
        lost = f"{100 * time.bubble_fraction:.1f} % of the pipeline, {ms(time.bubble_seconds)}"
        rows["pipeline bubble"] = Fact(lost, part(time.bubble_seconds))
    return rows


def _traffic(traffic: Traffic, units: Units) -> str:
    sent, ms = traffic.bytes / 2**30, units.milliseconds
    size = f"{sent:,.2f} GiB" if sent >= 0.1 else f"{1024 * sent:,.2f} MiB"
    return f"{size}, {ms(traffic.seconds)}, {ms(traffic.exposed_seconds)} exposed"


def _cost(estimate: Estimate, units: Units) -> dict[str, Fact]:
    cost = estimate.cost
    if estimate.fits is False:
        return {"time to train": Fact(_NONE)}
    if cost is None:
        return {"cost": Fact(f"{UNKNOWN}" + ("" if estimate.time else " without a step time"))}
    rows = {
        "steps": f"{cost.steps:,}",
        "time to train": hours(cost.hours) + (f" ({format_clock(3600 * cost.hours)})" if cost.hours >= 1 else ""),
        "unplanned downtime": f"{_three_digits(100 * cost.downtime)} % of that (--downtime; Llama 3: 10 % on 16,384)",
        "device-hours": f"{cost.device_hours:,.1f}" if cost.device_hours >= 10 else f"{cost.device_hours:.3g}",
        "on demand": dollars(cost.on_demand_usd),
        "spot": UNKNOWN,
    }
    spot = cost.spot
    if spot is not None and not spot.is_sensible:
        rows["spot"] = "not sensible: interruptions and saves take nearly all of the time"
    elif spot is not None:
        recommended, asked = (
            hours(seconds / 3600) for seconds in (spot.recommended_interval_seconds, spot.checkpoint_interval_seconds)
        )
        count = f"{spot.interruptions:,.1f}" if spot.interruptions >= 1 else f"{spot.interruptions:.1g}"
        rows["spot"] = f"{dollars(spot.usd)} in {hours(spot.hours)}"
        rows["spot checkpoints"] = f"every {asked}" + ("" if asked == recommended else f" (best: {recommended})")
        rows["spot efficiency"] = f"{100 * spot.efficiency:.1f} %, {count} interruptions expected"
    energy = cost.energy_kwh
    rows["energy"] = UNKNOWN if energy is None else f"{_three_digits(energy)} kWh, {dollars(cost.energy_usd)}"
    rows["buying the devices"] = dollars(cost.purchase_usd)
    rows["break-even"] = UNKNOWN if None in (cost.purchase_usd, cost.on_demand_usd) else "never: rent is $0"
    if cost.break_even_hours is not None:
        rows["break-even"] = f"after {cost.break_even_hours:,.0f} hours of rent"
    return {label: Fact(text) for label, text in rows.items()}


def answer_lines(estimate: Estimate) -> list[str]:
    """Three lines: whether it fits and what to change, the time of the run, its cost; a fourth of the layout taken."""
    units, cost, workload = units_of([estimate]), estimate.cost, estimate.workload
    facts = {label: fact.text for label, fact in (_time(estimate, units) | _cost(estimate, units)).items()}
    how = "" if estimate.exact is not None else ", by formulas"
    change = f"; to change: {estimate.advice[0]}" if estimate.advice else ""
    time, money = facts["step time"], UNKNOWN if estimate.fits is not False else _NONE
    if cost is not None and estimate.fits is not False:
        total, unit = cost.steps * (workload.tokens or workload.rows), workload.unit
        time = f"{facts['time to train']} for {format_count(total)} {unit} in {cost.steps:,} steps"
        time += f", {facts[f'{unit}/s']} {unit}/s, MFU {facts['MFU']}"
        money = f"{facts['on demand']} on demand; spot {facts['spot']}"
    lines = [f"{estimate.target.name} {verdict(estimate, units)}{how}{change}", f"time: {time}", f"cost: {money}"]
    return lines if estimate.fitted is None else [*lines, estimate.fitted]


def remarks(estimates: Sequence[Estimate]) -> dict[str, list[str]]:
    """Advice, assumptions and notes as lines, each said once and with the targets that it is about, if not all."""
    kinds: dict[str, Callable[[Estimate], Iterable[str]]] = {
        "advice": lambda one: one.advice,
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


def table(estimates: Sequence[Estimate], *, full: bool = True) -> str:
    """Estimates side by side, for people: a column each, or one column with shares. Advice comes first.

    Args:
        estimates: one or more; more than four take several tables.
        full: whether all rows are shown, or those that most people ask for.

    Returns:
        Lines of at most 120 characters, without a line end after the last.
    """
    names, units, blocks = labels(estimates), units_of(estimates), []
    # Even tables: five estimates are better read as three and two than as four and one.
    num_tables = math.ceil(len(estimates) / _MOST_COLUMNS)
    ends = [math.ceil(len(estimates) * index / num_tables) for index in range(num_tables + 1)]
    for start, end in itertools.pairwise(ends):
        shown = sections(estimates[start:end], units)
        for title in () if full else _BRIEF:
            shown[title] = {label: facts for label, facts in shown[title].items() if label in _BRIEF[title]}
        blocks.append(_lay_out(names[start:end], shown))
    for title, lines in remarks(estimates).items():
        wrapped = (textwrap.fill(line, _WIDTH, initial_indent="- ", subsequent_indent="  ") for line in lines)
        blocks.insert(0 if title == "advice" else len(blocks), "\n".join([title, *wrapped]))
    return "\n\n".join(blocks)


def _lay_out(heads: Sequence[str], parts: dict[str, dict[str, list[Fact]]]) -> str:
    """Columns as wide as they must be, cells wrapped where all of them would be too wide together."""
    rows: dict[str, list[tuple[str, list[str]]]] = {"": [("", list(heads))]}
    for title, facts in parts.items():
        rows[title] = [("  " + label, [fact.text for fact in some]) for label, some in facts.items()]
    every = [row for some in rows.values() for row in some]
    most_label = min(_MOST_LABEL, max(len(label) for label, _ in every))
    wanted = [max(map(len, column)) for column in zip(*(cells for _, cells in every), strict=True)]
    if len(heads) == 1:
        wanted[0] = min(wanted[0], _SINGLE_WIDTH)
    left, widths = _WIDTH - most_label - len(heads) * len(_GAP), list(wanted)
    # The narrowest first: what they do not need goes to the others.
    for place, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        widths[index] = min(wanted[index], left // (len(wanted) - place))
        left -= widths[index]
    lines = []
    for title, some in rows.items():
        lines += ["", title] if title else []
        for label, cells in some:
            columns = [textwrap.wrap(label, most_label, initial_indent="", subsequent_indent="    ")]
            for cell, width in zip(cells, widths, strict=True):
                columns.append([cell] if len(cell) <= width else textwrap.wrap(cell.strip(), width))
            share = parts[title][label[2:]][0].share if title and len(heads) == 1 else None
            for height in range(max(map(len, columns))):
                shown = [column[height] if height < len(column) else "" for column in columns]
                line = _GAP.join(map(str.ljust, shown, (most_label, *widths)))
                line += f"  {100 * share:5.1f} %" if share is not None and height == 0 else ""
                lines.append(line.rstrip())
    return "\n".join(lines)


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Everything an estimate says, with what follows from it, in types of strict JSON.

    Returns:
        Nested objects; units are in the keys, and infinities are null.
    """
    target, workload, memory, time = estimate.target, estimate.workload, estimate.memory, estimate.time
    answer: dict[str, Any] = {field.name: getattr(estimate, field.name) for field in dataclasses.fields(estimate)}
    for name in ("workload", "memory", "time", "cost", "exact"):
        answer[name] = None if answer[name] is None else dataclasses.asdict(answer[name])
    answer["config"] = estimate.config.model_dump(mode="json")
    answer["target"] = {"name": target.name, **dataclasses.asdict(target)}
    answer["fits"] = estimate.fits
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
