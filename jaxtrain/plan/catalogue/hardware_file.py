"""hardware.yaml, and a file laid over it, read strictly: every key known, every figure possible."""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.files import read_yaml
from jaxtrain.errors import ConfigError
from jaxtrain.plan.compilers.topology import GPU_TYPES, TPU_TYPES

FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
KINDS = ("gpu", "tpu", "cpu")
VENDORS = ("nvidia", "amd", "google")

_COMPILERS = (*TPU_TYPES, *GPU_TYPES)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_price(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_count(value: Any) -> bool:
    return _is_positive(value) and value == int(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_peaks(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= set(FORMATS) and all(map(_is_positive, value.values()))


def _is_shapes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_count, value)) and value == sorted(set(value))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_sources(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= set(_FIGURES) and all(map(_is_text, value.values()))


# What a value must be, how that is said, and whether it may be null.
_Check = tuple[Callable[[Any], bool], str, bool]
_BANDWIDTH = (_is_positive, "bytes/s, as in 450e9", False)
_PRICE = (_is_price, "US dollars, as in 2.5, or null", True)
# Each of these needs a source.
_FIGURES: dict[str, _Check] = {
    "memory_bytes": (_is_count, "a count of bytes, as in 85899345920", False),
    "memory_bandwidth": _BANDWIDTH,
    "peak_flops": (_is_peaks, f"FLOP/s by format ({', '.join(FORMATS)}), as in {{bf16: 989e12}}", False),
    "matmul_efficiency": (lambda value: _is_positive(value) and value <= 1, "a share, as in 0.6, or null", True),
    "island": (_is_count, "a count of devices, as in 8", False),
    "devices_per_host": (_is_count, "a count of devices, as in 8", False),
    "link_bandwidth": _BANDWIDTH,
    "network_bandwidth": _BANDWIDTH,
    "host_bandwidth": _BANDWIDTH,
    "board_watts": (_is_positive, "watts, as in 700, or null", True),
    "on_demand_usd_hour": _PRICE,
    "spot_usd_hour": _PRICE,
    "purchase_usd": _PRICE,
    "shapes": (_is_shapes, "counts of devices, the smallest first, as in [1, 8]", False),
}
_KEYS: dict[str, _Check] = {
    "title": (_is_text, "text", False),
    "kind": (lambda value: value in KINDS, f"one of {', '.join(KINDS)}", False),
    "vendor": (lambda value: value in VENDORS, f"one of {', '.join(VENDORS)}, or null", True),
    **_FIGURES,
    "compiler": (lambda value: value in _COMPILERS, f"one of {', '.join(_COMPILERS)}, or null", True),
    "device_kinds": (_is_texts, "a list of text", False),
    "sources": (_is_sources, f"text by figure ({', '.join(_FIGURES)})", False),
}
# What an entry of one's own must say; `_assumed` has the rest.
_NEEDED = ("title", "kind", "memory_bytes", "memory_bandwidth", "peak_flops")
# PCIe 4.0, and what hosts of TPUs have.
_ASSUMED_HOST_BANDWIDTH = {"gpu": 32e9, "tpu": 16e9}
_ASSUMED_NETWORK_BANDWIDTH = 1.25e9
_VENDORS_BY_TITLE = {"NVIDIA": "nvidia", "AMD": "amd", "Google": "google"}
# Not known of a cpu before it is measured.
_MEASURED = ("memory_bytes", "memory_bandwidth", "link_bandwidth", "network_bandwidth", "host_bandwidth")


def read_entries(
    path: Path, below: Mapping[str, dict[str, Any]], *, peaks: Callable[[str], Mapping[str, float]] | None = None
) -> dict[str, dict[str, Any]]:
    """The entries of a file, each laid over the one of its name.

    Args:
        path: the file.
        below: entries by name, as fields of `Hardware`.
        peaks: device kind -> FLOP/s by number format, which an entry has besides those of the file.

    Returns:
        name -> fields of `Hardware`, of the entries that the file has something of.

    Raises:
        ConfigError: an unknown key, a value that cannot be, an incomplete entry.
    """
    values, lines = read_yaml(path)
    entries = {}
    for name, entry in values.items():
        where = f"{path}:{lines.get((str(name),), 1)}: {name}"
        if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            raise ConfigError(f"{where}: a name is of small letters, digits and single dashes, as in h100-pcie")
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: an entry is a mapping of figures, as in on_demand_usd_hour: 2.5")
        for key in entry:
            if key not in _KEYS:
                nearest = difflib.get_close_matches(str(key), _KEYS, 1, 0.0)[0]
                raise ConfigError(f"{where}: no key {key!r}; the nearest is {nearest}")
        if name not in below and (missing := [key for key in _NEEDED if key not in entry]):
            close = difflib.get_close_matches(name, below, 1, 0.6)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{where} is not in the catalogue, so it needs {', '.join(missing)} too{meant}")
        assumed = {} if name in below else _assumed(entry)
        # Each figure has a source: the file where it names no other.
        sources = dict.fromkeys(assumed, "assumed") | dict.fromkeys(entry, path.name)
        entry = assumed | entry
        kind = entry.get("kind", below.get(name, {}).get("kind"))
        read = {key: _value(key, value, kind == "cpu", where) for key, value in entry.items()}
        if peaks is not None:
            known = [peaks(device_kind) for device_kind in read["device_kinds"]]
            assert all(one == known[0] for one in known), f"{name}: one entry, one set of peaks"
            read["peak_flops"] = {**known[0], **read["peak_flops"]}
        entries[name] = _with_sources(read, below.get(name, {}), sources)
    return entries


def _assumed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry of one's own need not say: a device alone in its machine, which nobody rents."""
    island, host = entry.get("island", 1), _ASSUMED_HOST_BANDWIDTH.get(entry["kind"], 32e9)
    return {key: None for key in _KEYS if key not in _NEEDED} | {
        "vendor": _VENDORS_BY_TITLE.get(str(entry["title"]).partition(" ")[0]),
        "island": island,
        "devices_per_host": island,
        "link_bandwidth": host,
        "network_bandwidth": _ASSUMED_NETWORK_BANDWIDTH,
        "host_bandwidth": host,
        "shapes": sorted({1, island}),
        "device_kinds": [],
        "sources": {},
    }


def _value(key: str, value: Any, is_cpu: bool, where: str) -> Any:
    """A value in the type that `Hardware` has for it."""
    check, what, may_be_null = _KEYS[key]
    if value is None and (may_be_null or (is_cpu and key in _MEASURED)):
        return None
    if value is None or not check(value):
        raise ConfigError(f"{where}: {key}: {value!r} is not {what}")
    if key in ("memory_bytes", "island", "devices_per_host"):
        return int(value)
    if key == "peak_flops":
        return {number_format: float(peak) for number_format, peak in value.items()}
    if isinstance(value, list):
        return tuple(value)
    return float(value) if key in _FIGURES else value


def _with_sources(read: dict[str, Any], below: dict[str, Any], sources: dict[str, str]) -> dict[str, Any]:
    """What was read over what is below it, and a source for each figure, in the place of that of the figure below."""
    sources = below.get("sources", {}) | sources | read.get("sources", {})
    peaks = below.get("peak_flops", {}) | read.get("peak_flops", {})
    read = below | read | {"peak_flops": peaks}
    return read | {"sources": {key: sources[key] for key in _FIGURES if read[key] not in (None, {})}}
