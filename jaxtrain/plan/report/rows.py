"""What a plan says in words: rows of labels and cells, for the table of a terminal and of a page alike. No jax here."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxtrain.config.model import CalledModel
from jaxtrain.config.optimizers import CalledOptimizer
from jaxtrain.metrics.format import format_bytes, format_clock, format_count, format_duration, format_gib
from jaxtrain.plan.cost.training import Cost
from jaxtrain.plan.report.amounts import UNKNOWN, dollars, hours
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.search.layouts import describe_layout
from jaxtrain.plan.time.record import StepTime, Traffic
from jaxtrain.plan.workload.finetuned import finetuned
from jaxtrain.plan.workload.parameters import model_tensors

# What cannot run takes no time and costs nothing; `plan --json` has the figures that it would have with more memory.
_NONE = "none: it does not fit"


@dataclass(frozen=True)
class Row:
    """One line of a table: a label and a cell for each column, empty where it does not apply."""

    label: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Rows that belong together, under a title."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class _Fact:
    """A row of one estimate: its cell, and its part of the whole where it is a part of one."""

    text: str
    share: float | None = None


@dataclass(frozen=True)
class _Units:
    """Units that all estimates of a table share, so that a column compares with the next."""

    memory_name: str
    memory_bytes: int
    milliseconds_decimals: int
    is_single: bool

    def memory(self, count: float) -> str:
        size = count / self.memory_bytes
        return f"< 0.01 {self.memory_name}" if 0 < size < 0.005 else f"{size:,.2f} {self.memory_name}"

    def milliseconds(self, seconds: float) -> str:
        return f"{1e3 * seconds:,.{self.milliseconds_decimals}f} ms" if math.isfinite(seconds) else UNKNOWN


def labels(estimates: Sequence[Estimate]) -> list[str]:
    """A name for each estimate: its target; where that is not unique, the layout and what differs too, or a number."""
    differs = {
        "precision": lambda one: one.precision.policy,
        "optimizer": lambda one: one.optimizer.kind,
        "base": lambda one: one.finetune.base,
        "rank": lambda one: one.finetune.lora,
        "batch": lambda one: one.train.global_batch_size,
    }
    vary = [name for name, of in differs.items() if len({of(estimate.config) for estimate in estimates}) > 1]
    counts, names = Counter(estimate.target.name for estimate in estimates), []
    for estimate in estimates:
        name = estimate.target.name
        names.append(f"{name} {describe_layout(estimate.config, vary)}" if counts[name] > 1 else name)
    counts, seen = Counter(names), Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        names[index] = f"{name} #{seen[name]}" if counts[name] > 1 else name
    return names


def headings(estimates: Sequence[Estimate], names: Sequence[str]) -> tuple[str, ...]:
    """What stands over the columns that `sections` gives."""
    return (*names, "share") if len(estimates) == 1 else tuple(names)


def layout(estimate: Estimate) -> str:
    """Mesh axes with their degrees, without those of 1."""
    split = [f"{axis} {degree}" for axis, degree in estimate.degrees.items() if degree > 1]
    return ", ".join(split) if split else "not split" if estimate.target.num_devices > 1 else "one device"


def sections(estimates: Sequence[Estimate], *, like: Sequence[Estimate] = ()) -> list[Section]:
    """The rows of a table.

    Args:
        estimates: a column each; a single one has a second column of shares.
        like: estimates whose units to use, when these are some of them.
    """
    units = _units(like or estimates)
    makers = {
        "setup": _run_facts,
        "memory of one device, at its peak": _memory_facts,
        "step, predicted": _time_facts,
        "whole run": _cost_facts,
    }
    found = []
    for title, maker in makers.items():
        facts = [maker(estimate, units) for estimate in estimates]
        rows = []
        for label in merged(facts):
            cells = [one[label].text if label in one else "" for one in facts]
            if len(estimates) == 1:
                share = facts[0][label].share
                cells.append("" if share is None else f"{100 * share:.1f} %")
            rows.append(Row(label, tuple(cells)))
        found.append(Section(title, tuple(rows)))
    return found


def brief(parts: Sequence[Section]) -> list[Section]:
    """The sections without the times of blocks and links, and without what buying and energy cost."""
    wanted = {
        "step, predicted": ("step time", "tokens/s", "examples/s", "MFU", "bound by"),
        "whole run": ("steps", "time to train", "unplanned downtime", "on demand", "spot", "cost"),
    }
    every = {part.title: [row.label for row in part.rows] for part in parts} | wanted
    return [Section(one.title, tuple(row for row in one.rows if row.label in every[one.title])) for one in parts]


def answer_lines(estimate: Estimate) -> list[str]:
    """Three lines: whether it fits and what to change, the time of the run, its cost; a fourth of the layout taken."""
    units, cost, workload = _units([estimate]), estimate.cost, estimate.workload
    facts = _time_facts(estimate, units) | _cost_facts(estimate, units)
    how = "" if estimate.exact is not None else ", by formulas"
    change = f"; to change: {estimate.advice[0]}" if estimate.advice else ""
    time = facts["step time"].text
    money = UNKNOWN if estimate.fits is not False else _NONE
    if cost is not None and estimate.fits is not False:
        total = cost.steps * (workload.tokens or workload.rows)
        time = f"{facts['time to train'].text} for {format_count(total)} {workload.unit} in {cost.steps:,} steps"
        time += f", {facts[f'{workload.unit}/s'].text} {workload.unit}/s, MFU {facts['MFU'].text}"
        money = f"{facts['on demand'].text} on demand; spot {facts['spot'].text}"
    lines = [f"{estimate.target.name} {_verdict(estimate, units)}{how}{change}", f"time: {time}", f"cost: {money}"]
    return lines if estimate.fitted is None else [*lines, estimate.fitted]


def remarks(estimates: Sequence[Estimate]) -> list[tuple[str, list[str]]]:
    """Advice, assumptions and notes as lines, each said once and with the targets that it is about, if not all."""
    kinds = {
        "advice": lambda one: one.advice,
        "assumptions": lambda one: one.time.assumptions if one.time else (),
        "notes": lambda one: (*one.notes, *one.workload.notes),
    }
    found = []
    for title, lines_of in kinds.items():
        about: dict[str, list[str]] = {}
        for name, estimate in zip(labels(estimates), estimates, strict=True):
            for line in dict.fromkeys(lines_of(estimate)):
                about.setdefault(line, []).append(name)
        lines = [
            line if len(names) == len(estimates) else f"{', '.join(names)}: {line}" for line, names in about.items()
        ]
        if lines:
            found.append((title, lines))
    return found


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


def verdict(estimate: Estimate) -> str:
    """Whether it fits, with what it takes and what there is."""
    return _verdict(estimate, _units([estimate]))


def bubble_seconds(time: StepTime) -> float:
    """What a step idles in its pipeline: what neither the blocks nor exposed traffic takes."""
    rest = time.seconds - time.compute_seconds - sum(one.exposed_seconds for one in time.traffic)
    return max(rest, 0.0) if time.bubble_fraction and math.isfinite(rest) else 0.0


def _units(estimates: Sequence[Estimate]) -> _Units:
    most = max(max(one.memory.total_bytes, one.peak_bytes) for one in estimates)
    name, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    steps = [one.time.seconds for one in estimates if one.time and math.isfinite(one.time.seconds)]
    longest = max(steps, default=0.0)
    return _Units(name, size, 0 if longest >= 10 else 1 if longest >= 0.1 else 3, len(estimates) == 1)


def _run_facts(estimate: Estimate, units: _Units) -> dict[str, _Fact]:
    config, target, degrees = estimate.config, estimate.target, estimate.degrees
    parallel, train, workload = config.parallel, config.train, estimate.workload
    hosts = f"{target.num_hosts} host{'s' if target.num_hosts > 1 else ''}"
    if target.hardware.kind == "tpu" and target.num_hosts > 1:
        hosts = f"{target.num_hosts} slices"
    elif target.hardware.kind == "tpu":
        hosts = "1 slice"
    rows = {
        "hardware": target.hardware.title,
        "devices": f"{target.num_devices:,} on {hosts}",
        "layout": layout(estimate),
    }
    if target.num_hosts > 1:
        rate = target.hardware.network_bandwidth
        between = "slices" if target.hardware.kind == "tpu" else "nodes"
        rows["network"] = f"{rate / 1e9:g} GB/s ({8 * rate / 1e9:g} Gbit/s) a device between {between} (--network)"
    if parallel.zero:
        rows["ZeRO"] = f"stage {parallel.zero}"
    if degrees.get("pipe", 1) > 1:
        accumulation = train.accumulation_steps
        microbatches = parallel.microbatches or (accumulation if accumulation > 1 else 2 * degrees["pipe"])
        chunks = f", {parallel.chunks or 2} chunks a stage" if parallel.schedule == "interleaved_1f1b" else ""
        rows["pipeline"] = f"{parallel.schedule}, {microbatches} microbatches{chunks}"
    elif train.accumulation_steps > 1:
        rows["accumulation"] = f"{train.accumulation_steps} microbatches"
    named = f": {', '.join(config.remat.names)}" if config.remat.policy == "names" else ""
    offloaded = [*config.remat.offload, *(["optimizer state"] if config.optimizer.offload else [])]
    moved = f"; on the host: {', '.join(offloaded)}" if offloaded else ""
    rows["remat"] = f"{config.remat.policy}{named}{moved}"
    rows["precision"] = config.precision.policy
    rows |= _trained_rows(estimate)
    rows["parameters"] = f"{format_count(estimate.num_parameters)} ({estimate.num_parameters:,})"
    if workload.tokens is not None:
        rows["batch"] = f"{workload.rows:,} rows of {workload.sequence_length:,} tokens"
    else:
        rows["batch"] = f"{workload.rows:,} {workload.unit}"
    return {label: _Fact(text) for label, text in rows.items()}


def _trained_rows(estimate: Estimate) -> dict[str, str]:
    """What updates the parameters, and of a fine-tuning which of them are trained."""
    config, optimizer = estimate.config, estimate.config.optimizer
    if isinstance(optimizer, CalledOptimizer):
        rows = {"optimizer": optimizer.call}
    else:
        count = len(optimizer.groups)
        groups = f" and {count} group{'s' if count > 1 else ''} of parameters" if count else ""
        rows = {"optimizer": f"{optimizer.kind}{groups}"}
    if config.finetune.lora is None:
        return rows
    lora, base = config.finetune.lora, config.finetune.base
    doubled = "" if base != "nf4" or config.finetune.double_quantization else " without double quantization"
    rows["fine-tuning"] = f"LoRA rank {lora.rank} over {base or 'float'} kernels{doubled}"
    if not isinstance(config.model, CalledModel):
        stored = finetuned(config, model_tensors(config.model, estimate.workload))
        trained = sum(math.prod(shape) for path, shape in stored.tensors.params.items() if path not in stored.frozen)
        share = 100 * trained / estimate.num_parameters
        rows["trained"] = f"{format_count(trained)} ({trained:,}), {share:.2g} % of the parameters"
    return rows


def _memory_facts(estimate: Estimate, units: _Units) -> dict[str, _Fact]:
    memory, exact = estimate.memory, estimate.exact
    total, capacity = memory.total_bytes, memory.capacity_bytes

    def part(count: int) -> _Fact:
        return _Fact(f"{units.memory(count):>12}", count / total if total else None)

    rows = {name: part(count) for name, count in memory.parts.items()}
    rows["total"] = part(total)
    rows["of it between steps"] = part(memory.state_bytes)
    for name, count in memory.host_parts.items():
        rows[f"on the host: {name}"] = _Fact(f"{units.memory(count):>12}")
    rows["of capacity"] = _Fact(UNKNOWN if not capacity else f"{100 * total / capacity:.1f} % of {_capacity(capacity)}")
    if exact is not None:
        how = "compiled in" if exact.temporary_bytes is not None else "ran out of memory after"
        took = f"{how} {format_duration(exact.compile_seconds)}"
        peak = f"analytic {units.memory(total)}, compiler {units.memory(exact.peak_bytes)} ({took})"
    else:
        missing = f": {estimate.exact_missing}" if estimate.exact_missing else ""
        least = "at least " if estimate.unknown else ""
        peak = f"{least}{units.memory(total)}, analytic only{missing}"
    rows["peak"] = _Fact(peak)
    rows["verdict"] = _Fact(_verdict(estimate, units))
    return rows


def _capacity(count: float) -> str:
    # Of a device and not of the model: in MiB where small models are, it would be a row of digits.
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else format_bytes(count)


def _verdict(estimate: Estimate, units: _Units) -> str:
    memory, needed, room = estimate.memory, units.memory(estimate.peak_bytes), estimate.room_bytes
    if estimate.fits is None and estimate.unknown is not None and estimate.exact is None:
        return f"not known: the parts above take {needed}; {estimate.unknown}"
    if estimate.fits is None or room is None:
        return f"takes {needed}; the capacity is {UNKNOWN}"
    amounts = f"{needed} of {_capacity(room)}"
    if not estimate.fits:
        amounts = f"{format_gib(estimate.peak_bytes)} of {format_gib(room)}"
    text = f"{'fits' if estimate.fits else 'does not fit'}: {amounts}"
    if estimate.exact is not None:
        return f"{text}, by the compiler"
    return f"{text} ({_capacity(memory.reserved_bytes)} more is reserved)" if memory.reserved_bytes else text


def _time_facts(estimate: Estimate, units: _Units) -> dict[str, _Fact]:
    time = estimate.time
    if estimate.fits is False:
        return {"step time": _Fact(_NONE)}
    if time is None:
        if estimate.unknown is not None:
            return {"step time": _Fact(f"{UNKNOWN}: {estimate.unknown}")}
        reason = f"{UNKNOWN}: no peak for {estimate.config.precision.policy} on this hardware"
        return {"step time": _Fact(reason)}
    ms = units.milliseconds
    span = f"{ms(time.low_seconds).removesuffix(' ms')} to {ms(time.high_seconds).removesuffix(' ms')}"
    rows = {"step time": _Fact(f"{ms(time.seconds)} ({span})")}
    rate = estimate.tokens_per_second or estimate.rows_per_second
    if rate is not None:
        devices = estimate.target.num_devices
        each = f" ({format_count(rate / devices)} per device)" if devices > 1 else ""
        rows[f"{estimate.workload.unit}/s"] = _Fact(format_count(rate) + each)
    rows["MFU"] = _Fact(_utilization(time))
    rows["bound by"] = _Fact(time.bound)
    whole = time.seconds if 0 < time.seconds < math.inf else None
    if units.is_single:
        # Side by side they would be as many rows again; the page has them as bars.
        for block in time.blocks:
            work = f"{_three_digits(block.intensity)} FLOPs per byte" if block.flops else "only moves data"
            text = f"{ms(block.seconds):>12}, bound by {block.bound}, {work}"
            rows[block.name] = _Fact(text, block.seconds / whole if whole else None)
    for traffic in time.traffic:
        label = f"traffic over {traffic.axis}"
        label = f"{label}: {traffic.kind}" if label in rows else label
        share = traffic.exposed_seconds / whole if whole else None
        rows[label] = _Fact(_traffic(traffic, units), share)
    if time.bubble_fraction:
        lost = bubble_seconds(time)
        text = f"{100 * time.bubble_fraction:.1f} % of the pipeline, {ms(lost)}"
        rows["pipeline bubble"] = _Fact(text, lost / whole if whole else None)
    return rows


def _utilization(time: StepTime) -> str:
    likely = time.model_flops_utilization
    if likely is None:
        return UNKNOWN
    slow, fast = (
        100 * likely * time.seconds / seconds if seconds else math.nan
        for seconds in (time.high_seconds, time.low_seconds)
    )
    span = f" ({slow:.1f} to {fast:.1f} %)" if math.isfinite(slow) and math.isfinite(fast) else ""
    return f"{100 * likely:.1f} %{span}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _traffic(traffic: Traffic, units: _Units) -> str:
    sent = traffic.bytes / 2**30
    size = f"{sent:,.2f} GiB" if sent >= 0.1 else f"{1024 * sent:,.2f} MiB"
    ms = units.milliseconds
    text = f"{size}, {ms(traffic.seconds)}, {ms(traffic.exposed_seconds)} exposed"
    return f"{text}; {traffic.link} link: {traffic.kind}" if units.is_single else text


def _cost_facts(estimate: Estimate, units: _Units) -> dict[str, _Fact]:
    cost = estimate.cost
    if estimate.fits is False:
        return {"time to train": _Fact(_NONE)}
    if cost is None:
        return {"cost": _Fact(f"{UNKNOWN}" + ("" if estimate.time else " without a step time"))}
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
        rows["spot"] = f"{dollars(spot.usd)} in {hours(spot.hours)}"
        recommended = hours(spot.recommended_interval_seconds / 3600)
        asked = hours(spot.checkpoint_interval_seconds / 3600)
        rows["spot checkpoints"] = f"every {asked}" + ("" if asked == recommended else f" (best: {recommended})")
        rows["spot efficiency"] = f"{100 * spot.efficiency:.1f} %, {_few(spot.interruptions)} interruptions expected"
    if cost.energy_kwh is None:
        rows["energy"] = UNKNOWN
    else:
        rows["energy"] = f"{_three_digits(cost.energy_kwh)} kWh, {dollars(cost.energy_usd)}"
    rows["buying the devices"] = dollars(cost.purchase_usd)
    rows["break-even"] = _break_even(cost)
    return {label: _Fact(text) for label, text in rows.items()}


def _few(count: float) -> str:
    return f"{count:,.1f}" if count >= 1 else f"{count:.1g}"


def _break_even(cost: Cost) -> str:
    if cost.break_even_hours is not None:
        return f"after {cost.break_even_hours:,.0f} hours of rent"
    if cost.purchase_usd is None or cost.on_demand_usd is None:
        return UNKNOWN
    return "never: rent is $0"
