"""Hides tokens of full rows: single ones (BERT), or spans (T5); what is hidden depends on the seed and the row alone.

Shapes: B rows, N tokens of the stream per row, L tokens of a row, V vocabulary, P spans.
Sources: Devlin et al. 2019 (arXiv 1810.04805), section 3.1; Raffel et al. 2020 (arXiv 1910.10683), section 3.1.4.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.config.data import (
    Corruption,
    MaskCorruption,
    SpanCorruption,
    SpanSizes,
    TokenizerConfig,
    added_tokens,
    sentinel_name,
    span_sizes,
)
from jaxtrain.data.permutation import uniform_numbers
from jaxtrain.data.rows import IGNORED, MappedRows, Row, Rows
from jaxtrain.data.sources.texts import make_frame
from jaxtrain.data.sources.tokens import TokenSource
from jaxtrain.data.tokenizer import NamedTokens, NumberedTokens, needed, special_ids
from jaxtrain.errors import DataError

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


@dataclass(frozen=True)
class SpanNoise:
    """How spans of a row are moved to the targets: sizes, the ids that end texts and start the decoder.

    `sentinels`, int32 [P], stand for the spans.
    """

    sizes: SpanSizes
    end: int
    start: int
    sentinels: np.ndarray
    vocab_size: int


Noise = Masking | SpanNoise


def noise_of(
    config: Any,
    source: TokenSource,
    tokenizer: TokenizerConfig | None,
    *,
    sequence_length: int,
) -> Noise | None:
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
    if isinstance(config.corruption, SpanCorruption):
        return _span_noise(config.corruption, named, special.end, sequence_length=sequence_length)
    entries = [entry for entry, _ in make_frame(named, special, pair=False, sequence_length=sequence_length).entries]
    place, ids = entries.index("first"), [entry for entry in entries if isinstance(entry, int)]
    mask = needed(special.mask, "mask", what="data.corruption.kind=mask")
    is_special = np.zeros(named.vocab_size, bool)
    is_special[[*named.special_ids(), mask, *ids]] = True
    return Masking(config.corruption, tuple(ids[:place]), tuple(ids[place:]), mask, is_special, named.vocab_size)


def _span_noise(
    corruption: SpanCorruption, tokenizer: NamedTokens, end: int | None, *, sequence_length: int
) -> SpanNoise:
    sizes = span_sizes(corruption, sequence_length)
    end = needed(end, "end", what="data.corruption.kind=spans")
    names = map(sentinel_name, range(sizes.num_spans))
    sentinels = [i for i in map(tokenizer.token_id, names) if i is not None]
    if len(sentinels) < sizes.num_spans:
        raise DataError(
            f"data.corruption.kind=spans hides {sizes.num_spans} spans per row of {sequence_length} tokens, and the "
            f"tokenizer has {len(sentinels)} sentinels (<extra_id_0>, ...); use data.tokenizer.kind=bpe for 100 of "
            "them, lower data.sequence_length or raise data.corruption.mean_span_length"
        )
    return SpanNoise(sizes, end, corruption.decoder_start, np.array(sentinels, np.int32), tokenizer.vocab_size)


def corrupted(rows: Rows, noise: Noise, *, seed: int) -> MappedRows:
    """Returns the rows of a stream (`inputs` int32 [N]) with tokens hidden by the seed, in the same training order."""
    if isinstance(noise, SpanNoise):
        return MappedRows(rows, functools.partial(_move_spans, noise=noise, seed=seed))
    return MappedRows(rows, functools.partial(_mask_rows, masking=noise, seed=seed))


def stream_length(noise: Noise, sequence_length: int) -> int:
    """Returns N, how many tokens of the stream a row takes."""
    if isinstance(noise, SpanNoise):
        return noise.sizes.num_tokens
    return sequence_length - len(noise.before) - len(noise.after)


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


def _move_spans(rows: Row, indices: np.ndarray, *, noise: SpanNoise, seed: int) -> Row:
    """Replaces spans of `inputs` int32 [B, N] by sentinels, and lets the targets name the spans after their sentinels.

    Returns:
        `inputs`: `tokens` int32 [B, L] and `decoder_tokens` int32 [B, T]; `targets` int32 [B, T]. Every row is full, so
        that nothing marks padding.
    """
    tokens_BN, sizes = rows["inputs"], noise.sizes
    kept_BP, hidden_BP = (
        _random_parts(total, sizes.num_spans, seed=seed, stream=stream, indices=indices)
        for stream, total in enumerate((sizes.num_tokens - sizes.num_noise, sizes.num_noise))
    )
    lengths = np.stack([kept_BP, hidden_BP], axis=-1).reshape(len(indices), -1)
    starts = np.cumsum(lengths, axis=1) - lengths
    begins_BN = np.zeros(tokens_BN.shape, np.int64)
    np.put_along_axis(begins_BN, starts, 1, axis=1)
    piece_BN = np.cumsum(begins_BN, axis=1) - 1  # 0, 2, ... are kept, 1, 3, ... are hidden
    sentinels_BN = noise.sentinels[piece_BN // 2]
    begins_BN, is_hidden_BN = begins_BN.astype(bool), piece_BN % 2 == 1
    inputs = _with_sentinels(tokens_BN, sentinels_BN, is_hidden_BN, begins_BN, end=noise.end)
    targets = _with_sentinels(tokens_BN, sentinels_BN, ~is_hidden_BN, begins_BN, end=noise.end)
    decoder = np.concatenate([np.full((len(targets), 1), noise.start, np.int32), targets[:, :-1]], axis=1)
    return {"inputs": {"tokens": inputs, "decoder_tokens": decoder}, "targets": targets}


def _with_sentinels(
    tokens_BN: np.ndarray, sentinels_BN: np.ndarray, is_left_out: np.ndarray, begins: np.ndarray, *, end: int
) -> np.ndarray:
    """Returns the tokens with one sentinel for each span that is left out, and the end; every row is as long."""
    kept = np.where(is_left_out, sentinels_BN, tokens_BN)[~is_left_out | begins].reshape(len(tokens_BN), -1)
    return np.concatenate([kept, np.full((len(kept), 1), end)], axis=1).astype(np.int32)


def _random_parts(total: int, count: int, *, seed: int, stream: int, indices: np.ndarray) -> np.ndarray:
    """Divides `total` into `count` parts of at least 1, each division as likely as another: int64 [B, count]."""
    drawn = uniform_numbers(seed, stream, indices, total - 1)
    cuts = np.sort(np.argsort(drawn, axis=1)[:, : count - 1] + 1, axis=1)
    ends = np.full((len(indices), 1), total)
    return np.diff(np.concatenate([np.zeros_like(ends), cuts, ends], axis=1), axis=1)


def noise_identity(corruption: Corruption, noise: Noise) -> dict[str, object]:
    """Returns JSON values that identify what is hidden, apart from the seed."""
    found: dict[str, object] = corruption.model_dump(mode="json")
    if isinstance(noise, SpanNoise):
        return {**found, **dataclasses.asdict(noise.sizes), "end": noise.end, "start": noise.start}
    return {**found, "before": list(noise.before), "after": list(noise.after), "mask": noise.mask}
