"""What an adapted model does with its parameters before the model that it was made of is applied to them.

Most adapted models do nothing: their linear layers read the kernels as they are. Adapters with dropout get a key per
layer, and kernels of layers that are not ours are added up.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Decoder, DefersLogits, DrawsByRow, Model, Params, Parts, PartsApply, Rebuild
from jaxtrain.precision.kernels import LowRankKernel


@dataclass(frozen=True)
class Preparation:
    """What is done with the parameters of an adapted model.

    Attributes:
        stack_dims: path of each adapted kernel -> how many of its dims count layers.
        added_up: paths of the kernels that the model takes as one array.
        dropout: whether the other adapters drop inputs in training.
    """

    stack_dims: Mapping[str, int]
    added_up: frozenset[str]
    dropout: bool

    def __call__(
        self,
        params: Params,
        *,
        key: jax.Array | None,
        train: bool,
        prefix: str = "",
        first_layer: jax.Array | int = 0,
    ) -> Params:
        """The parameters as the model without adapters takes them.

        Args:
            params: of the model, or of a part of it.
            key: random key; None: no randomness.
            train: whether the adapters drop inputs.
            prefix: path of the part inside the model, with "/" at its end.
            first_layer: index of the first layer, where they are a range of the stacked layers.
        """
        key = key if self.dropout and train else None

        def one(path: tuple[Any, ...], leaf: Any) -> Any:
            if not isinstance(leaf, LowRankKernel):
                return leaf
            name = f"{prefix}{path_name(path)}"
            if name in self.added_up:
                return added_up(leaf)
            if key is None:
                return leaf
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            if self.stack_dims[name] == 0:
                return replace(leaf, key=own)
            # The masks of a layer follow from its index alone, on whichever stage of a pipeline it is.
            numbers = first_layer + jnp.arange(leaf.lora_b.shape[0])
            return replace(leaf, key=jax.vmap(jax.random.fold_in, (None, 0))(own, numbers))

        return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda leaf: isinstance(leaf, LowRankKernel))


def prepared(model: Model, prepare: Preparation) -> Model:
    """The model with functions that prepare their parameters; the model itself where there is nothing to do.

    Args:
        model: takes the parameters of the model that was adapted.
        prepare: what is done with parameters.
    """
    if not prepare.dropout and not prepare.added_up:
        return model
    parts = None if model.parts is None else _parts(model.parts, prepare)
    apply = (
        PartsApply(parts) if parts is not None and isinstance(model.apply, PartsApply) else _apply(model.apply, prepare)
    )
    rebuild, decoder = model.rebuild, model.decoder
    if rebuild is not None and model.apply is rebuild.apply and model.parts is rebuild.parts:
        build = rebuild.build
        rebuild = Rebuild(apply, parts, lambda remat: prepared(build(remat), prepare))
    return replace(
        model,
        apply=apply,
        parts=parts,
        rebuild=rebuild,
        decoder=None if decoder is None else _decoder(decoder, prepare),
    )


def added_up(kernel: LowRankKernel) -> jax.Array:
    """The kernel as one float array, base + scale * A B, in the dtype of its base.

    Args:
        kernel: [*stack, D, F], with a base of floats.
    """
    return kernel.base + (kernel.scale * jnp.matmul(kernel.lora_a, kernel.lora_b)).astype(kernel.base.dtype)


def _marked_as(given: Callable[..., Any], function: Callable[..., Any]) -> Any:
    return DrawsByRow(function) if isinstance(given, DrawsByRow) else function


def _apply(apply: Any, prepare: Preparation) -> Any:
    """A model's function with its parameters prepared, of the same kind."""
    if isinstance(apply, DefersLogits):
        return DefersLogits(_apply(apply.deferred, prepare))

    def prepared_apply(params: Params, model_state: Any, inputs: Any, *, key: Any, train: bool) -> Any:
        return apply(prepare(params, key=key, train=train), model_state, inputs, key=key, train=train)

    return _marked_as(apply, prepared_apply)


def _parts(parts: Parts, prepare: Preparation) -> Parts:
    prefix = f"{parts.stack}/"

    def embed(params: Params, inputs: Any, /, *, key: jax.Array | None, train: bool) -> Any:
        return parts.embed(prepare(params, key=key, train=train), inputs, key=key, train=train)

    def layers(stack: Params, carry: Any, inputs: Any, /, *, first_layer: Any, key: Any, train: bool) -> Any:
        stack = prepare(stack, key=key, train=train, prefix=prefix, first_layer=first_layer)
        return parts.layers(stack, carry, inputs, first_layer=first_layer, key=key, train=train)

    def head(params: Params, carry: Any, /, *, train: bool) -> Any:
        return parts.head(prepare(params, key=None, train=train), carry, train=train)

    return Parts(parts.stack, parts.num_layers, _marked_as(parts.embed, embed), _marked_as(parts.layers, layers), head)


def _decoder(decoder: Decoder, prepare: Preparation) -> Decoder:
    def decode(params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return decoder.decode(prepare(params, key=None, train=False), tokens_BT, positions_BT, cache)

    def deferred(params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any) -> tuple[Any, Any]:
        assert decoder.deferred is not None
        return decoder.deferred(prepare(params, key=None, train=False), tokens_BT, positions_BT, cache)

    def encode(params: Params, prompts_BP: jax.Array, lengths_B: jax.Array, cache: Any) -> Any:
        assert decoder.encode is not None
        return decoder.encode(prepare(params, key=None, train=False), prompts_BP, lengths_B, cache)

    def prefill(params: Params, prompts_BP: jax.Array, lengths_B: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        assert decoder.prefill is not None
        return decoder.prefill(prepare(params, key=None, train=False), prompts_BP, lengths_B, cache)

    return replace(
        decoder,
        decode=decode,
        encode=None if decoder.encode is None else encode,
        prefill=None if decoder.prefill is None else prefill,
        deferred=None if decoder.deferred is None else deferred,
    )
