"""Precision policies (the formats that parameters are stored in and computed in), and dynamic loss scaling for fp16."""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain.config.arguments import check_whole, refusal
from jaxtrain.errors import ConfigError
from jaxtrain.precision.dtypes import POLICY_DTYPES
from jaxtrain.precision.kernels import is_quantized

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Policy:
    """The dtypes of a run; softmax, norms, losses and sums over microbatches are always float32.

    Between devices gradients are added in the compute dtype, but for sums over `data` with microbatches.

    Attributes:
        name: fp32, tf32, bf16, bf16_pure, fp16 or fp8.
        param_dtype: Dtype of the parameters; the optimizer computes in float32 under every policy.
        compute_dtype: Dtype that parameters and inputs are cast to for the forward and backward pass.
        matmul_precision: `jax.default_matmul_precision` of the step; None: the default of the backend.
        loss_scaled: Whether gradients need a dynamic loss scale.
        linear_format: Format in which the linear layers of blocks multiply (`ops/linear.py`); None: the compute dtype.

    Example:
        >>> mixed = jt.Policy("mine", jnp.float32, jnp.bfloat16, None)
        >>> step = jt.make_train_step(model, jt.classification(), optax.adamw(1e-3), policy=mixed)
    """

    name: str
    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    matmul_precision: str | None
    loss_scaled: bool = False
    linear_format: str | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("param_dtype", self.param_dtype), ("compute_dtype", self.compute_dtype)):
            if not _is_floating(dtype):
                raise ConfigError(refusal(f"Policy: {name}", "a floating-point dtype", dtype, f"{name}=jnp.bfloat16"))
            most = 64 if jax.config.jax_enable_x64 else 32  # pyright: ignore[reportAttributeAccessIssue]
            if not 16 <= jnp.finfo(dtype).bits <= most:
                takes = f"a dtype of 16 to {most} bits"
                raise ConfigError(refusal(f"Policy: {name}", takes, jnp.dtype(dtype).name, f"{name}=jnp.bfloat16"))
        if self.linear_format not in (None, "fp8"):
            takes = "fp8, or None for the compute dtype"
            raise ConfigError(refusal("Policy: linear_format", takes, self.linear_format, "linear_format='fp8'"))
        if self.linear_format == "fp8" and jnp.dtype(self.compute_dtype) == jnp.float16:
            # Its products are sums of numbers of up to 448 x 57344, scaled afterwards.
            raise ConfigError(
                "Policy: linear_format='fp8' takes compute_dtype bfloat16 or float32, not float16, in which products "
                "of 8-bit numbers overflow; write compute_dtype=jnp.bfloat16"
            )
        try:
            with jax.default_matmul_precision(self.matmul_precision):  # pyright: ignore[reportArgumentType] None too
                pass
        except ValueError:
            takes = "highest, high, default, tensorfloat32, bfloat16, float32 or None"
            raise ConfigError(
                refusal("Policy: matmul_precision", takes, self.matmul_precision, "matmul_precision=None")
            ) from None


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def _policy(
    name: str,
    matmul_precision: str | None = None,
    *,
    loss_scaled: bool = False,
    linear_format: str | None = None,
) -> Policy:
    dtypes = POLICY_DTYPES[name]
    params, compute = _DTYPES[dtypes.params], _DTYPES[dtypes.compute]
    return Policy(name, params, compute, matmul_precision, loss_scaled, linear_format)


POLICIES = {
    policy.name: policy
    for policy in (
        # By default GPUs multiply float32 matrices in tf32, and TPUs in one pass of bf16.
        _policy("fp32", "highest"),
        _policy("tf32", "tensorfloat32"),
        _policy("bf16"),
        _policy("bf16_pure"),
        _policy("fp16", loss_scaled=True),
        # Every tensor has a scale of its own, so gradients need no loss scale.
        _policy("fp8", linear_format="fp8"),
    )
}


def get_policy(policy: str | Policy) -> Policy:
    """Returns the policy of a name.

    Args:
        policy: A name such as "bf16", or a policy, which is returned as it is.

    Raises:
        ConfigError: There is no policy of this name.

    Example:
        >>> jt.get_policy("bf16").compute_dtype.__name__
        'bfloat16'
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ConfigError(f"unknown precision policy {policy!r}; known: {', '.join(POLICIES)}")
    return POLICIES[policy]


def cast_floats(tree: Tree, dtype: DTypeLike) -> Tree:
    """Casts the floating-point arrays of a tree.

    Args:
        tree: Any pytree of arrays.
        dtype: The dtype to cast to.

    Returns:
        A tree of the same structure and sharding; integers, random keys and quantized kernels are not changed.
    """

    def cast(x: Any) -> Any:
        # The scales of a quantized kernel are part of its values: rounding them would change every weight.
        return x if is_quantized(x) or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)

    return jax.tree.map(cast, tree, is_leaf=is_quantized)


@dataclass(frozen=True)
class LossScaling:
    """The rule of a dynamic loss scale: doubled after `growth_interval` finite steps, halved at each non-finite one.

    Source: Micikevicius et al. 2017, section 3.2.

    Attributes:
        initial: Scale at step 0.
        growth_interval: Finite steps in a row after which the scale doubles.
        minimum: The scale never falls below this.
        maximum: The scale never grows above this.

    Raises:
        ConfigError: A number is of another type, `initial` is not between `minimum` and `maximum`, or
            `growth_interval` is below 1.

    Example:
        >>> scaling = jt.LossScaling(initial=1024, growth_interval=500)
        >>> step = jt.make_train_step(
        ...     model, jt.classification(), optax.adamw(1e-3), policy="fp16", loss_scaling=scaling
        ... )
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        for name, value in (("initial", self.initial), ("minimum", self.minimum), ("maximum", self.maximum)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(refusal(f"LossScaling: {name}", "a number", value, "LossScaling(initial=32768)"))
        write = "growth_interval=2000"
        check_whole(self.growth_interval, what="LossScaling: growth_interval", least=None, write=write)
        # Half of an infinite scale is infinite: no step would ever be finite, and none would count as a bad sign.
        if not 0 < self.minimum <= self.initial <= self.maximum < math.inf:
            raise ConfigError(
                f"the loss scale starts at initial={self.initial:g}, outside minimum={self.minimum:g} to "
                f"maximum={self.maximum:g}; use 0 < minimum <= initial <= maximum, all finite"
            )
        if self.growth_interval < 1:
            raise ConfigError(f"growth_interval={self.growth_interval} of the loss scale is below 1; use 1 or more")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The state of a dynamic loss scale.

    Attributes:
        scale: float32 []; the loss is multiplied by it.
        finite_steps: int32 []; finite steps since the scale last changed.
    """

    scale: jax.Array
    finite_steps: jax.Array

    @staticmethod
    def create(scaling: LossScaling) -> "LossScale":
        """Returns the state at step 0."""
        return LossScale(jnp.float32(scaling.initial), jnp.int32(0))

    def move(self, finite: jax.Array, scaling: LossScaling) -> "LossScale":
        """Returns the state after a step.

        Args:
            finite: bool []; whether all gradients of the step were finite.
            scaling: The rule.
        """
        finite_steps = jnp.where(finite, self.finite_steps + 1, 0)
        grow = finite_steps >= scaling.growth_interval
        grown = jnp.minimum(self.scale * 2, scaling.maximum)
        shrunk = jnp.maximum(self.scale / 2, scaling.minimum)
        scale = jnp.where(finite, jnp.where(grow, grown, self.scale), shrunk)
        return LossScale(scale, jnp.where(grow, 0, finite_steps))
