"""The catalogue as `jaxtrain plan --list` shows it: a table, or JSON. No jax here."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from jaxtrain.plan.catalogue.hardware import Hardware


def price_date(hardware: Hardware) -> str | None:
    """Year and month (`2025-06`) of the price of an hour, from its source."""
    for key in ("on_demand_usd_hour", "spot_usd_hour"):
        date = re.search(r"\d{4}-\d{2}", hardware.sources.get(key, ""))
        if date:
            return date[0]
    return None


def hardware_table(hardware: Iterable[Hardware]) -> str:
    """The list that `jaxtrain plan --list` prints."""
    head = (
        ("", "memory", "memory", "bf16", "fp8", "link", "network", "", "on-demand", "spot", "price", ""),
        ("name", "GiB", "TB/s", "TFLOP/s", "TFLOP/s", "GB/s", "GB/s", "watts", "$/h", "$/h", "of", "compiler"),
    )
    rows = [*head, *map(_row, hardware)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    legend = (
        "",
        "Figures and prices are of one device as jax counts devices; link and network in one direction; -: not had or",
        "not published. A number counts devices too: v5p-8 is 8 chips (Google's v5p-16, which counts cores), v7x-8 is",
        "4 chips. compiler: plans are also checked by the hardware's own. The cpu is measured when one plans for it.",
    )
    return "\n".join([*lines, *legend])


def hardware_json(hardware: Iterable[Hardware]) -> list[dict[str, Any]]:
    """Everything known of some hardware, in types that JSON has."""
    entries = []
    for entry in hardware:
        values = dataclasses.asdict(entry) | {"price_date": price_date(entry)}
        entries.append({key: list(value) if isinstance(value, tuple) else value for key, value in values.items()})
    return entries


def _row(entry: Hardware) -> tuple[str, ...]:
    def number(value: float | None, unit: float, form: str) -> str:
        return "-" if value is None else format(value / unit, form)

    return (
        entry.name,
        number(entry.memory_bytes, 2**30, ".2f"),
        number(entry.memory_bandwidth, 1e12, ".2f"),
        number(entry.peak_flops.get("bf16"), 1e12, ".0f"),
        number(entry.peak_flops.get("fp8"), 1e12, ".0f"),
        number(entry.link_bandwidth, 1e9, ".0f"),
        number(entry.network_bandwidth, 1e9, ".1f"),
        number(entry.board_watts, 1, ".0f"),
        number(entry.on_demand_usd_hour, 1, ".2f"),
        number(entry.spot_usd_hour, 1, ".2f"),
        price_date(entry) or "-",
        "-" if entry.compiler is None else "yes",
    )
