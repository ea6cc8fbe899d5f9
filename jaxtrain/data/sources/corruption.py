"""Hides single tokens of full rows, as for BERT; which ones depends on the seed and the row alone.

Shapes: B rows, N tokens of the stream per row, L tokens of a row, V vocabulary.
Source: Devlin et al. 2019 (arXiv 1810.04805), section 3.1.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.config.data import MaskCorruption, TokenizerConfig, added_tokens
from jaxtrain.data.permutation import uniform_numbers
from jaxtrain.data.rows import IGNORED, MappedRows, Row, Rows
from jaxtrain.data.sources.texts import make_frame
from jaxtrain.data.sources.tokens import TokenSource
from jaxtrain.data.tokenizer import NamedTokens, NumberedTokens, needed, special_ids

# Of the chosen tokens, as in BERT (Devlin et al. 2018, section 3.1).
_MASKED, _RANDOM = 0.8, 0.1


@dataclass(frozen=True)
class Masking:
    """How single tokens of a row are hidden: chances, special tokens around, and the id of the mask.

    `is_special`, bool [V], are ids that are never hidden and never put in.
    """

    settings: MaskCorruption
    before: tuple[int, ...]
    after: tuple[int, ...]
    mask: int
    is_special: np.ndarray
    vocab_size: int

    @property
    def num_around(self) -> int:
        """Number of special tokens around the tokens of the stream."""
        return len(self.before) + len(self.after)

    def identity(self) -> dict[str, object]:
        """Returns JSON values that identify what is hidden, apart from the seed."""
        around = {"before": list(self.before), "after": list(self.after)}
        return {**self.settings.model_dump(mode="json"), **around, "mask": self.mask}


def masking_of(
    config: Any,
    source: TokenSource,
    tokenizer: TokenizerConfig | None,
    *,
    sequence_length: int,
) -> Masking | None:
    """Finds what is hidden in rows of L tokens of a stream; None: nothing.

    Where no tokenizer made the stream, special tokens are added above its ids.
    """
    if config.corruption is None:
        return None
    named = source.tokenizer
    if named is None:
        named = NumberedTokens(source.vocab_size, added_tokens(config))
    assert isinstance(named, NamedTokens)
    special = special_ids(named, tokenizer)
    entries = [entry for entry, _ in make_frame(named, special, pair=False, sequence_length=sequence_length).entries]
    place, ids = entries.index("first"), [entry for entry in entries if isinstance(entry, int)]
    mask = needed(special.mask, "mask", what="data.corruption.kind=mask")
    is_special = np.zeros(named.vocab_size, bool)
    is_special[[*named.special_ids(), mask, *ids]] = True
    return Masking(config.corruption, tuple(ids[:place]), tuple(ids[place:]), mask, is_special, named.vocab_size)


def masked(rows: Rows, masking: Masking, *, seed: int) -> MappedRows:
    """Returns the rows of a stream (`inputs` int32 [N]) with tokens hidden by the seed, in the same training order."""
    return MappedRows(rows, functools.partial(_mask_rows, masking=masking, seed=seed))


def _mask_rows(rows: Row, indices: np.ndarray, *, masking: Masking, seed: int) -> Row:
    """Hides single tokens of `inputs` int32 [B, N]; `indices` int64 [B] are the rows' numbers with the epoch.

    Returns:
        `inputs`: `tokens` int32 [B, L]; `targets` int32 [B, L], the tokens that were chosen, and -100 elsewhere.
    """
    body_BN = rows["inputs"]
    ids = (masking.before, masking.after)
    sides = [np.broadcast_to(np.array(side, np.int32), (len(body_BN), len(side))) for side in ids]
    tokens_BL = np.concatenate([sides[0], body_BN, sides[1]], axis=1)
    chosen_BL, how_BL, which_BL = (uniform_numbers(seed, stream, indices, tokens_BL.shape[1]) for stream in range(3))
    settings, ordinary = masking.settings, np.flatnonzero(~masking.is_special).astype(np.int32)
    is_chosen_BL = (chosen_BL < settings.probability) & ~masking.is_special[tokens_BL]
    is_masked_BL = is_chosen_BL & (how_BL < _MASKED)
    is_random_BL = is_chosen_BL & ~is_masked_BL & (how_BL < _MASKED + _RANDOM)
    seen_BL = np.where(is_masked_BL, np.int32(masking.mask), tokens_BL)
    seen_BL = np.where(is_random_BL, ordinary[(which_BL * len(ordinary)).astype(np.int64)], seen_BL)
    return {"inputs": {"tokens": seen_BL}, "targets": np.where(is_chosen_BL, tokens_BL, np.int32(IGNORED))}
