"""Rotary keys of a config.json, in the form of transformers 4 and in that of transformers 5. No jax here.

Old form: `rope_theta` and `rope_scaling` {"rope_type" or "type", ...}. Form of transformers 5: `rope_parameters`
{"rope_type", "rope_theta", ...}. Files of both forms are read; both forms are written, because a reader of the old
form takes a theta of 10000 in silence where there is no `rope_theta`.

A family declares `*rope_keys(theta)` among its keys, and calls `read_rope` and `write_rope`.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.keys import Key, Own
from jaxtrain.published.longrope import longrope_factor

_REQUIRED = object()

# Key of the published group -> key of ours, per kind; each with the kind's default, _REQUIRED where the file must say
# it.
_KINDS: dict[str, tuple[tuple[str, str, object], ...]] = {
    "llama3": (
        ("factor", "factor", _REQUIRED),
        ("low_freq_factor", "low_frequency_factor", _REQUIRED),
        ("high_freq_factor", "high_frequency_factor", _REQUIRED),
        ("original_max_position_embeddings", "original_length", _REQUIRED),
    ),
    "linear": (("factor", "factor", _REQUIRED),),
    "yarn": (
        ("factor", "factor", _REQUIRED),
        ("original_max_position_embeddings", "original_length", _REQUIRED),
        ("beta_fast", "beta_fast", 32.0),
        ("beta_slow", "beta_slow", 1.0),
        ("attention_factor", "attention_factor", None),
        ("truncate", "truncate", True),
    ),
    "longrope": (
        ("short_factor", "short_factors", _REQUIRED),
        ("long_factor", "long_factors", _REQUIRED),
        ("original_max_position_embeddings", "original_length", _REQUIRED),
        ("attention_factor", "attention_factor", None),
    ),
}
# Names that the first files of Phi-3 have.
_OTHER_KINDS = {"su": "longrope"}
# Ours are floats, where files may have whole numbers.
_FLOATS = ("factor", "low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow", "attention_factor")


def rope_keys(theta: float) -> tuple[Key, ...]:
    """Returns the declarations of the rotary keys.

    Args:
        theta: The family's default of rope_theta.
    """
    return (Own("rope_theta", default=theta), Own("rope_scaling", default=None), Own("rope_parameters", default=None))


def read_rope(file: Mapping[str, Any], *, family: str, original_length: int | None = None) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of our model group.

    Args:
        file: The file's values, from `read_keys`.
        family: Name of the family, for messages.
        original_length: Of a scaling that does not say it itself; null: it must.

    Raises:
        ConfigError: If the kind of scaling is not known, or one of its numbers is missing or unknown.
    """
    parameters = _group(file["rope_parameters"], "rope_parameters")
    # A rope_scaling in the file is what transformers 5 reads too, before rope_parameters.
    scaling = _group(file["rope_scaling"], "rope_scaling") or parameters
    theta = scaling.get("rope_theta", parameters.get("rope_theta", file["rope_theta"]))
    found = read_scaling(scaling, family=family, original_length=original_length)
    if found is not None and found["kind"] == "longrope" and found["attention_factor"] is None:
        # It follows from the length of the file, which a run may lower: every score of attention would change with it.
        original, longest = found["original_length"], file["max_position_embeddings"]
        if isinstance(original, int) and isinstance(longest, int) and min(original, longest) > 1:
            found["attention_factor"] = longrope_factor(original, longest)
    return {"rope_theta": _number(theta, "rope_theta"), "rope_scaling": found}


def read_fraction(file: Mapping[str, Any], key: str) -> float:
    """Returns `rotary_fraction` of our model group: from rope_parameters, where transformers 5 writes it, or a key.

    Args:
        file: The file's values, from `read_keys`.
        key: The family's own key of it.
    """
    parameters = _group(file["rope_parameters"], "rope_parameters")
    return _number(parameters.get("partial_rotary_factor", file[key]), key)


def read_scaling(group: Mapping[str, Any], *, family: str, original_length: int | None = None) -> dict[str, Any] | None:
    """Returns our `rope_scaling` of a published group, or None for plain rotary positions."""
    apart = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    rest = {key: value for key, value in group.items() if key not in apart}
    kind = group.get("rope_type", group.get("type", "default"))
    if kind == "default":
        return None
    kind = _OTHER_KINDS.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(
            f"config.json has a rope_scaling of type {kind}, which the family {family} does not support; it knows "
            f"default, {', '.join(_KINDS)}"
        )
    found: dict[str, Any] = {"kind": kind}
    for theirs, ours, default in _KINDS[kind]:
        value = rest.pop(theirs, default)
        if ours == "original_length" and value in (_REQUIRED, None) and original_length is not None:
            value = original_length
        if value is _REQUIRED:
            raise ConfigError(f"config.json has a rope_scaling of type {kind} without {theirs}; write its value there")
        found[ours] = _number(value, theirs) if ours in _FLOATS and value is not None else value
        if isinstance(value, list):
            found[ours] = tuple(_number(one, theirs) for one in value)
    if rest:
        key, value = next(iter(rest.items()))
        raise ConfigError(f"config.json has the key {key} ({value}) in a rope_scaling of type {kind}, which has none")
    return found


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"config.json has {key}: {value}, but it takes a number")
    return float(value)


def write_rope(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary keys of a config.json, in both forms."""
    theta, scaling = model["rope_theta"], write_scaling(model["rope_scaling"])
    if scaling is not None and scaling["rope_type"] == "longrope":
        usual = longrope_factor(scaling["original_max_position_embeddings"], model["max_sequence_length"])
        # Readers compute it from the lengths.
        if scaling.get("attention_factor", usual) == usual:
            scaling.pop("attention_factor", None)
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    if model["rotary_fraction"] != 1:
        parameters["partial_rotary_factor"] = model["rotary_fraction"]
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters}


def write_scaling(scaling: object) -> dict[str, Any] | None:
    """Returns the published group of our `rope_scaling`, the inverse of `read_scaling`."""
    if scaling is None:
        return None
    assert isinstance(scaling, Mapping)
    kind = str(scaling.get("kind", "llama3"))
    written: dict[str, Any] = {"rope_type": kind}
    for theirs, ours, default in _KINDS[kind]:
        value = scaling[ours]
        if value != default:
            written[theirs] = list(value) if isinstance(value, tuple) else value
    return written


def _group(value: object, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json has {name}: {value}, but it takes an object such as {{'rope_type': 'default'}}")
    return value
