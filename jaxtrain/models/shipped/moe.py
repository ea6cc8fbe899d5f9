"""A mixture of experts in place of a transformer block's MLP (Mixtral, Jiang et al. 2024).

Shapes: B batch, L sequence, D embed, F hidden width of an expert, E experts, K experts a token.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.models import TransformerConfig
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.initializers import Initializer, normal
from jaxtrain.models.shipped.shapes import mlp_shapes, router_shape
from jaxtrain.ops.experts.compute import Kernels, route, router_loss
from jaxtrain.ops.experts.exchange import expert_load, experts_mlp

_INIT_STDDEV = 0.02  # as the transformer's other kernels


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """What routers leave behind, summed over layers.

    Attributes:
        loss_BL: auxiliary loss of each token, float32.
        busiest: share of the routed slots that the busiest expert got, times the experts: 1 is even; float32 [].
        unused: share of the experts that got nothing, float32 [].
    """

    loss_BL: jax.Array
    busiest: jax.Array
    unused: jax.Array

    @staticmethod
    def none(tokens_BL: jax.Array) -> "Routing":
        """Before the first layer."""
        zeros_BL = constrain(jnp.zeros(tokens_BL.shape, jnp.float32), "batch", "sequence")
        return Routing(zeros_BL, jnp.float32(0), jnp.float32(0))

    @staticmethod
    def of(loss_BL: jax.Array, load_E: jax.Array) -> "Routing":
        """Of one layer."""
        return Routing(loss_BL, jnp.max(load_E) * load_E.size, jnp.mean((load_E == 0).astype(jnp.float32)))

    def plus(self, other: "Routing") -> "Routing":
        """The sum."""
        return jax.tree.map(jnp.add, self, other)

    def outputs(self, num_layers: int, *, train: bool) -> dict[str, jax.Array]:
        """What a model gives its task beside the logits: `router_loss` [B, L] in training, and means over layers."""
        means = {"expert_busiest": self.busiest / num_layers, "experts_unused": self.unused / num_layers}
        return {"router_loss": self.loss_BL, **means} if train else means


class Kernel(nnx.Module):
    """One array of weights."""

    def __init__(self, shape: tuple[int, ...], *, initializer: Initializer, rngs: nnx.Rngs):
        self.kernel = nnx.Param(initializer(rngs.params(), shape, jnp.float32))


class MoE(nnx.Module):
    """Experts that are MLPs, of which a router chooses some for each token."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        assert config.experts is not None
        self.config = config.experts
        experts, shapes = config.experts.num_experts, mlp_shapes(config)
        init = normal(_INIT_STDDEV)
        init_out = normal(_INIT_STDDEV / math.sqrt(2 * config.num_layers))

        def make(name: str, initializer: Initializer) -> Kernel:
            return Kernel((experts, *shapes[name].kernel), initializer=initializer, rngs=rngs)

        self.router = Kernel(router_shape(config).kernel, initializer=init, rngs=rngs)
        self.up = make("up", init)
        self.gate = make("gate", init) if "gate" in shapes else None
        self.down = make("down", init_out)

    def __call__(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The output, the auxiliary loss of each token, and the load of each expert.

        Returns:
            y [B, L, D] in the dtype of x; the router's loss, float32 [B, L], to be averaged as the task averages
            losses of tokens; the share of routed slots of each expert over the whole batch, float32 [E], no gradient.
        """
        config = self.config
        with jax.named_scope("router"):
            # In float32 whatever the backend's default precision: a rounded logit sends a token elsewhere.
            kernel_DE = self.router.kernel[...].astype(jnp.float32)
            x32_BLD = x_BLD.astype(jnp.float32)
            logits_BLE = jnp.einsum("BLD,DE->BLE", x32_BLD, kernel_DE, precision=jax.lax.Precision.HIGHEST)
            logits_BLE = constrain(logits_BLE, "batch", "sequence", None)
            weights_BLK, ids_BLK = route(logits_BLE, config.experts_per_token)
            load_E = expert_load(ids_BLK, config.num_experts)
            loss_BL = router_loss(
                logits_BLE,
                load_E,
                load_balance_weight=config.load_balance_weight,
                router_z_weight=config.router_z_weight,
            )
        gate_EDF = None if self.gate is None else self.gate.kernel[...]
        kernels = Kernels(self.up.kernel[...], gate_EDF, self.down.kernel[...])
        y_BLD = experts_mlp(x_BLD, weights_BLK, ids_BLK, kernels)
        return checkpoint_name(y_BLD, "mlp_output"), loss_BL, load_E
