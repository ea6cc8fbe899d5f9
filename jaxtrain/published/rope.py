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

# Key of the published group -> key of ours, per kind; each with the kind's default, None where the file must say it.
_KINDS: dict[str, tuple[tuple[str, str, object], ...]] = {
    "llama3": (
        ("factor", "factor", None),
        ("low_freq_factor", "low_frequency_factor", None),
        ("high_freq_factor", "high_frequency_factor", None),
        ("original_max_position_embeddings", "original_length", None),
    ),
}


def rope_keys(theta: float) -> tuple[Key, ...]:
    """Returns the declarations of the rotary keys.

    Args:
        theta: The family's default of rope_theta.
    """
    return (Own("rope_theta", default=theta), Own("rope_scaling", default=None), Own("rope_parameters", default=None))


def read_rope(file: Mapping[str, Any], *, family: str) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of our model group.

    Args:
        file: The file's values, from `read_keys`.
        family: Name of the family, for messages.

    Raises:
        ConfigError: If the kind of scaling is not known, or one of its numbers is missing or unknown.
    """
    parameters = _group(file["rope_parameters"], "rope_parameters")
    # A rope_scaling in the file is what transformers 5 reads too, before rope_parameters.
    scaling = _group(file["rope_scaling"], "rope_scaling") or parameters
    theta = scaling.get("rope_theta", parameters.get("rope_theta", file["rope_theta"]))
    return {"rope_theta": float(theta), "rope_scaling": read_scaling(scaling, family=family)}  # pyright: ignore


def read_scaling(group: Mapping[str, Any], *, family: str) -> dict[str, Any] | None:
    """Returns our `rope_scaling` of a published group, or None for plain rotary positions."""
    rest = {key: value for key, value in group.items() if key not in ("rope_type", "type", "rope_theta")}
    kind = group.get("rope_type", group.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(
            f"config.json has a rope_scaling of type {kind}, which the family {family} does not support; it knows "
            f"default, {', '.join(_KINDS)}"
        )
    found: dict[str, Any] = {}
    for theirs, ours, default in _KINDS[kind]:
        value = rest.pop(theirs, default)
        if value is None:
            raise ConfigError(f"config.json has a rope_scaling of type {kind} without {theirs}; write its value there")
        found[ours] = value
    if rest:
        key, value = next(iter(rest.items()))
        raise ConfigError(f"config.json has the key {key} ({value}) in a rope_scaling of type {kind}, which has none")
    return found


def write_rope(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary keys of a config.json, in both forms."""
    theta, scaling = model["rope_theta"], write_scaling(model["rope_scaling"])
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters}


def write_scaling(scaling: object) -> dict[str, Any] | None:
    """Returns the published group of our `rope_scaling`, the inverse of `read_scaling`."""
    if scaling is None:
        return None
    assert isinstance(scaling, Mapping)
    kind = str(scaling.get("kind", "llama3"))
    return {"rope_type": kind} | {theirs: scaling[ours] for theirs, ours, _ in _KINDS[kind]}


def _group(value: object, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json has {name}: {value}, but it takes an object such as {{'rope_type': 'default'}}")
    return value
