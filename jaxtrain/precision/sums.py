"""Sums between devices in float16, which are wrong on the CPUs of a cluster."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxtrain.errors import ConfigError
from jaxtrain.precision.policy import Policy

# Along these the forward pass gathers, and adds nothing up but losses, which are float32.
_ADDED_BACKWARD_ALONE = ("data", "fsdp")


def check_sums(policy: Policy, mesh: Mesh, *, backward: bool) -> None:
    """Raise where Gloo would add up float16, as it does between the CPU devices of processes that joined a cluster.

    Gloo drops one of the two numbers about once in 10,000 sums of float16 (54,944 - 100 is -100), with no error.
    Sums in bfloat16, which XLA makes in float32, are right, and so are those of a process that joined no cluster.

    Args:
        policy: its compute dtype is that of gradients and of activations that are summed.
        mesh: of a program.
        backward: whether it computes gradients.

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
            f"precision policy {policy.name} computes in float16, of which Gloo loses numbers where it adds them up "
            "between CPU devices; use bf16 or fp32, or a process that joins no cluster (--emulate N for N devices)"
        )
