"""What surrounds the trace of a model: layout, matmul precision, the format of linear layers."""

import contextlib
from collections.abc import Iterator

import jax

from jaxtrain.layout.sharding import Layout, use_layout
from jaxtrain.ops.linear import use_linear_format
from jaxtrain.precision.policy import Policy


@contextlib.contextmanager
def model_context(layout: Layout, policy: Policy, *, required_of: str | None = None) -> Iterator[None]:
    """Gives layout and number formats to whatever is traced inside.

    Args:
        layout: of the model.
        policy: its number formats.
        required_of: name of the model, where it is an error that none of its layers uses the policy's linear format.

    Raises:
        ConfigError: no layer used the linear format, and `required_of` is given.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_layout(layout))
        if policy.matmul_precision is not None:
            stack.enter_context(jax.default_matmul_precision(policy.matmul_precision))
        stack.enter_context(use_linear_format(policy.linear_format, required_of=required_of))
        yield
