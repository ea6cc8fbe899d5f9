"""Which parameters of a model are drawn although it starts from a published one: those of another head. No jax here."""

from jaxtrain.config.base import Group
from jaxtrain.config.published import published_from, published_settings


def fresh_parts(model: Group) -> list[str]:
    """Returns patterns of paths that a published model does not give, because the config asks for another head.

    Args:
        model: The model group of a config.
    """
    path = published_from(model)
    head = getattr(model, "head", None)
    if path is None:
        return []
    settings = published_settings(path)
    own = {} if head is None else head.model_dump()
    if _plain(own) == _plain(settings.get("head")):
        return []
    theirs, ours = _has_layers(settings.get("head")), _has_layers(own)
    untied = not theirs and settings.get("tie_embeddings") is False
    return [*(["head/*"] if theirs or ours else []), *(["output"] if untied and ours else [])]


def _plain(head: object) -> dict[str, object]:
    """What decides the shapes of a head."""
    found = head if isinstance(head, dict) else {}
    kept = ("kind", "num_labels", "hidden", "bias")
    return {"kind": "language_model", **{key: found[key] for key in kept if found.get(key) is not None}}


def _has_layers(head: object) -> bool:
    return _plain(head)["kind"] not in ("language_model",)
