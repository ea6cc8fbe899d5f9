"""Rotary keys and windows of a config.json. No jax here.

Files have `rope_theta` and `rope_scaling` {"rope_type" or "type", ...}, or, from transformers 5 on, `rope_parameters`
{"rope_type", "rope_theta", ...}. Both forms are read, and both are written, because a reader of the old form takes a
theta of 10000 in silence where there is no `rope_theta`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.errors import ConfigError

_REQUIRED = object()
_LENGTH = ("original_max_position_embeddings", "original_length", _REQUIRED)
_FACTOR = ("factor", "factor", _REQUIRED)
# Kind -> (key of the published group, ours, default).
_KINDS: dict[str, tuple[tuple[str, str, object], ...]] = {
    "llama3": (
        _FACTOR,
        ("low_freq_factor", "low_frequency_factor", _REQUIRED),
        ("high_freq_factor", "high_frequency_factor", _REQUIRED),
        _LENGTH,
    ),
    "linear": (_FACTOR,),
    "yarn": (
        _FACTOR,
        _LENGTH,
        ("beta_fast", "beta_fast", 32.0),
        ("beta_slow", "beta_slow", 1.0),
        ("attention_factor", "attention_factor", None),
        ("truncate", "truncate", True),
    ),
    "longrope": (
        ("short_factor", "short_factors", _REQUIRED),
        ("long_factor", "long_factors", _REQUIRED),
        _LENGTH,
        ("attention_factor", "attention_factor", None),
    ),
}
# Ours are floats, where files may have whole numbers.
_FLOATS = ("factor", "low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow", "attention_factor")


def longrope_factor(original_length: int, max_length: int) -> float:
    """The factor of cos and sin where longrope scaling gives none: sqrt(1 + ln(max / original) / ln(original))."""
    extension = max_length / original_length
    return math.sqrt(1 + math.log(extension) / math.log(original_length)) if extension > 1 else 1.0


def read_rope(file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of our model group, and `rotary_fraction` where a file says it.

    Raises:
        ConfigError: The kind of scaling is not known, or one of its numbers is missing or unknown.
    """
    parameters = file["rope_parameters"] or {}
    # A rope_scaling in the file is what transformers 5 reads too, before rope_parameters.
    group = file["rope_scaling"] or parameters
    theta = group.get("rope_theta", parameters.get("rope_theta", file["rope_theta"]))
    found: dict[str, Any] = {"rope_theta": float(theta), "rope_scaling": _read_scaling(group, file)}
    if "partial_rotary_factor" in file:
        found["rotary_fraction"] = float(parameters.get("partial_rotary_factor", file["partial_rotary_factor"]))
    return found


def read_ropes(file: Mapping[str, Any], windows: dict[str, Any], local_theta: float) -> dict[str, Any]:
    """Returns the rotary keys and the windows of a file whose rope_parameters are those of each kind of layers.

    Args:
        file: What was read; its rope_scaling is that of the global layers.
        windows: What `read_windows` returned.
        local_theta: Base of the local layers where the file names none.

    Raises:
        ConfigError: The local layers have a scaling, or rope_parameters do not say of which layers they are.
    """
    parameters = dict(file["rope_parameters"] or {})
    whole, local = (parameters.pop(kind, None) or {} for kind in ("full_attention", "sliding_attention"))
    theta, scaling = float(local.get("rope_theta", local_theta)), local.get("rope_type", "default")
    if parameters or scaling != "default":
        raise ConfigError(
            f"config.json has rope_parameters with {', '.join(parameters) or f'sliding_attention of type {scaling}'}, "
            "which this family does not support; they are of full_attention, and of sliding_attention of type default"
        )
    if windows["local_layers"] is not None:
        windows["local_layers"]["rope_theta"] = theta
    elif windows["sliding_window"] is not None:  # every layer is a local one
        whole, file = {"rope_theta": theta}, {**file, "rope_scaling": None}
    return windows | read_rope({**file, "rope_parameters": whole})


def write_ropes(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rope_theta` and the `rope_parameters` of each kind of layers."""
    local, theta, plain = model["local_layers"], model["rope_theta"], {"rope_type": "default"}
    local_theta = theta if local is None or local["rope_theta"] is None else local["rope_theta"]
    whole = {"rope_theta": theta, **(write_rope(model)["rope_scaling"] or plain)}
    local_parameters = {"rope_theta": local_theta, **plain}
    return dict(rope_theta=theta, rope_parameters=dict(full_attention=whole, sliding_attention=local_parameters))


def _read_scaling(group: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any] | None:
    apart = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    rest = {key: value for key, value in group.items() if key not in apart}
    kind = group.get("rope_type", group.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # the first files of Phi-3
    if kind == "default":
        return None
    if kind not in _KINDS:
        raise ConfigError(f"config.json has a rope_scaling of type {kind}; known are default, {', '.join(_KINDS)}")
    longest = file["max_position_embeddings"]
    found: dict[str, Any] = {"kind": kind}
    for theirs, ours, default in _KINDS[kind]:
        value = rest.pop(theirs, default)
        if ours == "original_length" and value in (_REQUIRED, None):
            value = file.get("original_max_position_embeddings", longest)
        if value is _REQUIRED:
            rest[theirs] = value
            continue
        found[ours] = float(value) if ours in _FLOATS and value is not None else value
        if isinstance(value, list):
            found[ours] = tuple(map(float, value))
    if rest:
        raise ConfigError(f"config.json has a rope_scaling of type {kind} whose keys are wrong: {', '.join(rest)}")
    if kind == "longrope" and found["attention_factor"] is None:
        # It follows from the length of the file, which a run may lower: every score of attention would change with it.
        found["attention_factor"] = longrope_factor(found["original_length"], longest)
    return found


def write_rope(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary keys of a config.json, in both forms."""
    theta, scaling = model["rope_theta"], _write_scaling(model["rope_scaling"])
    if scaling is not None and scaling["rope_type"] == "longrope":
        usual = longrope_factor(scaling["original_max_position_embeddings"], model["max_sequence_length"])
        # Readers compute it from the lengths.
        if scaling.get("attention_factor", usual) == usual:
            scaling.pop("attention_factor", None)
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    if model["rotary_fraction"] != 1:
        parameters["partial_rotary_factor"] = model["rotary_fraction"]
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters}


def _write_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    kind = str(scaling.get("kind", "llama3"))
    written: dict[str, Any] = {"rope_type": kind}
    for theirs, ours, default in _KINDS[kind]:
        value = scaling[ours]
        if value != default:
            written[theirs] = list(value) if isinstance(value, tuple) else value
    return written


_WINDOWED = {"sliding_attention": 1, "full_attention": 0}


def read_windows(layer_types: Sequence[str], window: int | None) -> dict[str, Any]:
    """Returns `sliding_window` and `local_layers` of our model group; `window` is that of the sliding layers.

    Raises:
        ConfigError: There are other types than "sliding_attention" and "full_attention", or no window where one is
            needed.
    """
    if any(kind not in _WINDOWED for kind in layer_types) or ("sliding_attention" in layer_types and window is None):
        raise ConfigError(
            f"config.json has layer_types: {layer_types} and sliding_window: {window}; layers are sliding_attention, "
            "with a window, or full_attention"
        )
    pattern = [_WINDOWED[kind] for kind in layer_types]
    if not any(pattern):
        return {"sliding_window": None, "local_layers": None}
    if all(pattern):
        return {"sliding_window": window, "local_layers": None}
    return {"sliding_window": None, "local_layers": {"pattern": shortest_pattern(pattern), "window": window}}


def whole_every(period: int, file: Mapping[str, Any]) -> list[str]:
    """Returns the `layer_types` of a file that leaves them out: each `period`-th layer has no window."""
    layers = range(1, int(file["num_hidden_layers"]) + 1)
    return ["sliding_attention" if layer % period else "full_attention" for layer in layers]


def shortest_pattern(layers: Sequence[int]) -> tuple[int, ...]:
    """Returns the shortest pattern that gives the numbers of all layers when it is repeated."""
    patterns = (tuple(layers[:period]) for period in range(1, len(layers) + 1))
    return next(one for one in patterns if all(kind == one[at % len(one)] for at, kind in enumerate(layers)))


def write_windows(model: Mapping[str, Any], unused: int | None = None) -> dict[str, Any]:
    """Returns `layer_types` and `sliding_window`, which is `unused` where no layer has a window."""
    layers, local, window = int(model["num_layers"]), model["local_layers"], model["sliding_window"]
    pattern = (int(window is not None),) if local is None else local["pattern"]
    kinds = ("full_attention", "sliding_attention")
    types = [kinds[pattern[at % len(pattern)]] for at in range(layers)]
    window = window if local is None else local["window"]
    return dict(layer_types=types, sliding_window=unused if window is None else window)
