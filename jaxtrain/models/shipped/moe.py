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
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.initializers import INIT_STDDEV, normal
from jaxtrain.models.layers import scaled
from jaxtrain.models.shipped.shapes import mlp_shapes, router_shape
from jaxtrain.ops.elementwise import aligned
from jaxtrain.ops.experts.compute import Kernels, RouteRule, level_load, route, router_loss
from jaxtrain.ops.experts.exchange import expert_load, experts_mlp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Losses and loads of the routers, summed over layers; padding counts in none of them."""

    loss_BL: jax.Array  # auxiliary loss of each token, float32
    # Share of the routed slots that the busiest expert got, times the number of experts: 1 where all get equally many.
    busiest: jax.Array
    unused: jax.Array  # share of the experts that got no token

    @staticmethod
    def none(tokens_BL: jax.Array) -> "Routing":
        """Return zeros: the value before the first layer."""
        zeros_BL = constrain(jnp.zeros(tokens_BL.shape, jnp.float32), "batch", "sequence")
        return Routing(zeros_BL, jnp.float32(0), jnp.float32(0))

    @staticmethod
    def of(loss_BL: jax.Array, load_E: jax.Array) -> "Routing":
        """The value of one layer."""
        busiest, unused = jnp.max(load_E) * load_E.size, jnp.mean((load_E == 0).astype(jnp.float32))
        return Routing(loss_BL, busiest, unused)

    def outputs(self, num_layers: int, *, train: bool) -> dict[str, jax.Array]:
        """What the model gives its task besides the logits: means over the layers, and in training the summed loss."""
        means = {"expert_busiest": self.busiest / num_layers, "experts_unused": self.unused / num_layers}
        return {"router_loss": self.loss_BL, **means} if train else means


class Kernel(nnx.Module):
    """A module of the parameter `kernel`, and of `bias` where it has a shape."""

    def __init__(self, shape: tuple[int, ...], bias: tuple[int, ...] | None, *, stddev: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(normal(stddev)(rngs.params(), shape, jnp.float32))
        self.bias = None if bias is None else nnx.Param(jnp.zeros(bias, jnp.float32))


class MoE(nnx.Module):
    """Experts that are MLPs, and a router that chooses some of them for each token."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        assert config.experts is not None
        self.config, self.activation = config.experts, config.activation
        experts, shapes, router = config.experts.num_experts, mlp_shapes(config), router_shape(config)
        has_bias = config.has_bias("up")
        bias = router.outputs if has_bias else None
        self.router = Kernel(router.kernel, bias, stddev=INIT_STDDEV, rngs=rngs)
        said = config.experts
        self.score_bias = nnx.Param(jnp.zeros(router.outputs, jnp.float32)) if said.score_bias else None
        sigmoid, groups = said.scores == "sigmoid", (said.groups, said.groups_per_token)
        self.rule = RouteRule(sigmoid, said.normalizes, said.weights_scale, *groups)

        def kernel(name: str, stddev: float = INIT_STDDEV) -> Kernel:
            bias = (experts, *shapes[name].outputs) if has_bias else None
            return Kernel((experts, *shapes[name].kernel), bias, stddev=stddev, rngs=rngs)

        self.up = kernel("up")
        self.gate = kernel("gate") if "gate" in shapes else None
        self.down = kernel("down", INIT_STDDEV / math.sqrt(2 * config.depth))

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
            if self.router.bias is not None:
                logits_BLE = logits_BLE + aligned(self.router.bias[...].astype(jnp.float32), logits_BLE)
            logits_BLE = constrain(logits_BLE, "batch", "sequence", None)
            bias_E = None if self.score_bias is None else self.score_bias[...].astype(jnp.float32)
            weights_BLA, ids_BLA = route(logits_BLE, config.experts_per_token, self.rule, bias_E)
            load_E = expert_load(ids_BLA, config.num_experts, real_BL)
            loss_BL = router_loss(
                logits_BLE,
                load_E,
                load_balance_weight=config.load_balance_weight,
                router_z_weight=config.router_z_weight,
            )
            if bias_E is not None:
                loss_BL = loss_BL + level_load(bias_E, load_E)
            loss_BL = loss_BL if real_BL is None else jnp.where(real_BL, loss_BL, 0.0)
        layers = (self.up, self.gate, self.down)
        arrays = [None if one is None else one.kernel[...] for one in layers]
        biases = [None if one is None or one.bias is None else one.bias[...].astype(x_BLD.dtype) for one in layers]
        kernels = Kernels(*arrays, *biases, activation=self.activation)
        if config.weigh_inputs:  # of one expert per token
            x_BLD, weights_BLA = scaled(x_BLD, weights_BLA), jnp.ones_like(weights_BLA)
        y_BLD = experts_mlp(x_BLD, weights_BLA, ids_BLA, kernels)
        return checkpoint_name(y_BLD, "mlp_output"), loss_BL, load_E
