"""Which parameters of a model are drawn although it starts from a published one: those of another head. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.base import Group
from jaxtrain.config.model import HeadConfig, published_from
from jaxtrain.config.published import published_family, published_settings
from jaxtrain.errors import ConfigError
from jaxtrain.interop.settings import settings_in, settings_of
from jaxtrain.published.entries import Entry
from jaxtrain.published.family import Family
from jaxtrain.published.transforms import Shape

# Kind of model whose last layer follows from `num_classes` -> patterns of that layer's parameters.
_CLASSIFIERS = {"vit": ["head/*"], "resnet": ["head_kernel", "head_bias"]}


def fresh_parts(model: Group) -> list[str]:
    """Returns patterns of paths that a published model does not give, because the config asks for another head.

    Args:
        model: The model group of a config.
    """
    path = published_from(model)
    if path is None:
        return []
    settings = published_settings(path)
    if settings["kind"] in _CLASSIFIERS:
        classes = settings["num_classes"]
        same = classes is not None and classes == getattr(model, "num_classes", None)
        return [] if same else _CLASSIFIERS[settings["kind"]]
    published = settings.get("head")
    theirs = _plain(None if published is None else HeadConfig(**published))
    ours = _plain(getattr(model, "head", None))
    if ours == theirs:
        return []
    # A layer over the pooled token has the same place in every head that has it.
    if (
        _POOLED.issuperset((ours["kind"], theirs["kind"]))
        and "hidden" in ours
        and ours["hidden"] == theirs.get("hidden")
    ):
        return ["head/output/*"]
    layers = [one["kind"] != "language_model" for one in (ours, theirs)]
    untied = not layers[1] and settings.get("tie_embeddings") is False
    return [*(["head/*"] if any(layers) else []), *(["output"] if untied and layers[0] else [])]


# Keys that change what every block computes of the same arrays: weights were trained for one value of each.
_TRAINED_FOR = (
    "norm", "norm_offset", "block", "activation", "position", "position_offset", "rotary_fraction", "embedding_scale",
    "attention_scale", "logits_scale", "relative_max_distance",
)  # fmt: skip
# Two forms of one function, 5e-4 apart.
_ALIKE = {"gelu", "gelu_exact"}


def check_same_function(path: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises where a key makes another function of the weights of a published model than they were trained for.

    Args:
        path: The published model.
        ours, theirs: Every key of our model group: of the config, and of the published model.

    Raises:
        ConfigError: Names the key, its value, and that of the published model.
    """
    for key in _TRAINED_FOR:
        if (
            key in theirs
            and key in ours
            and ours[key] != theirs[key]
            and not _ALIKE.issuperset((ours[key], theirs[key]))
        ):
            raise ConfigError(
                f"model.{key}={ours[key]} makes another function of the weights of {path}, which were trained with "
                f"{theirs[key]}; leave model.{key} out, or leave out model.from to draw every weight"
            )


def check_fits(model: Group) -> None:
    """Raises where a key asks for other arrays than the published model has, or for another function of them.

    Another head is no mistake: `fresh_parts` says what of it is drawn.

    Args:
        model: The model group of a config.

    Raises:
        ConfigError: Names the key, its value, and that of the published model.
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
    check_same_function(path, ours, theirs)
    changed = [key for key in theirs if key != "size" and ours.get(key) != theirs[key]]
    for key in changed:
        if _arrays(family, {**theirs, key: ours[key]}) != _arrays(family, theirs):
            raise ConfigError(
                f"model.{key}={ours[key]} asks for other arrays than {path} holds, where it is {theirs[key]}; leave "
                f"model.{key} out, or leave out model.from to draw every weight"
            )


def _arrays(family: Family, settings: Mapping[str, Any]) -> dict[str, Shape]:
    return {row.path: row.shape for row in family.tensors(settings) if isinstance(row, Entry)}


_POOLED = {"sequence", "regression", "embedding"}


def fresh_notes(model: Group) -> list[str]:
    """Returns a line for people about what is drawn although the model starts from a published one.

    Args:
        model: The model group of a config.
    """
    patterns = fresh_parts(model)
    if not patterns:
        return []
    return [
        f"{', '.join(patterns)} drawn anew: {published_from(model)} has another head, which is not read; the other "
        "parameters are read from it"
    ]


def _plain(head: HeadConfig | None) -> dict[str, Any]:
    """What decides the shapes of a head."""
    found = {} if head is None else head.model_dump()
    kept = ("kind", "num_labels", "hidden", "bias")
    return {"kind": "language_model", **{key: found[key] for key in kept if found.get(key) is not None}}
