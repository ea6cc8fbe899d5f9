"""The block of every shipped transformer: attention and an MLP, with settings that are independent of each other.

A decoder's cache holds the keys and values of earlier positions, for all layers in one array each. A layer writes its
own part of the whole arrays, which travel through the layers as a carry: where they are donated, a step writes a few
numbers and copies nothing.

Shapes: N layers, B batch, L length, S length of keys and values (L, or the positions of a cache), D model width, H
query heads, G key-value heads, K head_dim, F mlp width, W distances of keys and queries.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxtrain.config.model import TransformerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import constrain, current_layout
from jaxtrain.models.initializers import INIT_STDDEV, normal
from jaxtrain.models.layers import ACTIVATIONS, Linear, Norm, dropout, model_rotation, normalized, rotate, scaled
from jaxtrain.models.model import NOWHERE
from jaxtrain.models.shipped.moe import Kernel, MoE, Routing
from jaxtrain.models.shipped.shapes import (
    CONVOLVED,
    LinearShape,
    attention_norm_shapes,
    attention_shapes,
    convolution_shapes,
    mlp_shapes,
    norm_names,
)
from jaxtrain.ops.attention.context import choose_context
from jaxtrain.ops.attention.reference import (
    BLOCK,
    CachedKeys,
    Learned,
    attention_mask,
    bias_at,
    cached_attention,
    cached_attention_in_blocks,
    distance_bias,
)
from jaxtrain.ops.attention.rules import AttentionForm
from jaxtrain.ops.attention.table import self_attention
from jaxtrain.ops.elementwise import GATED
from jaxtrain.ops.state_space import (
    StateInputs,
    after_tail,
    causal_convolution,
    document_numbers,
    gated_norm,
    state_space,
)
from jaxtrain.precision.kernels import LowRankKernel, round_to_int8

# The residual stream between blocks; its sequence is also sharded over `tensor` where sequence parallelism is on.
RESIDUAL = ("batch", "residual_sequence", "activation_embed")

# `key` and `value` [N, B, G, S, K]; of int8 also `key_scale` and `value_scale`, float32 [N, B, G, S].
Cache = dict[str, jax.Array]
_CACHE_AXES = (None, "batch", "activation_kv_heads", None, None)


def init_cache(config: TransformerConfig, batch: int, length: int, dtype: DTypeLike) -> Cache:
    """A cache of zeros, sharded as the keys and values of a batch are; of int8 each position of a head has a scale."""
    if config.state_space is not None:
        return _init_states(config, batch, dtype)
    shape = (config.depth, batch, config.kv_heads, length, config.head_width)
    cache = {name: constrain(jnp.zeros(shape, dtype), *_CACHE_AXES) for name in ("key", "value")}
    if jnp.dtype(dtype) != jnp.int8:
        return cache
    return cache | {f"{name}_scale": constrain(jnp.ones(shape[:-1]), *_CACHE_AXES[:-1]) for name in cache}


def _init_states(config: TransformerConfig, batch: int, dtype: DTypeLike) -> Cache:
    """The states of all layers, float32 [N, B, H, K, state_dim], and what their convolutions saw last, of zeros."""
    assert config.state_space is not None
    if jnp.dtype(dtype) == jnp.int8:
        raise ConfigError("cache_dtype='int8' is of keys and values, but the model keeps float32 states; leave it out")
    lead, tails = (config.depth, batch), convolution_shapes(config).items()
    cache = {name: jnp.zeros((*lead, one.inputs[0] - 1, *one.outputs), dtype) for name, one in tails}
    state = jnp.zeros((*lead, config.num_heads, config.head_width, config.state_space.state_dim), jnp.float32)
    return cache | {"state": constrain(state, None, "batch", "activation_heads", None, None)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The cache of all layers, and the index int32 [] of the layer that it is in the hands of."""

    arrays: Cache
    layer: jax.Array

    @property
    def length(self) -> int:
        """Positions of the cache: S."""
        return self.arrays["key"].shape[3]

    def write(self, key_BLGK: jax.Array, value_BLGK: jax.Array, positions_BL: jax.Array) -> "LayerCache":
        """The cache with new keys and values at their positions; positions that it does not have are dropped."""
        arrays, rows_B1 = dict(self.arrays), jnp.arange(positions_BL.shape[0])[:, None]
        at = (self.layer, rows_B1, slice(None), positions_BL)
        for name, new_BLGK in (("key", key_BLGK), ("value", value_BLGK)):
            dtype = arrays[name].dtype
            if dtype == jnp.int8:
                new_BLGK, scale_BLG1 = round_to_int8(new_BLGK, (3,))
                scales = arrays[f"{name}_scale"].at[at].set(scale_BLG1[..., 0])
                arrays[f"{name}_scale"] = constrain(scales, *_CACHE_AXES[:-1])
            arrays[name] = constrain(arrays[name].at[at].set(new_BLGK.astype(dtype)), *_CACHE_AXES)
        return LayerCache(arrays, self.layer)

    def replaced(self, name: str, new: jax.Array) -> "LayerCache":
        """The cache with another array of the layer."""
        return LayerCache(self.arrays | {name: self.arrays[name].at[self.layer].set(new)}, self.layer)

    def read(self, name: str, start: jax.Array | int, size: int) -> tuple[jax.Array, jax.Array | None]:
        """Some keys or values of the layer [B, G, size, K], and the scales [B, G, size] that multiply them, if any."""

        def part(name: str) -> jax.Array:
            whole, zero = self.arrays[name], jnp.int32(0)
            begin = [self.layer, zero, zero, jnp.asarray(start, jnp.int32), zero][: whole.ndim]
            return jax.lax.dynamic_slice(whole, begin, (1, *whole.shape[1:3], size, *whole.shape[4:]))[0]

        scale = f"{name}_scale"
        return part(name), part(scale) if scale in self.arrays else None


@dataclass(frozen=True)
class Context:
    """What the layers of a block are given beside the residual stream.

    Attributes:
        positions_BL: positions of the tokens, [B or 1, L].
        segments_BL: numbers of packed documents; None: one document per row.
        local: bool [], whether this is a local layer; None: all layers are alike.
        rotated: bool [], whether this layer has rotary positions; None: all layers are alike.
        first: bool [], whether the norm of attention's input is that of the embeddings here; None: of no layer.
        bias_HW: added to the scores, of each distance.
        cache: of earlier positions, to which the new ones are added; None: the tokens are whole texts.
    """

    positions_BL: jax.Array
    segments_BL: jax.Array | None = None
    local: jax.Array | None = None
    rotated: jax.Array | None = None
    first: jax.Array | None = None
    bias_HW: jax.Array | None = None
    cache: LayerCache | None = None


@dataclass(frozen=True)
class Stddevs:
    """Standard deviations of the kernels of a stack; `up` is of the gate too."""

    query: float
    key_value: float
    attention_output: float
    up: float
    down: float
    relative: float  # of the table of relative positions


def small_stddevs(config: TransformerConfig) -> Stddevs:
    """Those of GPT-2: the deeper the model, the smaller the outputs to the residual stream start (section 2.3)."""
    out = INIT_STDDEV / math.sqrt(2 * config.depth)
    return Stddevs(INIT_STDDEV, INIT_STDDEV, out, INIT_STDDEV, out, INIT_STDDEV)


def fan_in_stddevs(config: TransformerConfig) -> Stddevs:
    """Those of T5, for embeddings of variance 1: outputs to the residual stream are as large as the embeddings.

    Smaller ones would leave the embedding of the token itself in the stream, which tied embeddings then name as the
    next token with certainty. Queries start smaller by the scale that T5 leaves out of the scores.
    """
    width, head_dim = config.embed_dim**-0.5, config.head_width
    scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return Stddevs(
        query=width * head_dim**-0.5 / scale,
        key_value=width,
        attention_output=(config.num_heads * head_dim) ** -0.5,
        up=width,
        down=config.mlp_width**-0.5,
        relative=width,
    )


def relative_table(config: TransformerConfig, rngs: nnx.Rngs, stddev: float = INIT_STDDEV) -> nnx.Param | None:
    """Draw the table [N, H] of a stack, where its positions are relative."""
    if config.position != "relative":
        return None
    shape = (config.relative_buckets, config.num_heads)
    return nnx.Param(normal(stddev)(rngs.params(), shape, jnp.float32))


def relative_bias(table: nnx.Param | None, config: TransformerConfig, reach: int) -> jax.Array | None:
    """What every block adds to its scores: float32 [H, W] for the W = 2 * reach + 1 distances, or None."""
    if table is None:
        return None
    with jax.named_scope("relative_positions"):
        bias_HW = distance_bias(table[...], reach, max_distance=config.relative_max_distance, causal=config.causal)
        return constrain(bias_HW, "activation_heads", None)


def block_norm(config: TransformerConfig, width: int | None = None) -> Norm:
    """A norm of the residual stream, or of the embeddings of another width."""
    bias, epsilon = config.norms_have_biases, config.norm_epsilon
    return Norm(width or config.embed_dim, kind=config.norm, bias=bias, epsilon=epsilon, offset=config.norm_offset)


def _inner_norm(config: TransformerConfig, name: str) -> Norm | None:
    """A norm inside attention, where the model has it."""
    shape = attention_norm_shapes(config).get(name)
    if shape is None:
        return None
    kind, over = config.norm if config.qk_norm == "per_head" else "rmsnorm", 2 if config.qk_norm == "whole" else 1
    epsilon = config.norm_epsilon if config.latent is None else config.latent.norm_epsilon
    offset = config.norm_offset
    return Norm(*shape.outputs, kind=kind, bias=False, epsilon=epsilon, offset=offset, over=over)


def _linear(config: TransformerConfig, name: str, shape: LinearShape, stddev: float, rngs: nnx.Rngs) -> Linear:
    return Linear(shape.inputs, shape.outputs, bias=config.has_bias(name), initializer=normal(stddev), rngs=rngs)


class Attention(nnx.Module):
    """Self-attention with grouped-query heads."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, stddevs: Stddevs):
        own = {"query": stddevs.query, "output": stddevs.attention_output}
        for name, shape in attention_shapes(config).items():
            setattr(self, name, _linear(config, name, shape, own.get(name, stddevs.key_value), rngs))
        self.query_norm, self.key_norm = _inner_norm(config, "query_norm"), _inner_norm(config, "key_norm")
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32)) if config.attention_sinks else None
        self.config = config

    def _sinks(self) -> jax.Array | None:
        return None if self.sinks is None else self.sinks[...]

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, LayerCache | None]:
        q_BLHK, k_BSGK, v_BSGK = self.project(x_BLD)
        q_BLHK, k_BSGK = self._positioned(q_BLHK, k_BSGK, context)
        q_BLHK = checkpoint_name(constrain(q_BLHK, "batch", "sequence", "activation_heads", None), "query")
        k_BSGK = checkpoint_name(constrain(k_BSGK, "batch", "sequence", "activation_kv_heads", None), "key")
        v_BSGK = checkpoint_name(constrain(v_BSGK, "batch", "sequence", "activation_kv_heads", None), "value")
        cache = context.cache
        if cache is None:
            y_BLHK = self._attend(q_BLHK, k_BSGK, v_BSGK, context)
        else:
            cache = cache.write(k_BSGK, v_BSGK, context.positions_BL)
            y_BLHK = self._attend_to_cache(q_BLHK, cache, context)
        y_BLHK = constrain(y_BLHK, "batch", "sequence", "activation_heads", None)
        return checkpoint_name(self.output(self.valued(y_BLHK)), "attention_projection"), cache

    def project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, of which the first `rotary_dims` are rotated."""
        return self.query(x_BLD), self.key(x_BLD), self.value(x_BLD)

    def valued(self, y_BLHK: jax.Array) -> jax.Array:
        """The result of attention without what `project` filled values up with."""
        return y_BLHK

    def _positioned(self, q_BLHK: jax.Array, k_BLGK: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """Queries and keys with their norms, their positions and the scale of the scores."""
        config, cache = self.config, context.cache
        if self.query_norm is not None and self.key_norm is not None:
            q_BLHK, k_BLGK = self.query_norm(q_BLHK), self.key_norm(k_BLGK)
        if config.position == "rotary":
            length = q_BLHK.shape[1] if cache is None else cache.length
            frequencies, factor = model_rotation(config, context.local, length=length)

            def rotated(x: jax.Array) -> jax.Array:
                interleaved = config.rotary_interleaved
                turned = rotate(x, context.positions_BL, frequencies, factor=factor, interleaved=interleaved)
                turned = normalized(turned, config.norm_epsilon) if config.qk_norm == "rotated" else turned
                return turned if context.rotated is None else jnp.where(context.rotated, turned, x)

            q_BLHK, k_BLGK = rotated(q_BLHK), rotated(k_BLGK)
        return self.scaled(self._grown(q_BLHK, context)), k_BLGK

    def _grown(self, q_BLHK: jax.Array, context: Context) -> jax.Array:
        """Queries times a factor that grows with their position, in layers without rotary positions."""
        temperature = self.config.attention_temperature
        if temperature is None:
            return q_BLHK
        steps_BL = ((context.positions_BL + 1) // temperature.step).astype(jnp.float32)
        factor_BL = 1 + temperature.scale * jnp.log1p(steps_BL)
        factor_BL = factor_BL if context.rotated is None else jnp.where(context.rotated, 1.0, factor_BL)
        return scaled(q_BLHK, factor_BL[:, :, None, None])

    def scaled(self, q_BLHK: jax.Array) -> jax.Array:
        """Queries for scores of `attention_scale`: every kernel scales by 1 / sqrt(K), what is left goes into them."""
        config = self.config
        scale = 1.0 if config.attention_scale is None else config.attention_scale * math.sqrt(config.head_width)
        if math.isclose(scale, 1.0):
            return q_BLHK
        return scaled(q_BLHK, scale)

    def _attend_to_cache(self, q_BLHK: jax.Array, cache: LayerCache, context: Context) -> jax.Array:
        """Attend to the positions of a cache, at or before each query's own."""
        config, positions_BL, length = self.config, context.positions_BL, cache.length
        window: jax.Array | int | None = config.windows[0]
        chunked = config.local_layers is not None and config.local_layers.chunked
        if context.local is not None and config.local_layers is not None:
            window = jnp.where(context.local, config.local_layers.window, length)

        def keys(first: jax.Array | int, size: int) -> CachedKeys:
            # The last block begins where it is whole.
            start = first if isinstance(first, int) else jnp.minimum(first, length - size)
            order_S = start + jnp.arange(size)
            (k_BGSK, key_scale_BGS), (v_BGSK, value_scale_BGS) = (
                cache.read(name, start, size) for name in ("key", "value")
            )
            mask_BLS = attention_mask(positions_BL, order_S[None], causal=True, window=window, chunked=chunked)
            mask_BLS &= order_S[None, None] >= first
            bias_BHLS = None if context.bias_HW is None else bias_at(context.bias_HW, positions_BL, order_S)
            return CachedKeys(k_BGSK, v_BGSK, mask_BLS, key_scale_BGS, value_scale_BGS, bias_BHLS)

        softcap, sink_H = config.attention_softcap, self._sinks()
        if length <= 2 * BLOCK:
            return cached_attention(q_BLHK, keys(0, length), softcap=softcap, sink_H=sink_H)
        # Rows beyond the cache are not in use: they do not make the others read all of it.
        last = jnp.max(jnp.where(positions_BL < length, positions_BL, 0))
        blocks = last // BLOCK + 1

        def block(number: jax.Array) -> CachedKeys:
            return keys(number * BLOCK, BLOCK)

        return cached_attention_in_blocks(q_BLHK, block, blocks, softcap=softcap, sink_H=sink_H)

    def _attend(self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, context: Context) -> jax.Array:
        """Attend to the sequence itself; kernels take a window that is a constant, so each kind has a branch."""
        config = self.config

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, local: bool = False) -> jax.Array:
            form = AttentionForm(config.causal, window, config.attention_softcap)
            learned, segments_BL = Learned(context.bias_HW, self._sinks()), context.segments_BL
            segments_BL = self._chunks(context, (q.shape[0], q.shape[1])) if local else segments_BL
            return self_attention(q, k, v, segments_BL, form, learned, implementation=config.attention)

        if context.local is None or config.local_layers is None:
            return attend(q_BLHK, k_BLGK, v_BLGK, config.windows[0])
        window, layout = config.local_layers.window, current_layout()
        # A ring of permutations may not stand in a branch; a window of all positions is no work for a ring.
        whole = q_BLHK.shape[1] if layout is not None and layout.degree("context") > 1 else None
        return jax.lax.cond(
            context.local,
            functools.partial(attend, window=window, local=True),
            functools.partial(attend, window=whole),
            q_BLHK,
            k_BLGK,
            v_BLGK,
        )

    def _chunks(self, context: Context, shape: tuple[int, int]) -> jax.Array | None:
        """Segments of a local layer, to which chunks are documents of their own; a chunk is within its window."""
        local, segments_BL = self.config.local_layers, context.segments_BL
        if local is None or not local.chunked or shape[1] <= local.window:  # no text is longer than a chunk
            return segments_BL
        chunks_BL = jnp.broadcast_to(context.positions_BL // local.window, shape)
        if segments_BL is not None:
            most = max(self.config.max_sequence_length, shape[1]) // local.window + 1
            chunks_BL = chunks_BL + segments_BL * most
        return constrain(chunks_BL, "batch", "sequence")


class LatentAttention(Attention):
    """Attention whose keys and values, and queries, are made of latents (DeepSeek-AI 2024, DeepSeek V2, 2.1)."""

    query_latent: Linear
    key_value_latent: Linear
    key_value: Linear

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, stddevs: Stddevs):
        super().__init__(config, rngs, stddevs)
        assert config.latent is not None
        self.latent = config.latent
        self.query_latent_norm = _inner_norm(config, "query_latent_norm")
        self.key_value_latent_norm = _inner_norm(config, "key_value_latent_norm")

    def project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries and keys with the rotated dims first, and values with zeros up to the width of these."""
        sizes, norm = self.latent, self.key_value_latent_norm
        assert norm is not None
        x_BLQ = x_BLD if self.query_latent_norm is None else self.query_latent_norm(self.query_latent(x_BLD))
        q_nope, q_rope = jnp.split(self.query(x_BLQ), [sizes.nope_dim], axis=-1)
        latent, k_rope = jnp.split(self.key_value_latent(x_BLD), [sizes.key_value_rank], axis=-1)
        k_nope, v = jnp.split(self.key_value(norm(latent)), [sizes.nope_dim], axis=-1)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], sizes.rope_dim))
        v_BLHK = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, self.config.head_width - sizes.value_dim)))
        return jnp.concatenate([q_rope, q_nope], axis=-1), jnp.concatenate([k_rope, k_nope], axis=-1), v_BLHK

    def valued(self, y_BLHK: jax.Array) -> jax.Array:
        """The values' own dims."""
        return y_BLHK[..., : self.latent.value_dim]


class StateSpace(nnx.Module):
    """The mixer of Mamba 2 in the place of attention; its C, B and x are query, key and value (Dao and Gu 2024)."""

    gate: Linear
    step: Linear
    output: Linear

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, stddevs: Stddevs):
        assert config.state_space is not None
        own = {"output": stddevs.attention_output}
        for name, shape in attention_shapes(config).items():
            setattr(self, name, _linear(config, name, shape, own.get(name, stddevs.query), rngs))
        for name, shape in convolution_shapes(config).items():
            # The variance that torch draws.
            setattr(self, name, Kernel(shape.kernel, shape.outputs, stddev=(3 * shape.inputs[0]) ** -0.5, rngs=rngs))
        # Heads of all decays from 1 to 16 and of all steps from 0.001 to 0.1, which meet in no order.
        heads, order = config.num_heads, np.random.default_rng(0).permutation(config.num_heads)
        steps = np.geomspace(0.001, 0.1, heads)[order]
        self.log_decay = nnx.Param(jnp.asarray(np.log(np.linspace(1, 16, heads)), jnp.float32))
        self.step_bias = nnx.Param(jnp.asarray(np.log(np.expm1(steps)), jnp.float32))
        self.skip = nnx.Param(jnp.ones((heads,), jnp.float32))
        self.norm = Norm(*attention_norm_shapes(config)["norm"].outputs, kind="rmsnorm", bias=False, epsilon=0.0)
        self.config, self.groups, self.chunk = config, config.state_space.groups, config.state_space.chunk

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, LayerCache | None]:
        layout, config, cache, positions_BL = current_layout(), self.config, context.cache, context.positions_BL
        if layout is not None and layout.degree("context") > 1:
            choose_context(layout, config.num_heads, config.num_heads, AttentionForm(state=True))
        documents_BL = document_numbers(context.segments_BL, *x_BLD.shape[:2])
        if cache is not None:  # a text begins at position 0, whatever the row held before
            documents_BL = jnp.cumsum((positions_BL == 0).astype(jnp.int32), axis=1)
        axes, convolved = ("batch", "sequence", "activation_heads", None), list[jax.Array]()
        for name in CONVOLVED:
            axis, convolution, documents = axes[2] if name == "value" else None, f"{name}_conv", documents_BL
            x = constrain(getattr(self, name)(x_BLD), "batch", "sequence", axis, None)
            if cache is not None:
                tail = cache.arrays[convolution][cache.layer]
                x, documents, tail = after_tail(x, tail, documents_BL, positions_BL < NOWHERE)
                cache = cache.replaced(convolution, tail)
            kernel: Kernel = getattr(self, convolution)
            assert kernel.bias is not None
            x = causal_convolution(x, kernel.kernel[...], kernel.bias[...], documents)
            convolved.append(checkpoint_name(x[:, -x_BLD.shape[1] :], name))
        bias_H, decay_H = self.step_bias[...], -jnp.exp(self.log_decay[...])
        step_BLH = jax.nn.softplus(self.step(x_BLD).astype(jnp.float32) + bias_H[None, None])
        state = None
        if cache is not None:
            state, step_BLH = (
                cache.arrays["state"][cache.layer],
                jnp.where((positions_BL < NOWHERE)[..., None], step_BLH, 0),
            )
        query, key, value = convolved
        inputs = StateInputs(query, key, value, step_BLH, decay_H)
        y_BLHK, state = state_space(inputs, documents_BL, chunk=self.chunk, state=state)
        cache = None if cache is None else cache.replaced("state", state)
        y_BLHK = y_BLHK + value * self.skip[...].astype(y_BLHK.dtype)[None, None, :, None]
        y_BLHK = checkpoint_name(constrain(y_BLHK, *axes), "attention_output")
        gate_BLHK, scale_HK = constrain(self.gate(x_BLD), *axes), self.norm.scale[...]
        y_BLHK = gated_norm(y_BLHK, gate_BLHK, scale_HK, self.groups, config.norm_epsilon)
        return checkpoint_name(self.output(y_BLHK), "attention_projection"), cache


class MLP(nnx.Module):
    """A nonlinearity between two linear layers, or one that a second linear layer gates."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, stddevs: Stddevs):
        shapes = mlp_shapes(config)
        self.up = _linear(config, "up", shapes["up"], stddevs.up, rngs)
        self.gate = _linear(config, "gate", shapes["gate"], stddevs.up, rngs) if "gate" in shapes else None
        self.down = _linear(config, "down", shapes["down"], stddevs.down, rngs)
        self.activation = config.activation

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        h_BLF = self.up(x_BLD)
        h_BLF = ACTIVATIONS[self.activation](h_BLF) if self.gate is None else self._gated(self.gate, x_BLD, h_BLF)
        h_BLF = checkpoint_name(constrain(h_BLF, "batch", "sequence", "activation_mlp"), "mlp_hidden")
        return checkpoint_name(self.down(h_BLF), "mlp_output")

    def _gated(self, gate: Linear, x_BLD: jax.Array, up_BLF: jax.Array) -> jax.Array:
        product = GATED[self.activation]
        if isinstance(gate.kernel.get_value(), LowRankKernel):
            # Of a fine-tuning the activations are most of what a step holds. The backward pass keeps the two factors
            # and computes the sigmoid again, where autodiff keeps six arrays: a fifth of all temporary memory.
            product = jax.checkpoint(product, prevent_cse=False)
        return product(gate(x_BLD), up_BLF)


def _mixer(config: TransformerConfig) -> type[Attention | StateSpace]:
    """What takes the place of attention."""
    if config.state_space is not None:
        return StateSpace
    return Attention if config.latent is None else LatentAttention


class Block(nnx.Module):
    """Attention and an MLP (or experts), added to the residual stream in the order of `TransformerConfig.block`."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, stddevs: Stddevs | None = None):
        stddevs, names = stddevs or small_stddevs(config), norm_names(config)

        def norm(name: str) -> Norm | None:
            return block_norm(config) if name in names else None

        self.attention_norm = norm("attention_norm")
        self.attention = _mixer(config)(config, rngs, stddevs)
        self.mlp_norm = norm("mlp_norm")
        if config.experts is not None:
            self.mlp = MoE(config, rngs)
        else:
            self.mlp = MLP(config, rngs, stddevs) if mlp_shapes(config) else None
        self.shared = None if config.shared is None else MLP(config.shared, rngs, stddevs)
        self.attention_output_norm, self.mlp_output_norm = norm("attention_output_norm"), norm("mlp_output_norm")
        self.dropout, self.residual_scale = config.dropout, config.residual_scale
        self.form = config.block

    @staticmethod
    def inner(x_BLD: jax.Array) -> jax.Array:
        """Constrain the input of attention or MLP, where `tensor` shards heads and mlp width, not the sequence."""
        return constrain(x_BLD, "batch", "sequence", "activation_embed")

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> tuple[jax.Array, Routing | None, LayerCache | None]:
        keys = (None, None) if key is None else jax.random.split(key)
        attended_BLD, cache = self.attend(x_BLD, context, keys[0])
        if self.mlp is None:
            return attended_BLD, None, cache
        mlp_input_BLD = x_BLD if self.form in ("parallel", "parallel_one_norm") else attended_BLD
        x_BLD, routing = self.feed(attended_BLD, mlp_input_BLD, keys[1], context.segments_BL)
        return x_BLD, routing, cache

    def attend(self, x_BLD: jax.Array, context: Context, key: jax.Array | None) -> tuple[jax.Array, LayerCache | None]:
        """Add the output of attention to the residual stream."""
        with jax.named_scope("attention"):
            inner_BLD = self._input(x_BLD, self.attention_norm)
            if context.first is not None:
                x_BLD = constrain(jnp.where(context.first, inner_BLD, x_BLD), *RESIDUAL)
            y_BLD, cache = self.attention(inner_BLD, context)
            x_BLD = self._added(x_BLD, y_BLD, key, self.attention_norm, self.attention_output_norm)
        return x_BLD, cache

    def feed(
        self,
        x_BLD: jax.Array,
        mlp_input_BLD: jax.Array,
        key: jax.Array | None,
        segments_BL: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None]:
        """Add the output of the MLP (or experts) to the residual stream; its input is another one beside attention."""
        with jax.named_scope("mlp"):
            one_norm = self.form == "parallel_one_norm"
            inner_BLD = self._input(mlp_input_BLD, self.attention_norm if one_norm else self.mlp_norm)
            routing = None
            if isinstance(self.mlp, MoE):
                y_BLD, *routed = self.mlp(inner_BLD, None if segments_BL is None else segments_BL != 0)
                routing = Routing.of(*routed)
                y_BLD = y_BLD if self.shared is None else y_BLD + self.shared(inner_BLD)
            else:
                assert self.mlp is not None
                y_BLD = self.mlp(inner_BLD)
            x_BLD = self._added(x_BLD, y_BLD, key, self.mlp_norm, self.mlp_output_norm)
        return x_BLD, routing

    def _input(self, x_BLD: jax.Array, norm: Norm | None) -> jax.Array:
        """The input of attention or MLP."""
        return self.inner(x_BLD if norm is None or self.form == "post" else norm(x_BLD))

    def _added(
        self, x_BLD: jax.Array, y_BLD: jax.Array, key: jax.Array | None, norm: Norm | None, output_norm: Norm | None
    ) -> jax.Array:
        """The residual stream with an output of attention or MLP, after the norms that stand behind it."""
        if output_norm is not None:
            y_BLD = output_norm(y_BLD)
        if self.residual_scale is not None:
            y_BLD = scaled(y_BLD, self.residual_scale)
        x_BLD = constrain(x_BLD + dropout(y_BLD, self.dropout, key), *RESIDUAL)
        return x_BLD if norm is None or self.form != "post" else constrain(norm(x_BLD), *RESIDUAL)
