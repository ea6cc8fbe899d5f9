"""How a model generates: a cache of keys and values, functions that extend it, and what layers with a window keep."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.ops.loss.cross_entropy import DeferredLogits

Params = dict[str, Any]

NOWHERE = 2**30
"""A position from which on a decoder's cache keeps nothing: a token there is fed, and no other one sees it."""


@dataclass(frozen=True)
class Windows:
    """What a decoder's cache can leave out, because some or all layers see a window of positions alone.

    Attributes:
        window: positions that a query of these layers sees, its own among them.
        chunk: most tokens of a row that `prefill` writes at a time.
        init_cache: (batch, length, dtype, chunk) -> cache like `Decoder.init_cache`, in which these layers have room
            for the last window + chunk - 1 positions, for callers that write at most `chunk` tokens of a row at a
            time. Every position of a row up to the last is to be written, in ascending order; what is written at
            other ones may go back by `chunk` - 1 positions at most.
    """

    window: int
    chunk: int
    init_cache: Callable[[int, int, Any, int], Any]


@dataclass(frozen=True)
class Decoder:
    """How a model generates: a cache and a function that extends it.

    Attributes:
        init_cache: (batch, length, dtype) -> cache tree with keys and values for `length` positions.
        decode: (params, tokens_BT, positions_BT, cache) -> (logits_BTV float32, cache). Writes the T tokens at their
            positions and lets each see what stands at or before it.
        max_length: positions the model has.
        encode: (params, prompts_BP, lengths_B, cache) -> cache, of a model that reads its prompt with an encoder; to
            be called before the first `decode`, with prompts padded on the right. None: `decode` reads the prompt.
        start_token: what `decode` gets at position 0 of a model with an encoder; what it writes is the output alone.
        prefill: (params, prompts_BP, lengths_B, cache) -> (logits_BV, cache): `decode` of whole prompts, padded on the
            right, that computes the float32 logits of the last token of each alone. None: `decode` computes all.
        short_length: longest cache whose positions are those of short texts (longrope); None: all lengths are alike.
        deferred: `decode` that gives `DeferredLogits` in place of logits, for callers that need few of them. None:
            `decode` computes all.
        windows: of its layers; None: every layer sees all positions, or needs them.
    """

    init_cache: Callable[[int, int, Any], Any]
    decode: Callable[[Params, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
    max_length: int
    encode: Callable[[Params, jax.Array, jax.Array, Any], Any] | None = None
    start_token: int = 0
    short_length: int | None = None
    prefill: Callable[[Params, jax.Array, jax.Array, Any], tuple[jax.Array, Any]] | None = None
    deferred: Callable[[Params, jax.Array, jax.Array, Any], tuple[DeferredLogits, Any]] | None = None
    windows: Windows | None = None


@dataclass(frozen=True)
class Ring:
    """The positions that layers with a window keep: position p is at p modulo `size`; a query sees `window` of them."""

    size: int
    window: int


def ring_of(decoder: Decoder, length: int, chunk: int) -> Ring | None:
    """What the layers with a window keep of `length` positions; None: all, as the other layers do."""
    if decoder.windows is None:
        return None
    # The first token of a chunk sees its window although the last one is written already.
    size = decoder.windows.window + chunk - 1
    return Ring(size, decoder.windows.window) if size < length else None


def make_cache(decoder: Decoder, batch: int, length: int, dtype: Any, *, chunk: int) -> Any:
    """An empty cache for `batch` rows of `length` positions; arguments as of `ring_of`."""
    if ring_of(decoder, length, chunk) is None:
        return decoder.init_cache(batch, length, dtype)
    assert decoder.windows is not None
    return decoder.windows.init_cache(batch, length, dtype, chunk)


def can_go_on(ring: Ring | None, position: int, written: int) -> bool:
    """Whether a text can go on from a position although `written` ones were written in its row since position 0."""
    if ring is None or position == 0 or written <= ring.size:
        return True
    # The window of the next token begins behind what was overwritten.
    return written - ring.size <= position - ring.window + 1
