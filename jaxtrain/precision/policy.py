"""Number formats: what parameters are stored in, what matmuls run in, and dynamic loss scaling for fp16."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import ConfigError
from jaxtrain.precision.dtypes import POLICY_DTYPES
from jaxtrain.precision.quantized import QuantizedKernel


@dataclass(frozen=True)
class Policy:
    """Dtypes of a run. Softmax, norms, losses, gradient accumulation and reductions are fp32 under every policy.

    Attributes:
        name: fp32, tf32, bf16, bf16_pure, fp16 or fp8.
        param_dtype: dtype of the parameters; optimizer state is float32 under every policy.
        compute_dtype: dtype that parameters and inputs are cast to for the forward and backward pass.
        matmul_precision: `jax.default_matmul_precision` of the step; None leaves the backend's choice.
        loss_scaled: whether gradients need a dynamic loss scale.
        linear_format: what the linear layers of blocks multiply in (`ops/linear.py`); None: the compute dtype.
    """

    name: str
    param_dtype: Any
    compute_dtype: Any
    matmul_precision: str | None
    loss_scaled: bool = False
    linear_format: str | None = None


_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def _policy(name: str, matmul_precision: str | None = None, **options: Any) -> Policy:
    dtypes = POLICY_DTYPES[name]
    return Policy(name, _DTYPES[dtypes.params], _DTYPES[dtypes.compute], matmul_precision, **options)


POLICIES = {
    policy.name: policy
    for policy in (
        # GPUs would use tf32 and TPUs bf16 passes for an fp32 matmul unless another precision is asked for.
        _policy("fp32", "highest"),
        _policy("tf32", "tensorfloat32"),
        _policy("bf16"),
        _policy("bf16_pure"),
        _policy("fp16", loss_scaled=True),
        # Every tensor has a scale of its own, so that gradients need none besides.
        _policy("fp8", linear_format="fp8"),
    )
}


def get_policy(policy: str | Policy) -> Policy:
    """A policy by name.

    Raises:
        ConfigError: unknown name.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ConfigError(f"unknown precision policy {policy!r}; known: {', '.join(POLICIES)}")
    return POLICIES[policy]


def cast_floats(tree: Any, dtype: Any) -> Any:
    """The tree with every floating leaf in `dtype`; integer leaves, keys and quantized kernels as they are."""

    def cast(x: Any) -> Any:
        # The scales of a quantized kernel are part of its numbers.
        return x if isinstance(x, QuantizedKernel) or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)

    return jax.tree.map(cast, tree, is_leaf=lambda x: isinstance(x, QuantizedKernel))


@dataclass(frozen=True)
class LossScaling:
    """How a dynamic loss scale moves: doubled after `growth_interval` finite steps, halved at each non-finite one.

    Source: Micikevicius et al. 2017, section 3.2.

    Raises:
        ConfigError: a start outside minimum and maximum, or no interval.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.initial <= self.maximum:
            raise ConfigError(
                f"the loss scale starts at initial={self.initial:g}, outside minimum={self.minimum:g} to "
                f"maximum={self.maximum:g}; use 0 < minimum <= initial <= maximum"
            )
        if self.growth_interval < 1:
            raise ConfigError(f"growth_interval={self.growth_interval} of the loss scale; use 1 or more")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """State of the loss scale: `scale` float32 [], `finite_steps` int32 [] since it last moved."""

    scale: jax.Array
    finite_steps: jax.Array

    @staticmethod
    def create(scaling: LossScaling) -> "LossScale":
        """The state at step 0."""
        return LossScale(jnp.float32(scaling.initial), jnp.int32(0))

    def move(self, finite: jax.Array, scaling: LossScaling) -> "LossScale":
        """The state after a step whose gradients were finite or not (bool [])."""
        finite_steps = jnp.where(finite, self.finite_steps + 1, 0)
        grow = finite_steps >= scaling.growth_interval
        grown = jnp.minimum(self.scale * 2, scaling.maximum)
        shrunk = jnp.maximum(self.scale / 2, scaling.minimum)
        scale = jnp.where(finite, jnp.where(grow, grown, self.scale), shrunk)
        return LossScale(scale, jnp.where(grow, 0, finite_steps))
