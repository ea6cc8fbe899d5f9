"""A mixture of experts in place of a transformer block's MLP (Mixtral, Jiang et al. 2024).

Shapes: B batch, L length, D model width, F mlp width of an expert, E experts, A (active) experts per token.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.model import TransformerConfig
from jaxtrain.layout.sharding import constrain, sum_over_shards
from jaxtrain.models.initializers import INIT_STDDEV, normal
from jaxtrain.models.shipped.shapes import mlp_shapes, router_shape
from jaxtrain.ops.experts.compute import Kernels, route, router_loss
from jaxtrain.ops.experts.exchange import expert_load, experts_mlp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Losses and loads of the routers, summed over layers; padding counts in none of them."""

    loss_BL: jax.Array  # auxiliary loss of each token, float32
    # Share of the routed slots that the busiest expert got, times the number of experts: 1 where all get equally many.
    busiest: jax.Array
    unused: jax.Array  # share of the experts that got no token
    tokens: jax.Array  # tokens that are routed over all devices, float32 []; of one layer, as all have the same

    @staticmethod
    def none(tokens_BL: jax.Array, segments_BL: jax.Array | None) -> "Routing":
        """Return zeros beside the number of tokens: the value before the first layer."""
        zeros_BL = constrain(jnp.zeros(tokens_BL.shape, jnp.float32), "batch", "sequence")
        real = tokens_BL.size if segments_BL is None else jnp.sum(segments_BL != 0)
        return Routing(zeros_BL, jnp.float32(0), jnp.float32(0), sum_over_shards(jnp.asarray(real, jnp.float32)))

    @staticmethod
    def of(loss_BL: jax.Array, load_E: jax.Array) -> "Routing":
        """The value of one layer."""
        busiest, unused = jnp.max(load_E) * load_E.size, jnp.mean((load_E == 0).astype(jnp.float32))
        return Routing(loss_BL, busiest, unused, jnp.float32(0))

    def outputs(self, num_layers: int, *, train: bool) -> dict[str, jax.Array]:
        """What the model gives its task besides the logits: means over the layers, and in training the summed loss."""
        means = {"expert_busiest": self.busiest / num_layers, "experts_unused": self.unused / num_layers}
        return {"router_loss": self.loss_BL, "router_tokens": self.tokens, **means} if train else means


class Kernel(nnx.Module):
    """A module of one parameter, `kernel`."""

    def __init__(self, shape: tuple[int, ...], *, stddev: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(normal(stddev)(rngs.params(), shape, jnp.float32))


class MoE(nnx.Module):
    """Experts that are MLPs, and a router that chooses some of them for each token."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        assert config.experts is not None
        self.config = config.experts
        experts, shapes = config.experts.num_experts, mlp_shapes(config)
        self.router = Kernel(router_shape(config).kernel, stddev=INIT_STDDEV, rngs=rngs)
        self.up = Kernel((experts, *shapes["up"].kernel), stddev=INIT_STDDEV, rngs=rngs)
        gated = "gate" in shapes
        self.gate = Kernel((experts, *shapes["gate"].kernel), stddev=INIT_STDDEV, rngs=rngs) if gated else None
        stddev_out = INIT_STDDEV / math.sqrt(2 * config.num_layers)
        self.down = Kernel((experts, *shapes["down"].kernel), stddev=stddev_out, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, real_BL: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Route each token to its experts and add their outputs, weighted by the router; `real_BL`: no padding.

        Also gives the router's loss of each token, float32 [B, L], 0 for padding, and the share of the routed slots of
        each expert over the global batch, float32 [E], without a gradient.
        """
        config = self.config
        with jax.named_scope("router"):
            # In float32 whatever the backend's default precision: rounding a logit can send a token to another expert.
            kernel_DE = self.router.kernel[...].astype(jnp.float32)
            x32_BLD = x_BLD.astype(jnp.float32)
            logits_BLE = jnp.einsum("BLD,DE->BLE", x32_BLD, kernel_DE, precision=jax.lax.Precision.HIGHEST)
            logits_BLE = constrain(logits_BLE, "batch", "sequence", None)
            weights_BLA, ids_BLA = route(logits_BLE, config.experts_per_token)
            load_E = expert_load(ids_BLA, config.num_experts, real_BL)
            loss_BL = router_loss(
                logits_BLE,
                load_E,
                load_balance_weight=config.load_balance_weight,
                router_z_weight=config.router_z_weight,
            )
            loss_BL = loss_BL if real_BL is None else jnp.where(real_BL, loss_BL, 0.0)
        gate_EDF = None if self.gate is None else self.gate.kernel[...]
        kernels = Kernels(self.up.kernel[...], gate_EDF, self.down.kernel[...])
        y_BLD = experts_mlp(x_BLD, weights_BLA, ids_BLA, kernels)
        return checkpoint_name(y_BLD, "mlp_output"), loss_BL, load_E
