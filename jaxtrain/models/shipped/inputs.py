"""What a transformer reads of a batch. Shapes: B batch, L length."""

import difflib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.model import TransformerConfig
from jaxtrain.errors import ConfigError

_ENTRIES = ("tokens", "positions", "segments", "token_types")
# Names that other libraries use -> the entry that they mean, where the two are not spelled alike.
_MEANT = {
    "input_ids": "tokens",
    "ids": "tokens",
    "attention_mask": "segments",
    "padding_mask": "segments",
    "token_type_ids": "token_types",
}


@dataclass(frozen=True)
class TransformerInputs:
    """The inputs of a transformer, all integers [B, L].

    Attributes:
        tokens_BL: token ids.
        positions_BL: positions in the document; [1, L] where the inputs give none, the indices in the row.
        segments_BL: numbers of packed documents, which do not see each other; 0 is padding to heads that read a whole
            sequence. None: one document per row.
        token_types_BL: of the two texts of a pair; None: all are 0.
    """

    tokens_BL: jax.Array
    positions_BL: jax.Array
    segments_BL: jax.Array | None = None
    token_types_BL: jax.Array | None = None

    @staticmethod
    def of(inputs: Any, config: TransformerConfig) -> "TransformerInputs":
        """Read the inputs of a batch: tokens, or a dict of entries.

        Raises:
            ConfigError: the inputs hold an entry that the model does not read, no tokens, or an entry without
                integers.
        """
        inputs = inputs if isinstance(inputs, dict) else {"tokens": inputs}
        entries = _ENTRIES if config.token_types else _ENTRIES[:-1]
        for name, value in inputs.items():
            if name not in entries:
                meant = _MEANT.get(name) or difflib.get_close_matches(name, entries, 1, 0.0)[0]
                advice = "; to leave padding out of the loss, give the batch weights of 0" if "mask" in name else ""
                advice = "; the model has model.token_types=0" if meant == "token_types" or name == meant else advice
                raise ConfigError(
                    f"inputs hold {name!r}, which the transformer does not read; did you mean {meant!r}? It takes "
                    f"{', '.join(entries)}{advice}"
                )
            if value is not None and not jnp.issubdtype(value.dtype, jnp.integer):
                raise ConfigError(
                    f"{name} of the transformer are integers, but the inputs hold {value.dtype}; cast to int32"
                )
        if "tokens" not in inputs:
            raise ConfigError(
                f"inputs of the transformer have no entry 'tokens'; there are {', '.join(inputs) or 'none'}"
            )
        tokens_BL = inputs["tokens"]
        positions_BL = inputs.get("positions", jnp.arange(tokens_BL.shape[1])[None])
        return TransformerInputs(tokens_BL, positions_BL, inputs.get("segments"), inputs.get("token_types"))
