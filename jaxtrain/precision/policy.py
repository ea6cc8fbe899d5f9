"""Precision policies (the formats that parameters are stored in and computed in), and dynamic loss scaling for fp16."""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxtrain.errors import ConfigError
from jaxtrain.precision.dtypes import POLICY_DTYPES
from jaxtrain.precision.kernels import is_quantized

Tree = TypeVar("Tree")
# Along these the forward pass gathers, and adds nothing up but losses, which are float32.
_ADDED_BACKWARD_ALONE = ("data", "fsdp")


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
        linear_format: "fp8": the linear layers of blocks multiply in it (`ops/linear.py`); None: the compute dtype.

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


def _policy(name: str, matmul_precision: str | None = None, **rest: Any) -> Policy:
    dtypes = POLICY_DTYPES[name]
    return Policy(name, jnp.dtype(dtypes.params).type, jnp.dtype(dtypes.compute).type, matmul_precision, **rest)


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
    """Returns the policy of a name such as "bf16"; a policy is returned as it is, an unknown name a `ConfigError`.

    Example:
        >>> jt.get_policy("bf16").compute_dtype.__name__
        'bfloat16'
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ConfigError(f"unknown precision policy {policy!r}; known: {', '.join(POLICIES)}")
    return POLICIES[policy]


# Names of shipped models' parameters that stay float32. Rounding the bias by which experts are chosen sends tokens
# elsewhere (of biases near 5, in bf16, every fourth), and that of CLIP's logarithm changes the scale by up to 1.6 %.
KEPT = ("score_bias", "logit_scale")


def cast_floats(tree: Tree, dtype: DTypeLike) -> Tree:
    """Casts the floating-point arrays of a tree, but for those that `cast_at` keeps."""
    return jax.tree_util.tree_map_with_path(lambda path, x: cast_at(path, x, dtype), tree, is_leaf=is_quantized)


def cast_at(path: tuple[Any, ...], x: Any, dtype: DTypeLike) -> Any:
    """Casts an array of floats; integers, random keys, quantized kernels and the parameters of `KEPT` are not."""
    # The scales of a quantized kernel are part of its values: rounding them would change every weight.
    kept = is_quantized(x) or (path and getattr(path[-1], "key", None) in KEPT)
    return x if kept or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)


@dataclass(frozen=True)
class LossScaling:
    """The rule of a dynamic loss scale: doubled after `growth_interval` finite steps, halved at each non-finite one.

    Source: Micikevicius et al. 2017, section 3.2.

    Attributes:
        initial: Scale at step 0.
        growth_interval: Finite steps in a row after which the scale doubles.
        minimum, maximum: What the scale never falls below, and never grows above.

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
        # Half of an infinite scale is infinite: no step would ever be finite, and none would count as a bad sign.
        if not 0 < self.minimum <= self.initial <= self.maximum < math.inf or self.growth_interval < 1:
            raise ConfigError(
                f"the loss scale starts at initial={self.initial:g}, with minimum={self.minimum:g}, "
                f"maximum={self.maximum:g} and growth_interval={self.growth_interval}; "
                "use 0 < minimum <= initial <= maximum, all finite, and growth_interval of 1 or more"
            )


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
        """Returns the state after a step."""
        finite_steps = jnp.where(finite, self.finite_steps + 1, 0)
        grow = finite_steps >= scaling.growth_interval
        grown = jnp.minimum(self.scale * 2, scaling.maximum)
        shrunk = jnp.maximum(self.scale / 2, scaling.minimum)
        scale = jnp.where(finite, jnp.where(grow, grown, self.scale), shrunk)
        return LossScale(scale, jnp.where(grow, 0, finite_steps))


def check_sums(policy: Policy, mesh: Mesh, *, backward: bool) -> None:
    """Raise where Gloo would add up float16, as it does between the CPU devices of processes that joined a cluster.

    Gloo drops one of the two numbers about once in 10,000 sums of float16 (54,944 - 100 is -100), with no error. Sums
    in bfloat16, which XLA makes in float32, are right, and so are those of a process that joined no cluster.

    Raises:
        ConfigError: the policy computes in float16, and the program adds such numbers up through Gloo.
    """
    devices = mesh.devices.flat
    if jnp.dtype(policy.compute_dtype) != jnp.float16 or devices[0].platform != "cpu":
        return
    if mesh.size == 1 or not jax.distributed.is_initialized():
        return
    if backward or any(size > 1 for axis, size in mesh.shape.items() if axis not in _ADDED_BACKWARD_ALONE):
        raise ConfigError(
            f"precision policy {policy.name} computes in float16, which Gloo does not add up correctly "
            "between CPU processes; use bf16 or fp32, or a single process (--emulate N for N devices)"
        )
