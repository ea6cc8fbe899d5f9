"""Rows of streams of tokens: text, JSON lines, documents, token shards, mixtures of them, and a random chain."""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxtrain.config.data import (
    DocumentsData,
    JsonlData,
    MixtureData,
    SyntheticData,
    TextData,
    TokenData,
    added_tokens,
)
from jaxtrain.data.dataset import Data
from jaxtrain.data.files import with_local_paths
from jaxtrain.data.permutation import Span
from jaxtrain.data.rows import ConcatenatedRows, Rows, TokenRows
from jaxtrain.data.sources.builtin import markov_tokens
from jaxtrain.data.sources.corruption import masked, masking_of
from jaxtrain.data.sources.shards import shard_source
from jaxtrain.data.sources.tokens import TokenSource, documents_of, encoded_source, split_tokens
from jaxtrain.data.tokenizer import ByteTokenizer, build_tokenizer, tokenizer_sha256
from jaxtrain.errors import DataError

# The training and the validation tokens of a stream.
_Sides = tuple[Span, Span | None]


def open_streams(
    config: TextData | JsonlData | DocumentsData | TokenData | MixtureData | SyntheticData,
    *,
    sequence_length: int,
    seed: int,
) -> Data:
    """Opens one or several streams of tokens; the seed decides what is hidden in training.

    Returns:
        Rows of inputs and targets int32 [L]; see `jaxtrain.data.sources.corruption` for those with hidden tokens.
    """
    weights = [component.weight for component in config.components] if isinstance(config, MixtureData) else None
    sources = _sources(config)
    tokenizer_config = None if isinstance(config, TokenData | SyntheticData) else config.tokenizer
    masking = masking_of(config, sources[0], tokenizer_config, sequence_length=sequence_length)
    taken = sequence_length if masking is None else sequence_length - masking.num_around
    if isinstance(config, SyntheticData):
        sources = [markov_tokens(config, sequence_length=taken)]
        border = config.num_rows * taken
        # The parts share one token, the last target of training, so that both have all their rows.
        spans: list[_Sides] = [(Span(0, border + 1), Span(border, sources[0].num_tokens))]
    else:
        parts = [component.source for component in config.components] if isinstance(config, MixtureData) else [config]
        spans = [
            split_tokens(source, sequence_length=taken, validation_fraction=part.validation_fraction)
            for source, part in zip(sources, parts, strict=True)
        ]
    train, held_out = (
        [
            TokenRows(source.segments, span=span, sequence_length=taken)
            for source, sides in zip(sources, spans, strict=True)
            if (span := sides[side]) is not None
        ]
        for side in (0, 1)
    )
    rows: list[Rows] = [ConcatenatedRows(train, weights=weights) if weights else train[0]]
    rows += [ConcatenatedRows(held_out) if len(held_out) > 1 else held_out[0]] if held_out else []
    fingerprint = _fingerprint(sources, spans, weights)
    fingerprint |= {"sequence_length": sequence_length, "num_rows": sum(map(len, train))}
    vocab_size = max(source.vocab_size for source in sources)
    if masking is not None:
        # The same tokens are hidden in evaluation whatever the seed of the run is, so that runs can be compared.
        rows = [masked(side, masking, seed=seed if i == 0 else 0) for i, side in enumerate(rows)]
        fingerprint["corruption"] = masking.identity()
        vocab_size = masking.vocab_size
    counts = f"{sum(map(len, train)):,} training rows and {sum(map(len, held_out)):,} validation rows"
    tokenizer = sources[0].tokenizer
    kind = "none" if tokenizer is None else "bytes" if isinstance(tokenizer, ByteTokenizer) else "byte-level BPE"
    return Data(
        train=rows[0],
        validation=rows[1] if held_out else None,
        fingerprint=fingerprint,
        vocab_size=vocab_size,
        input_shape=(sequence_length,),
        unit="tokens",
        units_per_row=sequence_length,
        tokenizer=tokenizer,
        description=(
            *_described(sources, spans, weights),
            f"{counts} of {sequence_length:,} tokens",
            f"tokenizer: {kind}, {vocab_size:,} ids",
        ),
    )


def _sources(config: Any) -> list[TokenSource]:
    """Opens the streams of a config with one tokenizer; BPE is trained on all its texts.

    Token shards contain the ids of their own tokenizer; a mixture of shards alone uses that one.
    """
    if isinstance(config, SyntheticData):  # its tokens follow when it is known how many of them a row takes
        return [TokenSource((), config.vocab_size, None, "synthetic tokens")]
    if not isinstance(config, MixtureData):
        return [shard_source(config) if isinstance(config, TokenData) else encoded_source(config, documents_of(config))]
    parts = [with_local_paths(component.source) for component in config.components]
    shards = {i: shard_source(part) for i, part in enumerate(parts) if isinstance(part, TokenData)}
    documents = {i: documents_of(part) for i, part in enumerate(parts) if not isinstance(part, TokenData)}
    known = [(shard.identity["tokenizer_sha256"], shard.tokenizer, shard.label) for shard in shards.values()]
    tokenizer = None
    if documents:
        texts = itertools.chain.from_iterable(one.read() for one in documents.values())
        tokenizer = build_tokenizer(config.tokenizer, texts, special=added_tokens(config))
        known.insert(0, (tokenizer_sha256(tokenizer), tokenizer, ""))
    for digest, own, label in known[1:]:
        ends = {one.end_of_text for one in (own, known[0][1]) if one is not None}
        if digest != known[0][0] or len(ends) > 1:
            raise DataError(
                f"{label} has another tokenizer or end of document than the rest of the mixture; "
                f"set data.tokenizer.kind=file data.tokenizer.path={label}/tokenizer.json, or prepare it again"
            )
    return [
        shards[i] if i in shards else encoded_source(part, documents[i], tokenizer=tokenizer)
        for i, part in enumerate(parts)
    ]


def _fingerprint(
    sources: Sequence[TokenSource], spans: Sequence[_Sides], weights: Sequence[float] | None
) -> dict[str, Any]:
    identities = [
        {
            **source.identity,
            "num_tokens": source.num_tokens,
            "split": [[span.start, span.stop] for span in sides if span is not None],
        }
        for source, sides in zip(sources, spans, strict=True)
    ]
    if weights is None:
        return identities[0]
    return {"kind": "mixture", "components": identities, "weights": list(weights)}


def _described(sources: Sequence[TokenSource], spans: Sequence[_Sides], weights: Sequence[float] | None) -> list[str]:
    lines = []
    for i, (source, (_, kept)) in enumerate(zip(sources, spans, strict=True)):
        documents = "" if source.num_documents is None else f"{source.num_documents:,} documents, "
        share = "" if weights is None else f" ({weights[i] / sum(weights):.0%} of the rows)"
        held_out = 0 if kept is None else kept.stop - kept.start
        lines.append(
            f"{source.label}{share}: {documents}{source.num_tokens:,} tokens, {held_out:,} of them for validation"
        )
    return lines
