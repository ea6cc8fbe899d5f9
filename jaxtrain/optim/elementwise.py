"""Transformations that declare that they treat every number on its own, so that their update may run slice by slice."""

import optax


class ElementwiseTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation with the promise of `elementwise`."""

    __slots__ = ()


def elementwise(transformation: optax.GradientTransformation) -> ElementwiseTransformation:
    """Declare that every number of an update depends on the same number of gradient, state and parameter only.

    Numbers without a dimension (a count, a learning rate, the loss) may be read besides. Norms, means, sums over rows,
    matrix products and random numbers drawn for an array break the promise. With `offload_optimizer` of
    `make_train_step` a declared transformation is updated slice by slice; of any other one, whole arrays pass by the
    device.

    Args:
        transformation: its state holds scalars, and arrays that have a parameter's path and shape.

    Returns:
        The same transformation, declared.

    Example:
        >>> optimizer = jaxtrain.elementwise(optax.adamw(1e-3))
    """
    accepts_more = optax.with_extra_args_support(transformation)
    return ElementwiseTransformation(accepts_more.init, accepts_more.update)
