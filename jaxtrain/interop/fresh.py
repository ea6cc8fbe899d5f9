"""Which parameters of a model are drawn although it starts from a published one: those of another head. No jax here."""

from typing import Any

from jaxtrain.config.base import Group
from jaxtrain.config.heads import HeadConfig
from jaxtrain.config.published import published_from, published_settings

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
