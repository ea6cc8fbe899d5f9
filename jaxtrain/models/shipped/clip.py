"""CLIP: an encoder of images and one of texts, whose embeddings are compared (Radford et al. 2021, arXiv 2103.00020).

The encoders are the vision transformer and the transformer of `images.py` and `transformer.py`.

Shapes: B batch, H height, W width, C channels, L tokens of a text, D model width, P width of the embeddings.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.arguments import shown
from jaxtrain.config.model import CLIPConfig
from jaxtrain.config.schema import Remat
from jaxtrain.errors import ConfigError
from jaxtrain.models.from_nnx import from_nnx, scan_stack
from jaxtrain.models.model import DrawsByRow, Model
from jaxtrain.models.shipped.block import Block, Context
from jaxtrain.models.shipped.heads import HeadInputs
from jaxtrain.models.shipped.images import ViT
from jaxtrain.models.shipped.shapes import clip_image, model_tensors
from jaxtrain.models.shipped.transformer import Transformer
from jaxtrain.remat.policy import KEEP_ALL

# Section 2.5: a temperature of 0.07 to begin with.
_FIRST_SCALE = math.log(1 / 0.07)


class CLIP(nnx.Module):
    """Two encoders, and the logarithm of what multiplies the similarities of their embeddings."""

    def __init__(self, config: CLIPConfig, remat: Remat, rngs: nnx.Rngs):
        width, (size, _, channels) = config.projection_dim, clip_image(config)
        self.image = ViT(config.image_tower, size, channels, width, rngs)
        self.text = Transformer(config.text_tower, config.text.vocab_size, width, rngs)
        self.logit_scale = nnx.Param(jnp.asarray(_FIRST_SCALE, jnp.float32))
        self.config, self.remat = config, remat

    def embed_images(self, images_BHWC: jax.Array) -> jax.Array:
        """Compute the embeddings [B, P], whose norm is 1."""
        with jax.named_scope("image"):
            x_BLD = self._blocks("image", self.image.embed(images_BHWC, None))
            return _normalized(self.image.logits(x_BLD))

    def embed_texts(self, tokens_BL: jax.Array) -> jax.Array:
        """Compute the embeddings [B, P], whose norm is 1; what stands after the end changes nothing."""
        positions, end = jnp.arange(tokens_BL.shape[1])[None], self.config.end_token
        with jax.named_scope("text"):
            x_BLD = self._blocks("text", self.text.embed({"tokens": tokens_BL, "positions": positions}, None))
            end_B = jnp.argmax(tokens_BL if end is None else tokens_BL == end, axis=1)
            pooling_BL = (positions == end_B[:, None]).astype(jnp.float32)
            embeddings: Any = self.text.outputs(x_BLD, HeadInputs(pooling_BL))
            return _normalized(embeddings)

    def _blocks(self, side: str, x_BLD: jax.Array) -> jax.Array:
        context = Context(jnp.arange(x_BLD.shape[1])[None])

        def call(block: Block, x_BLD: jax.Array, index: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(x_BLD, context)[0], None

        stack = getattr(self, side).blocks
        return scan_stack(stack, call, x_BLD, path=f"{side}/blocks", remat=self.remat)[0]


def _normalized(x_BP: jax.Array) -> jax.Array:
    """Divide by the Euclidean norm, in float32."""
    wide = x_BP.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))


def _check(config: CLIPConfig, inputs: Any) -> None:
    """Raise a ConfigError where inputs are not images and texts of the model's sizes."""
    shape, longest = clip_image(config), config.text.max_sequence_length
    if isinstance(inputs, dict) and set(inputs) == {"images", "tokens"}:
        images, tokens = inputs["images"], inputs["tokens"]
        fits = images.shape[1:] == shape and tokens.ndim == 2 and tokens.shape[1] <= longest
        if fits and jnp.issubdtype(images.dtype, jnp.floating) and jnp.issubdtype(tokens.dtype, jnp.integer):
            return
    found = ", ".join(f"{name} ({shown(one)})" for name, one in inputs.items()) if isinstance(inputs, dict) else None
    raise ConfigError(
        f"model.kind=clip takes a dict of images, floats [B, {', '.join(map(str, shape))}], and tokens, integers "
        f"[B, up to {longest}], not {found or shown(inputs)}"
    )


def clip(
    config: CLIPConfig,
    *,
    input_shape: tuple[int, ...] = (),
    vocab_size: int | None = None,
    num_outputs: int | None = None,
    remat: Remat | None = None,
) -> Model:
    """Make a CLIP as a `Model`.

    Its inputs are a dict of `images`, floats [B, H, W, C], and `tokens`, int32 [B, L]. Its outputs are a dict of
    `image` and `text`, embeddings [B, P] of norm 1, and of `scale` [], what multiplies their similarities; all float32.
    """

    def make(rngs: nnx.Rngs) -> CLIP:
        return CLIP(config, remat or KEEP_ALL, rngs)

    def call(module: Any, inputs: Any, key: jax.Array | None, train: bool) -> dict[str, jax.Array]:
        _check(config, inputs)
        image_BP, text_BP = module.embed_images(inputs["images"]), module.embed_texts(inputs["tokens"])
        scale = jnp.exp(module.logit_scale[...].astype(jnp.float32))
        return {"image": image_BP, "text": text_BP, "scale": scale}

    axes, stacks = model_tensors(config).axes, ("image/blocks", "text/blocks")
    return from_nnx(make, axes=axes, call=DrawsByRow(call), name=config.size or "clip", gathers_itself=stacks)
