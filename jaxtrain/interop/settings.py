"""Our model group as families read it, and the family that can say it. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.published import parse_settings, settings_in, settings_of
from jaxtrain.errors import ConfigError
from jaxtrain.published.families.table import FAMILIES, read_settings
from jaxtrain.published.family import Family

__all__ = ["family_for", "parse_settings", "settings_in", "settings_of", "unsaid"]

_PUBLISHED_KINDS = ("transformer", "encoder_decoder", "vit", "resnet")
# What a published config does not say, or what changes how outputs are computed but not what they are.
_NOT_COMPARED = ("size", "from", "attention", "dropout")
# Equal to no value of a key.
_MISSING = object()


def unsaid(family: Family, settings: Mapping[str, Any]) -> str | None:
    """Returns the first key of our model group whose value a config.json of the family cannot say, or None.

    Args:
        family: The family.
        settings: From `settings_of`.
    """
    again = _said(family, settings)
    if isinstance(again, str):
        return again
    return next((f"model.{key}={settings[key]}" for key in _differing(settings, again)), None)


def _said(family: Family, settings: Mapping[str, Any]) -> dict[str, Any] | str:
    """The model group as the family reads what it writes of it; or what it cannot write, in words."""
    from pydantic import ValidationError

    kind = settings.get("kind")
    if kind != _kind_of(family):
        return f"model.kind={kind}"
    try:
        written = {**family.to_published(settings), "model_type": family.model_type}
        return settings_of(parse_settings(read_settings(written)))
    except ConfigError as error:
        return str(error)
    except ValidationError as error:  # what it can say of the model does not fit together
        return str(error.errors()[0]["msg"])


def _kind_of(family: Family) -> str:
    """The kind of model that a family is of; sizes leave out the default."""
    return next((str(size["kind"]) for size in family.sizes.values() if "kind" in size), "transformer")


def _differing(settings: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ."""
    return [key for key, value in settings.items() if key not in _NOT_COMPARED and other.get(key, _MISSING) != value]


def _num_differing(family: Family, settings: Mapping[str, Any]) -> int:
    """How far a family of the same kind is from a model."""
    again = _said(family, settings)
    if not isinstance(again, str):
        return _num_of(settings, again)
    # It does not write the model at all: it may without one key, and else how its models are built, whatever their
    # sizes, says how near it is.
    size = next(iter(family.sizes.values()))
    usual = settings_of(parse_settings({"kind": _kind_of(family), **size}))
    without = [{**settings, key: usual[key]} for key in _differing(settings, usual) if key in usual]
    said = [(one, _said(family, one)) for one in without]
    found = [1 + _num_of(one, again) for one, again in said if not isinstance(again, str)]
    return min(found) if found else max(1, _num_of(settings, usual, with_sizes=False))


def _num_of(settings: Mapping[str, Any], other: Mapping[str, Any], *, with_sizes: bool = True) -> int:
    return sum(
        _distance(settings[key], other.get(key, _MISSING), with_sizes=with_sizes) for key in _differing(settings, other)
    )


def _distance(one: Any, other: Any, *, with_sizes: bool) -> int:
    """In how many keys two values differ; a group that one of them lacks counts as all of its keys."""
    groups = [value for value in (one, other) if isinstance(value, Mapping)]
    if len(groups) == 2:
        return sum(_distance(value, other.get(key, _MISSING), with_sizes=with_sizes) for key, value in one.items())
    if groups:
        return len(groups[0])
    return int(one != other and (with_sizes or not (_is_size(one) and _is_size(other))))


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def family_for(settings: Mapping[str, Any], *, model_type: str | None = None) -> Family:
    """Returns the family that a model is written as: the one it came from, else the first that can say all of it.

    Args:
        settings: From `settings_of`.
        model_type: That of the folder that the model came from, or None.

    Raises:
        ConfigError: No family can say it; names the nearest of its kind, and what that one cannot.
    """
    if settings.get("kind") not in _PUBLISHED_KINDS:
        raise ConfigError(
            f"model.kind={settings.get('kind')} is of no published family, so it cannot be written as one"
        )
    if settings.get("vocab_size", 0) is None:
        raise ConfigError(
            "model.vocab_size is null, which leaves it to data; write the number of rows of the embedding"
        )
    if model_type is not None and model_type in FAMILIES:
        problem = unsaid(FAMILIES[model_type], settings)
        if problem is not None:
            raise ConfigError(f"the family {model_type}, which the model came from, cannot say {problem}")
        return FAMILIES[model_type]
    for family in FAMILIES.values():
        if unsaid(family, settings) is None:
            return family
    # A part of a family of larger models has no sizes of its own; its text part is a family, too.
    alike = [one for one in FAMILIES.values() if one.sizes and _kind_of(one) == settings["kind"]]
    nearest = min(alike, key=lambda one: _num_differing(one, settings))
    raise ConfigError(
        f"no published family has this model: the nearest is {nearest.name}, which cannot say "
        f"{unsaid(nearest, settings)}"
    )
