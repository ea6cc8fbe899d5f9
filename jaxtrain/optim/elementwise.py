"""Transformations that declare that they treat every number on its own, so that their update may run slice by slice."""

import optax

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError


class ElementwiseTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation with the promise of `elementwise`."""

    __slots__ = ()


def elementwise(transformation: optax.GradientTransformation) -> ElementwiseTransformation:
    """Declare that an update computes every element only from the same element of gradient, state and parameter.

    It may also read scalars (a count, a learning rate, the loss). It must not use norms, means, sums over rows, matrix
    products, or random numbers drawn for a whole array. With `offload_optimizer` of `make_train_step` a declared
    optimizer is updated slice by slice; for any other one whole arrays are copied to the device. Declare the outermost
    transformation: a chain of declared ones is not declared itself.

    Args:
        transformation: its state holds scalars, and arrays that have a parameter's path and shape.

    Returns:
        The same transformation, declared.

    Raises:
        ConfigError: It is no optax transformation.

    Example:
        >>> optimizer = jt.elementwise(optax.adamw(1e-3))
    """
    if not isinstance(transformation, optax.GradientTransformation):
        name = getattr(transformation, "__name__", "adamw") if callable(transformation) else "adamw"
        rate = transformation if isinstance(transformation, float) else "1e-3"
        write = f"elementwise(optax.{name}({rate}))"
        raise ConfigError(refusal("elementwise", "an optax transformation", transformation, write))
    accepts_more = optax.with_extra_args_support(transformation)
    return ElementwiseTransformation(accepts_more.init, accepts_more.update)
