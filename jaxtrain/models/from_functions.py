"""A model from pure functions of the user's own."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxtrain.errors import ConfigError
from jaxtrain.models.model import Model, ModelState, Params, Parts, PartsApply


def from_functions(
    init: Callable[[jax.Array], Params],
    apply: Callable[[Params, Any], Any] | None = None,
    *,
    axes: Mapping[str, tuple[str | None, ...]] | None = None,
    name: str = "functions",
    parts: Parts | None = None,
) -> Model:
    """A model from two pure functions without state or randomness, or from an init and its parts.

    Args:
        init: key -> params, a nested dict of float32 arrays.
        apply: (params, inputs) -> outputs; left out where `parts` say it.
        axes: see `Model.axes`.
        name: for people.
        parts: the model partitioned for a pipeline.

    Raises:
        ConfigError: something that is no function, or not exactly one of `apply` and `parts`.

    Example:
        >>> init = lambda key: {"w": jax.random.normal(key, (4, 3))}
        >>> model = jt.from_functions(init, lambda params, inputs: inputs @ params["w"])
    """

    if not callable(init) or not (apply is None or callable(apply)):
        raise ConfigError(
            "from_functions takes two functions, init(key) -> params and apply(params, inputs) -> outputs, not "
            f"{type(init).__name__} and {type(apply).__name__}"
        )
    if (apply is None) == (parts is None):
        raise ConfigError(
            f"from_functions takes apply or parts, not {'neither' if apply is None else 'both'}; "
            "write from_functions(init, apply)"
        )

    def apply_model(
        params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        assert apply is not None
        return apply(params, inputs), model_state

    applied = apply_model if parts is None else PartsApply(parts)
    return Model(name, lambda key: (init(key), {}), applied, axes or {}, parts=parts)
