"""The hardware that a plan can be made for: the catalogue, rows of a user's own, and a CPU as it was measured.

The figures, each with its source, are data: hardware.yaml beside this file. Nothing here imports jax, so that a list
and a wrong name are answered at once.
"""

import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, WrapValidator

from jaxtrain.config.files import read_yaml
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.devices import device_peaks

_FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
# Makers, families and kinds, which tell no two devices of the catalogue apart.
_MAKERS = frozenset(("nvidia", "tesla", "geforce", "amd", "instinct", "google", "cloud", "gpu", "tpu"))
# What a figure of the catalogue's `cpu` is before it is measured.
_UNKNOWN = WrapValidator(lambda value, read: None if value is None else read(value))
_Count = Annotated[int, Field(gt=0), _UNKNOWN]
_Rate = Annotated[float, Field(gt=0), _UNKNOWN]
_Price = Annotated[float, Field(ge=0)] | None


@dataclass(frozen=True)
class Hardware:
    """One kind of device, a device being what jax counts as one: figures of a TPU v3 or TPU7x chip are halved.

    The figures of the catalogue's `cpu` are None until `measured_cpu` gives them.

    Attributes:
        name: as in `h100`.
        title: as in "NVIDIA H100 SXM 80 GB".
        kind: `gpu`, `tpu` or `cpu`.
        vendor: `nvidia`, `amd` or `google`; None: another.
        memory_bytes: what allocators can see, where that is known.
        memory_bandwidth: bytes/s.
        peak_flops: dense FLOP/s (int8: OP/s) by number format; one that it lacks is left out.
        matmul_efficiency: share of that peak which matmuls in bf16 reach in whole steps; None: that of its kind.
        island: devices joined by the fast link: of a node, or of the largest TPU slice.
        devices_per_host: devices of one machine, each of which writes its part of a checkpoint.
        link_bandwidth: bytes/s of one device in one direction, over all its NVLink, ICI or PCIe links together.
        network_bandwidth: bytes/s of one device between nodes or slices, when all devices of a node send.
        host_bandwidth: bytes/s of one device in one direction between it and its host.
        on_demand_usd_hour: of one device.
        spot_usd_hour: of one device.
        shapes: device counts that it is rented in, the smallest first.
        compiler: the type that `plan.topology` compiles for, if it does.
        device_kinds: `device.device_kind` in jax.
        aliases: other names that people write.
        sources: figure -> where it is from and when, of every figure that is not None.
    """

    name: str
    title: str
    kind: Literal["gpu", "tpu", "cpu"]
    vendor: Literal["nvidia", "amd", "google"] | None
    memory_bytes: _Count
    memory_bandwidth: _Rate
    peak_flops: dict[str, _Rate]
    matmul_efficiency: Annotated[float, Field(gt=0, le=1)] | None
    island: _Count
    devices_per_host: _Count
    link_bandwidth: _Rate
    network_bandwidth: _Rate
    host_bandwidth: _Rate
    on_demand_usd_hour: _Price
    spot_usd_hour: _Price
    shapes: tuple[_Count, ...]
    compiler: str | None
    device_kinds: tuple[str, ...]
    aliases: tuple[str, ...]
    sources: dict[str, str]


_KEYS = tuple(field.name for field in dataclasses.fields(Hardware))
FIGURES = tuple(key for key in _KEYS[4:] if key not in ("compiler", "device_kinds", "aliases", "sources"))
"""Fields of `Hardware` that need a source."""
# What an entry of one's own must say, and what stands for the rest: a device alone in its machine, which nobody rents.
_NEEDED = ("title", "kind", "memory_bytes", "memory_bandwidth", "peak_flops")
_ASSUMED_NETWORK_BANDWIDTH = 1.25e9
# PCIe 4.0, and what hosts of TPUs have.
_ASSUMED_HOST_BANDWIDTH = {"gpu": 32e9, "tpu": 16e9}
_VENDORS_BY_TITLE = {"NVIDIA": "nvidia", "AMD": "amd", "Google": "google"}


def catalogue(path: str | Path | None = None) -> dict[str, Hardware]:
    """The hardware by name.

    Args:
        path: a file of the user's with the keys of hardware.yaml, laid over it: it may hold some entries of it with
            some of their keys, and entries of its own. What it sets has it as the source, unless it names another.

    Raises:
        ConfigError: an unknown key or a value that cannot be, in one line that names the file and the entry.
    """
    shipped = _shipped()
    return dict(shipped) if path is None else {**shipped, **_own_rows(Path(path), shipped)}


@functools.cache
def _shipped() -> dict[str, Hardware]:
    with resources.as_file(resources.files("jaxtrain.plan") / "hardware.yaml") as path:
        rows, _ = read_yaml(path)
    found = {}
    for name, row in rows.items():
        peaks = [device_peaks(kind) for kind in row["device_kinds"]]
        values = {key: None for key in _KEYS} | row | {"name": name}
        values["peak_flops"] = (peaks[0] if peaks else {}) | row["peak_flops"]
        found[name] = _reader().validate_python(values)
    return found


@functools.cache
def _reader() -> TypeAdapter[Hardware]:
    return TypeAdapter(Hardware)


def _own_rows(path: Path, shipped: Mapping[str, Hardware]) -> dict[str, Hardware]:
    rows, lines = read_yaml(path)
    found = {}
    for name, row in rows.items():
        where = f"{path}:{lines.get((str(name),), 1)}: {name}"
        if wrong := _mistake(str(name), row, shipped):
            raise ConfigError(f"{where}{wrong}")
        below = dataclasses.asdict(shipped[name]) if name in shipped else _assumed(row)
        if "on_demand_usd_hour" in row:  # the spot price of the catalogue may be above it
            below["spot_usd_hour"] = None
        values = {**below, **row, "name": name}
        sources = below["sources"] | dict.fromkeys(row, path.name) | row.get("sources", {})
        try:
            if isinstance(values["peak_flops"], dict):
                values["peak_flops"] = below.get("peak_flops", {}) | values["peak_flops"]
            values["sources"] = {key: sources[key] for key in FIGURES if values[key] not in (None, {})}
            found[name] = _reader().validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{where}: {key}: {first['input']!r}: {first['msg']}") from None
    return found


def _mistake(name: str, row: Any, shipped: Mapping[str, Hardware]) -> str | None:
    """What is wrong with the keys of an entry of a user's file."""
    if not isinstance(row, dict):
        return ": an entry is a mapping of figures, as in on_demand_usd_hour: 2.5"
    peaks = row.get("peak_flops")
    for known, keys in ((_KEYS, row), (_FORMATS, peaks if isinstance(peaks, dict) else ())):
        if unknown := [str(key) for key in keys if key not in known]:
            return f": no key {unknown[0]!r}; the nearest is {difflib.get_close_matches(unknown[0], known, 1, 0.0)[0]}"
    missing = [key for key in _NEEDED if key not in row]
    if name in shipped or not missing:
        return None
    close = difflib.get_close_matches(name, shipped, 1, 0.6)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f" is not in the catalogue, so it needs {', '.join(missing)} too{meant}"


def _assumed(row: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry of one's own need not say, with "assumed" as the source of its figures."""
    island, host = row.get("island", 1), _ASSUMED_HOST_BANDWIDTH.get(str(row.get("kind")), 32e9)
    figures = {
        "island": island,
        "devices_per_host": island,
        "link_bandwidth": host,
        "network_bandwidth": _ASSUMED_NETWORK_BANDWIDTH,
        "host_bandwidth": host,
        "shapes": sorted({1, island}),
    }
    return {
        **{key: None for key in _KEYS if key not in _NEEDED},
        **figures,
        "vendor": _VENDORS_BY_TITLE.get(str(row.get("title")).partition(" ")[0]),
        "device_kinds": (),
        "aliases": (),
        "sources": dict.fromkeys(figures, "assumed"),
    }


def _words(name: str) -> frozenset[str]:
    """Return the words of a name: `A100-SXM4-40GB` has a100, sxm4 and 40gb."""
    name = re.sub(r"(?<=\d)\s+gb\b", "gb", name.lower()).replace("rtx", "rtx ")
    return frozenset(re.findall(r"[^\W_]+", name))


def find(name: str, hardware: Mapping[str, Hardware]) -> Hardware | None:
    """Return the entry that a name means, or None.

    A name means an entry if it has every word of one of the entry's names, and no word that is not in its names or its
    title. `H100 96GB`, `H100 NVL` and `A100 PCIe` are other cards than those of the catalogue.

    Args:
        name: as people write it (`A100 40GB`), as nvidia-smi or as jax prints it.
        hardware: the catalogue.
    """
    if name in hardware:
        return hardware[name]
    words = _words(name)
    # A row of a user's file comes after those of the catalogue.
    for entry in reversed(list(hardware.values())):
        names = [entry.name, *entry.aliases, *entry.device_kinds]
        entry_words = _words(" ".join([*names, entry.title]))
        if words <= entry_words | _MAKERS and any(_words(name) <= words for name in names):
            return entry
    return None


def nearest(name: str, hardware: Iterable[str]) -> list[str]:
    """Return the at most three names of some hardware that have a word which is most like a word of a name."""
    words = _words(name) - _MAKERS
    scores: dict[str, float] = {}
    for entry in hardware:
        pairs = itertools.product(words, _words(entry))
        scores[entry] = max((difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs), default=0.0)
    near = [entry for entry in scores if scores[entry] > 0.6]
    return sorted(near, key=scores.__getitem__, reverse=True)[:3]


def hardware_of(device_kind: str) -> Hardware | None:
    """The entry of a device that jax names so, or None."""
    return next((entry for entry in _shipped().values() if device_kind in entry.device_kinds), None)


def measured_cpu(
    peak_flops: dict[str, float], memory_bandwidth: float, memory_bytes: int, num_devices: int
) -> Hardware:
    """The entry `cpu` with what was measured on this machine.

    FLOP/s by number format, bytes/s and bytes are of one of its `num_devices` devices while the others work too.
    """
    shipped = catalogue()["cpu"]
    # Data between the devices of a CPU moves through its memory.
    rates = ("memory_bandwidth", "link_bandwidth", "network_bandwidth", "host_bandwidth")
    sources: dict[str, str] = dict.fromkeys(("memory_bytes", "peak_flops", *rates), "measured on this machine")
    values: dict[str, Any] = {
        **dict.fromkeys(rates, memory_bandwidth),
        **dict.fromkeys(("island", "devices_per_host"), num_devices),
        "peak_flops": dict(peak_flops),
        "memory_bytes": memory_bytes,
        "shapes": (num_devices,),
        "sources": shipped.sources | sources,
    }
    return dataclasses.replace(shipped, **values)


# Columns of the list: two lines of head, and of an entry a figure and its unit and form.
_COLUMNS = {
    ("memory", "GiB"): (lambda one: one.memory_bytes, 2**30, ".2f"),
    ("memory", "TB/s"): (lambda one: one.memory_bandwidth, 1e12, ".2f"),
    ("bf16", "TFLOP/s"): (lambda one: one.peak_flops.get("bf16"), 1e12, ".0f"),
    ("fp8", "TFLOP/s"): (lambda one: one.peak_flops.get("fp8"), 1e12, ".0f"),
    ("link", "GB/s"): (lambda one: one.link_bandwidth, 1e9, ".0f"),
    ("network", "GB/s"): (lambda one: one.network_bandwidth, 1e9, ".1f"),
    ("on-demand", "$/h"): (lambda one: one.on_demand_usd_hour, 1, ".2f"),
    ("spot", "$/h"): (lambda one: one.spot_usd_hour, 1, ".2f"),
}


def hardware_table(hardware: Iterable[Hardware]) -> str:
    """The list that `jaxtrain plan --list` prints."""
    rows = [("", *(one for one, _ in _COLUMNS), ""), ("name", *(one for _, one in _COLUMNS), "compiler")]
    for entry in hardware:
        found = ((of(entry), unit, form) for of, unit, form in _COLUMNS.values())
        figures = ("-" if value is None else format(value / unit, form) for value, unit, form in found)
        rows.append((entry.name, *figures, "yes" if entry.compiler else "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip() for first, *rest in rows]
    legend = (
        "",
        "Figures and prices are of one device as jax counts devices; link and network in one direction; -: not had or",
        "not published. A number counts devices too: v5p-8 is 8 chips (Google's v5p-16, which counts cores), v7x-8 is",
        "4 chips. compiler: plans are also checked by the hardware's own. The cpu is measured when one plans for it.",
    )
    return "\n".join([*lines, *legend])


def hardware_json(hardware: Iterable[Hardware]) -> list[dict[str, Any]]:
    """Everything known of some hardware, in types that JSON has."""
    return [_reader().dump_python(entry, mode="json") for entry in hardware]
