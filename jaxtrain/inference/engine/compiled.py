"""The engine's programs, compiled once for its sizes, with the state of the slots that they hand on.

Shapes: S slots, W tokens fed to each (1, or 1 and a draft), C tokens of a chunk, V vocabulary.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.inference.choose import RowSampling, row_sampling
from jaxtrain.inference.engine.cache_layout import cache_layout, fitting
from jaxtrain.inference.engine.programs import Chosen, SlotState, copy_slot, decode_slots, prefill_chunk, set_penalties
from jaxtrain.inference.sampling import Sampling
from jaxtrain.layout.gather import hold_parameters
from jaxtrain.models.decoder import NOWHERE, make_cache
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.precision.policy import cast_floats
from jaxtrain.runtime.compiler import decoding_options

# Chunks of this many tokens or more are worth a second program for short prompts.
_LONG_CHUNK = 64


class Programs:
    """The compiled programs with the state that they hand on.

    Args:
        sharded_model: has a decoder without an encoder.
        params: of the model, on its mesh; also quantized.
        slots: S.
        length: positions of the cache.
        chunk: C.
        cache_dtype: of keys and values; None: the compute dtype.
        speculate: longest draft; 0: none is verified.

    Attributes:
        params: in the compute dtype.
        slots, chunk: as given.
        vocab_size: V.
    """

    def __init__(
        self,
        sharded_model: ShardedModel,
        params: Params,
        *,
        slots: int,
        length: int,
        chunk: int,
        cache_dtype: str | None,
        speculate: int,
    ):
        decoder = sharded_model.model.decoder
        assert decoder is not None
        dtype = sharded_model.policy.compute_dtype if cache_dtype is None else jnp.dtype(cache_dtype)
        # Tokens of a slot that a program writes at a time.
        most = max(chunk, 1 + speculate)
        layout = cache_layout(decoder, sharded_model.layout, slots=slots, length=length, chunk=most, dtype=dtype)
        # Once, and not in every step, which would read the parameters as they are stored.
        self.params = cast_floats(params, sharded_model.policy.compute_dtype)
        if sharded_model.layout.state_axes:
            # Nor gather what ZeRO 1 and 2 shard over `data`.
            with sharded_model.context():
                self.params = jax.jit(hold_parameters)(self.params)
        self.slots, self.chunk = slots, chunk
        one_token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        with sharded_model.context():
            one_cache = jax.eval_shape(lambda: make_cache(decoder, 1, length, dtype, chunk=most))
            logits, _ = jax.eval_shape(decoder.decode, self.params, one_token, one_token, one_cache)
        self.vocab_size = logits.shape[-1]
        mesh = sharded_model.mesh
        replicated = NamedSharding(mesh, PartitionSpec())
        table = NamedSharding(mesh, fitting(sharded_model.layout, (slots, self.vocab_size), "batch", None))
        placed = SlotState(layout.shardings, table, table, table)

        def begin() -> SlotState:
            counts = jnp.zeros((slots, self.vocab_size), jnp.int32)
            cache = make_cache(decoder, slots, length, dtype, chunk=most)
            return SlotState(cache, counts, counts, counts.astype(jnp.float32))

        def given(*values: Any) -> Any:
            """Arguments from the host, as shapes."""
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), values)

        # Traced one after the other, compiled at the same time.
        pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="jaxtrain compile")

        def compiled(
            function: Any, before: tuple[Any, ...], after: tuple[Any, ...], outputs: Any, options: Any = None
        ) -> Future[Any]:
            donated = len(before) - 1
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=outputs, compiler_options=options)
            return pool.submit(jitted.lower(*before, *after).compile)

        number, flag = np.int32(0), np.bool_(False)
        rows, row = _greedy(slots), _greedy(1)
        with sharded_model.context(), pool:
            self._state = _allocated(jax.jit(begin, out_shardings=placed), slots=slots, length=length)
            decode = functools.partial(decode_slots, decoder=decoder)
            fed = (self.params, self._state)
            decodes = {
                width: compiled(
                    decode,
                    fed,
                    given(
                        np.zeros((slots, width), np.int32), np.zeros(slots, np.int32), np.zeros(slots, bool), rows, flag
                    ),
                    (placed, replicated),
                    {**decoding_options(mesh.devices.flat[0])} or None,
                )
                for width in {1, 1 + speculate}
            }
            read = functools.partial(prefill_chunk, decoder=decoder, layout=layout)
            prefills = {}
            for width in _chunk_widths(chunk):
                tokens_C = np.zeros(width, np.int32)
                asked = given(number, tokens_C, number, number, flag, row, flag, tokens_C, flag)
                prefills[width] = compiled(read, fed, asked, (placed, replicated, replicated))
            table_V = np.zeros(self.vocab_size)
            given_tables = given(number, table_V.astype(np.int32), table_V.astype(np.float32))
            copy = functools.partial(copy_slot, layout=layout)
            copied = compiled(copy, (self._state,), given(number, number), placed)
            penalties = compiled(set_penalties, (self._state,), given_tables, placed)
        self._decode = {width: program.result() for width, program in decodes.items()}
        self._prefill = {width: program.result() for width, program in prefills.items()}
        self._set_penalties, self._copy = penalties.result(), copied.result()

    def decode(
        self,
        tokens_SW: np.ndarray,
        positions_S: np.ndarray,
        writes_S: np.ndarray,
        rows: RowSampling,
        *,
        wants_top: bool,
    ) -> Chosen:
        """Run `decode_slots`, and wait for what it chose."""
        program = self._decode[tokens_SW.shape[1]]
        given = (tokens_SW, positions_S, writes_S, rows, np.bool_(wants_top))
        self._state, chosen = program(self.params, self._state, *given)
        return jax.device_get(chosen)

    def prefill(
        self,
        slot: int,
        tokens: list[int],
        begin: int,
        row: RowSampling,
        *,
        is_last: bool,
        wants_top: bool,
        next_tokens: list[int] | None,
    ) -> tuple[Chosen, Chosen]:
        """Run `prefill_chunk` with at most C tokens; what it gives is on the device still.

        Args:
            slot, begin, row, is_last, wants_top: see there.
            tokens: of the chunk.
            next_tokens: the token of the prompt after each, as many; None: the request asked for nothing of them.
        """
        width = min(width for width in self._prefill if width >= len(tokens))
        padded_2C = np.zeros((2, width), np.int32)
        padded_2C[0, : len(tokens)] = tokens
        if next_tokens is not None:
            padded_2C[1, : len(next_tokens)] = next_tokens
        self._state, chosen, prompt = self._prefill[width](
            self.params,
            self._state,
            np.int32(slot),
            padded_2C[0],
            np.int32(begin),
            np.int32(len(tokens)),
            np.bool_(is_last),
            row,
            np.bool_(wants_top),
            padded_2C[1],
            np.bool_(next_tokens is not None),
        )
        return chosen, prompt

    def copy(self, source: int, target: int) -> None:
        """Run `copy_slot`."""
        self._state = self._copy(self._state, np.int32(source), np.int32(target))

    def set_penalties(self, slot: int, prompt_counts_V: np.ndarray, bias_V: np.ndarray) -> None:
        """Run `set_penalties`."""
        self._state = self._set_penalties(self._state, np.int32(slot), prompt_counts_V, bias_V)

    def warm(self) -> None:
        """Run every program once, so that no request pays for what a first run sets up.

        What that writes is overwritten before any text sees it.
        """
        rows, row = _greedy(self.slots), _greedy(1)
        for width in self._decode:
            fed = np.zeros((self.slots, width), np.int32)
            self.decode(fed, np.full(self.slots, NOWHERE, np.int32), np.zeros(self.slots, bool), rows, wants_top=False)
        for width in self._prefill:
            jax.block_until_ready(
                self.prefill(0, [0] * width, 0, row, is_last=False, wants_top=False, next_tokens=None)
            )
        self.copy(0, 0)
        table_V = np.zeros(self.vocab_size)
        self.set_penalties(0, table_V.astype(np.int32), table_V.astype(np.float32))


def _allocated(begin: Callable[[], SlotState], *, slots: int, length: int) -> SlotState:
    """The first state of the slots.

    Raises:
        ConfigError: the devices have no room for it.
    """
    try:
        return jax.block_until_ready(begin())
    except jax.errors.JaxRuntimeError as error:
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(begin)))
        raise ConfigError(
            f"the cache of {slots} slots of {length} positions takes {size / 2**30:.1f} GiB, and the devices have "
            "no room for it; use fewer slots, a smaller length or cache_dtype='int8'"
        ) from error


def _chunk_widths(chunk: int) -> set[int]:
    """Tokens of a chunk that programs are compiled for: a short prompt does not pay for a whole chunk."""
    return {chunk, chunk // 4} if chunk >= _LONG_CHUNK else {chunk}


def _greedy(rows: int) -> RowSampling:
    return row_sampling([Sampling(temperature=0)] * rows, [0] * rows)
