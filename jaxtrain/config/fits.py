"""A model of ours and published ones: the family that can say it, and what of a published one it does not take."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jaxtrain.config.base import Group
from jaxtrain.config.model import HeadConfig, published_from
from jaxtrain.config.published import parse_settings, published_family, published_settings, settings_in, settings_of
from jaxtrain.errors import ConfigError
from jaxtrain.families.family import Family
from jaxtrain.families.table import FAMILIES, family_of, read_settings
from jaxtrain.formats.rows import Entry, Shape

# What a published config does not say, or what changes how outputs are computed but not what they are.
_NOT_COMPARED = ("size", "from", "attention", "dropout")
_OF_TRAINING = ("load_balance_weight", "router_z_weight", "score_bias_step")  # of experts


def _unsaid(family: Family, settings: Mapping[str, Any]) -> list[str]:
    """The keys of our model group (`settings_of`) whose values a config.json of the family cannot say."""
    kind = family.fixed.get("kind", "transformer")
    if settings.get("kind") != kind:
        return [f"model.kind={settings.get('kind')}"] * len(settings)
    try:
        written = {**family.to_published(settings), "model_type": family.name}
        again = settings_of(parse_settings(read_settings(written)))
    except (ConfigError, ValidationError) as error:  # what it can say of the model does not fit together
        said = str(error) if isinstance(error, ConfigError) else str(error.errors()[0]["msg"])
        # A family that cannot write a model at all counts as one that cannot say two of its keys.
        return [said] * 2
    ours, again = _of_outputs(settings), _of_outputs(again)
    return [f"model.{key}={value}" for key, value in ours.items() if again.get(key, key) != value]


def _of_outputs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of a model group outputs follow from; a key of experts as `experts.KEY`."""
    experts = settings.get("experts") or {}
    flat = {**settings, **{f"experts.{key}": value for key, value in experts.items() if key not in _OF_TRAINING}}
    flat["experts"] = "{}" if experts else None
    return {key: value for key, value in flat.items() if key not in _NOT_COMPARED}


def family_for(settings: Mapping[str, Any], *, model_type: str | None = None) -> Family:
    """Returns the family that a model is written as: the one it came from, else the first that can say all of it.

    Args:
        settings: From `settings_of`.
        model_type: That of the folder that the model came from, or None.

    Raises:
        ConfigError: No family can say it; names the nearest, and what that one cannot.
    """
    families = list(FAMILIES.values()) if model_type is None else [family_of(model_type)]
    nearest = min(families, key=lambda family: len(_unsaid(family, settings)))
    if problems := _unsaid(nearest, settings):
        which = "no published family fits this model; the nearest is" if model_type is None else "the model came from"
        raise ConfigError(f"{which} {nearest.name}, which cannot express {problems[0]}")
    return nearest


# Kind of model whose last layer follows from `num_classes` -> patterns of that layer's parameters.
_CLASSIFIERS = {"vit": ["head/*"], "resnet": ["head_kernel", "head_bias"]}
_POOLED = {"sequence", "regression", "embedding"}


def fresh_parts(model: Group) -> list[str]:
    """Returns patterns of paths that a published model does not give, because the config asks for another head."""
    path = published_from(model)
    if path is None:
        return []
    settings = published_settings(path)
    if settings["kind"] in _CLASSIFIERS:
        classes = settings["num_classes"]
        same = classes is not None and classes == getattr(model, "num_classes", None)
        return [] if same else _CLASSIFIERS[settings["kind"]]
    published = settings.get("head")
    theirs = _head_shape(None if published is None else HeadConfig(**published))
    ours = _head_shape(getattr(model, "head", None))
    if ours == theirs:
        return []
    # A layer over the pooled token has the same place in every head that has it.
    layer = [[one.get(key) for key in ("hidden", "hidden_norm", "bias")] for one in (ours, theirs)]
    if _POOLED.issuperset((ours["kind"], theirs["kind"])) and "hidden" in ours and layer[0] == layer[1]:
        return ["head/output/*"]
    layers = [one["kind"] != "language_model" for one in (ours, theirs)]
    untied = not layers[1] and settings.get("tie_embeddings") is False
    return [*(["head/*"] if any(layers) else []), *(["output"] if untied and layers[0] else [])]


def _head_shape(head: HeadConfig | None) -> dict[str, Any]:
    """What decides the shapes of a head."""
    found = {} if head is None else head.model_dump()
    kept = ("kind", "num_labels", "hidden", "hidden_norm", "bias")
    return {"kind": "language_model", **{key: found[key] for key in kept if found.get(key) is not None}}


def fresh_notes(model: Group) -> list[str]:
    """Returns a line about what is drawn although the model starts from a published one."""
    patterns = ", ".join(fresh_parts(model))
    return [f"{patterns} newly initialized: {published_from(model)} has another head"] if patterns else []


def check_fits(model: Group) -> None:
    """Raises a ConfigError where a key asks for other arrays than the published model has.

    Another head is no mistake: `fresh_parts` says what of it is drawn.
    """
    path = published_from(model)
    if path is None:
        return
    family, theirs = published_family(path), settings_in(path, published_settings(path))
    ours = settings_of(model, vocab_size=theirs.get("vocab_size"))
    # A head may be another one, whose labels only the data may know.
    ours |= {key: theirs[key] for key in ("head", "num_classes") if key in theirs}
    # An output layer that a file holds beside what ties it may be asked for.
    theirs |= {"tie_embeddings": False} if ours.get("tie_embeddings") is False else {}
    for key in theirs:
        # Rows that the vocabulary lacks are added when it is read.
        if key == "size" or ours.get(key) == theirs[key] or (key == "vocab_size" and ours[key] > theirs[key]):
            continue
        if _arrays(family, {**theirs, key: ours[key]}) != _arrays(family, theirs):
            raise ConfigError(
                f"model.{key}={ours[key]} does not fit the weights of {path}, where it is {theirs[key]}; leave "
                f"model.{key} out, or leave out model.from to initialize all weights"
            )


def _arrays(family: Family, settings: Mapping[str, Any]) -> dict[str, Shape]:
    return {row.path: row.shape for row in family.tensors(settings) if isinstance(row, Entry)}
