"""What stands on top of the blocks in place of an output layer over the vocabulary.

Shapes: B batch, L length, D model width, C labels.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.model import HeadConfig, TransformerConfig
from jaxtrain.layout.keys import row_keys
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.initializers import INIT_STDDEV, normal
from jaxtrain.models.layers import ACTIVATIONS, Linear, Norm
from jaxtrain.models.shipped.shapes import head_norm_name, head_shapes, size_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadInputs:
    """What travels beside the residual stream to a head, which sees neither inputs nor a key in a pipeline: floats."""

    # weight of each token in the mean that stands for its text, float32; None: the first token does.
    pooling_BL: jax.Array | None = None
    seed_B2: jax.Array | None = None  # two 16-bit integers per row that dropout draws from, float32; None: no dropout


def head_inputs(
    head: HeadConfig | None, shape: tuple[int, ...], segments_BL: jax.Array | None, key: jax.Array | None
) -> HeadInputs:
    """What a head needs from the inputs of the model."""
    if head is None:
        return HeadInputs()
    pooling_BL = seed_B2 = None
    if head.is_pooled and head.pooling != "first":
        pooling_BL = constrain(_pooling_weights(head.pooling, shape, segments_BL), "batch", "sequence")
    if head.dropout and key is not None:
        draw = jax.vmap(lambda row_key: jax.random.bits(row_key, (2,), jnp.uint16))
        bits_B2 = draw(row_keys(key, shape[0]))
        seed_B2 = constrain(bits_B2.astype(jnp.float32), "batch", None)
    return HeadInputs(pooling_BL, seed_B2)


def _pooling_weights(pooling: str, shape: tuple[int, ...], segments_BL: jax.Array | None) -> jax.Array:
    """The weight of each token in the mean of its row: float32 [B, L]."""
    real_BL = jnp.ones(shape, bool) if segments_BL is None else segments_BL != 0
    if pooling == "last":
        # In a row of padding alone it is the token at 0.
        last_B = jnp.max(jnp.where(real_BL, jnp.arange(shape[1]), 0), axis=1)
        return (jnp.arange(shape[1]) == last_B[:, None]).astype(jnp.float32)
    weights_BL = real_BL.astype(jnp.float32)
    return weights_BL / jnp.maximum(jnp.sum(weights_BL, axis=1, keepdims=True), 1.0)


def pool(x_BLD: jax.Array, pooling_BL: jax.Array | None) -> jax.Array:
    """What stands for each text [B, D]: the first token, or the mean by weights in float32."""
    if pooling_BL is None:
        pooled_BD = x_BLD[:, 0]
    else:
        # No matrix product, which some devices round to fewer bits.
        pooled_BD = jnp.sum(x_BLD.astype(jnp.float32) * pooling_BL[..., None], axis=1).astype(x_BLD.dtype)
    return constrain(pooled_BD, "batch", None)


def _dropout(x: jax.Array, rate: float, seed_B2: jax.Array | None) -> jax.Array:
    """Inverted dropout of [B, ...] with a seed per row."""
    if seed_B2 is None:
        return x

    def keep(seed_2: jax.Array) -> jax.Array:
        high, low = seed_2.astype(jnp.uint32)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), high), low)
        return jax.random.bernoulli(key, 1 - rate, x.shape[1:])

    return jnp.where(jax.vmap(keep)(seed_B2), x / (1 - rate), jnp.zeros((), x.dtype))


def _layer(config: TransformerConfig, name: str, num_labels: int | None, rngs: nnx.Rngs) -> Linear | None:
    """A linear layer of the head, where it has one of this name."""
    shape, head = head_shapes(config, num_labels).get(name), config.head
    if shape is None or head is None:
        return None
    bias = bool(head.bias) if name == "output" else head.bias is True
    init = normal(INIT_STDDEV)
    return Linear(shape.inputs, shape.outputs, bias=bias, initializer=init, rngs=rngs, low_precision=False)


def _norm(config: TransformerConfig) -> Norm | None:
    """The norm of the head, where it has one."""
    if config.head is None or head_norm_name(config) is None:
        return None
    return Norm(config.output_width, kind=config.norm, bias=config.head.bias is True, epsilon=config.norm_epsilon)


class MaskedLanguageModelHead(nnx.Module):
    """A square layer, an activation and a norm before the output layer over the vocabulary, which gets a bias."""

    def __init__(self, config: TransformerConfig, vocab_size: int, rngs: nnx.Rngs):
        head = config.head
        assert head is not None
        assert head.hidden is not None
        self.dense = _layer(config, "dense", None, rngs)
        self.norm = _norm(config)
        self.bias = nnx.Param(jnp.zeros((vocab_size,), jnp.float32)) if head.bias else None
        self.activation = ACTIVATIONS[head.hidden]

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Compute what the output layer takes: [B, L, D]."""
        assert self.dense is not None
        assert self.norm is not None
        return self.norm(self.activation(self.dense(x_BLD)))


class PooledHead(nnx.Module):
    """Labels or numbers per text or per token, or an embedding of the text."""

    def __init__(self, config: TransformerConfig, num_labels: int | None, rngs: nnx.Rngs):
        assert config.head is not None
        self.hidden, self.output = (_layer(config, name, num_labels, rngs) for name in ("hidden", "output"))
        self.hidden_norm = _norm(config)
        self.head = config.head

    def __call__(self, x_BLD: jax.Array, needs: HeadInputs) -> jax.Array:
        """From the residual stream after the last norm [B, C], of a token head [B, L, C], of an embedding [B, D]."""
        y = pool(x_BLD, needs.pooling_BL) if self.head.is_pooled else x_BLD
        if self.hidden is not None:
            assert self.head.hidden is not None
            y = ACTIVATIONS[self.head.hidden](self.hidden(y))
            y = y if self.hidden_norm is None else self.hidden_norm(y)
        y = _dropout(y, self.head.dropout, needs.seed_B2)
        if self.output is not None:
            y = self.output(y)
        if self.head.normalize:
            wide = y.astype(jnp.float32)
            # As in torch: a vector of zeros stays one.
            norm = jnp.sqrt(jnp.maximum(jnp.sum(wide * wide, axis=-1, keepdims=True), 1e-24))
            y = (wide / norm).astype(y.dtype)
        return y


def num_labels(head: HeadConfig, from_data: int | None) -> int | None:
    """The number of labels of a head, or of numbers of a regression, by the config or the data; None: it has none."""
    return size_of("head.num_labels", head.num_labels, from_data) if head.has_labels else None
