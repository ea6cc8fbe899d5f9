"""Rows of streams of tokens: text, JSON lines, documents, token shards, mixtures of them, and a random chain."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.config.data import (
    DocumentsData,
    JsonlData,
    MixtureData,
    SyntheticData,
    TextData,
    TokenData,
    added_tokens,
)
from jaxtrain.data.remote import with_local_paths
from jaxtrain.data.rows import ConcatenatedRows, Rows
from jaxtrain.data.sources.dataset import Data
from jaxtrain.data.sources.shards import shard_source
from jaxtrain.data.sources.texts import documents_of, row_length, tokenizer_lines
from jaxtrain.data.text.corrupt import SpanNoise, corrupted, noise_identity, noise_of, stream_length
from jaxtrain.data.token_rows import TokenRows
from jaxtrain.data.tokenizer import build_tokenizer, tokenizer_sha256
from jaxtrain.data.tokens import Span, TokenSource, encoded_source, split_tokens, token_dtype
from jaxtrain.errors import DataError

# Synthetic data is one data set: the run's seed decides only the order of its rows.
SYNTHETIC_SEED = 1729
# Each token has this many successors, so the best loss is well below the log of the vocabulary.
_NUM_SUCCESSORS = 4


def open_streams(
    config: TextData | JsonlData | DocumentsData | TokenData | MixtureData | SyntheticData,
    *,
    sequence_length: int | None,
    seed: int,
) -> Data:
    """Opens one or several streams of tokens.

    Args:
        config: Which ones, with what is hidden of their tokens.
        sequence_length: Tokens per row where `config` does not say it.
        seed: Decides what is hidden in training.

    Returns:
        Rows of inputs and targets int32 [L]; see `jaxtrain.data.text.corrupt` for those with hidden tokens.

    Raises:
        DataError: A stream cannot be read, is too short, or a special token is missing.
    """
    length = row_length(config.sequence_length, sequence_length)
    weights = None
    if isinstance(config, MixtureData):
        sources = _mixture(config)
        weights = [component.weight for component in config.components]
        fractions = [component.source.validation_fraction for component in config.components]
    elif isinstance(config, SyntheticData):
        # Its tokens follow when it is known how many of them a row takes.
        sources, fractions = [TokenSource((), config.vocab_size, None, "synthetic tokens")], []
    else:
        fractions = [config.validation_fraction]
        sources = [
            shard_source(config) if isinstance(config, TokenData) else encoded_source(config, documents_of(config))
        ]
    tokenizer_config = None if isinstance(config, TokenData | SyntheticData) else config.tokenizer
    noise = noise_of(config, sources[0], tokenizer_config, sequence_length=length)
    taken = length if noise is None else stream_length(noise, length)
    if isinstance(config, SyntheticData):
        sources = [markov_tokens(config, sequence_length=taken)]
        border = config.num_rows * taken
        # The parts share one token, the last target of training, so that both have all their rows.
        spans = [(Span(0, border + 1), Span(border, sources[0].num_tokens))]
    else:
        spans = [
            split_tokens(source, sequence_length=taken, validation_fraction=fraction)
            for source, fraction in zip(sources, fractions, strict=True)
        ]

    def rows(part: int, side: int) -> Rows:
        span = spans[part][side]
        assert span is not None
        return TokenRows(sources[part].segments, span=span, sequence_length=taken)

    train = [rows(part, 0) for part in range(len(sources))]
    held_out = [rows(part, 1) for part in range(len(sources)) if spans[part][1] is not None]
    mixed: list[Rows] = [train[0] if weights is None else ConcatenatedRows(train, weights=weights)]
    mixed += [held_out[0] if len(held_out) == 1 else ConcatenatedRows(held_out)] if held_out else []
    if noise is not None:
        # The same tokens are hidden in evaluation whatever the seed of the run is, so that runs can be compared.
        mixed = [corrupted(side, noise, seed=seed if i == 0 else 0) for i, side in enumerate(mixed)]
    fingerprint = _fingerprint(sources, spans, weights)
    fingerprint |= {"sequence_length": length, "num_rows": sum(map(len, train))}
    if noise is not None and config.corruption is not None:
        fingerprint["corruption"] = noise_identity(config.corruption, noise)
    vocab_size = max(source.vocab_size for source in sources) if noise is None else noise.vocab_size
    decoder_length = noise.sizes.targets_length if isinstance(noise, SpanNoise) else None
    return Data(
        train=mixed[0],
        validation=mixed[1] if held_out else None,
        fingerprint=fingerprint,
        vocab_size=vocab_size,
        input_shape=(length,),
        unit="tokens",
        units_per_row=length + (decoder_length or 0),
        tokenizer=sources[0].tokenizer,
        description=(
            *_described(sources, spans, weights),
            f"{sum(map(len, train)):,} training rows and {sum(map(len, held_out)):,} validation rows "
            f"of {length:,} tokens",
            *tokenizer_lines(sources[0].tokenizer, vocab_size),
        ),
        decoder_length=decoder_length,
        skipped=tuple(source.skipped for source in sources if source.skipped is not None),
    )


def _fingerprint(
    sources: Sequence[TokenSource], spans: Sequence[tuple[Span, Span | None]], weights: Sequence[float] | None
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


def _described(
    sources: Sequence[TokenSource], spans: Sequence[tuple[Span, Span | None]], weights: Sequence[float] | None
) -> list[str]:
    lines = []
    for i, source in enumerate(sources):
        documents = "" if source.num_documents is None else f"{source.num_documents:,} documents, "
        share = "" if weights is None else f" ({weights[i] / sum(weights):.0%} of the rows)"
        kept = spans[i][1]
        held_out = 0 if kept is None else kept.stop - kept.start
        lines.append(
            f"{source.label}{share}: {documents}{source.num_tokens:,} tokens, {held_out:,} of them for validation"
        )
    return lines


def _mixture(config: MixtureData) -> list[TokenSource]:
    """Opens the sources of a mixture with its tokenizer; BPE is trained on all its texts.

    Token shards contain the ids of their own tokenizer; a mixture of shards alone uses that one.

    Raises:
        DataError: A source cannot be read, or shards were made with another tokenizer than the rest.
    """
    components = [with_local_paths(component.source) for component in config.components]
    shards = {i: shard_source(source) for i, source in enumerate(components) if isinstance(source, TokenData)}
    documents = {i: documents_of(source) for i, source in enumerate(components) if not isinstance(source, TokenData)}
    tokenizer = None
    known = [(shard.identity["tokenizer_sha256"], shard.tokenizer, shard.label) for shard in shards.values()]
    if documents:
        texts = itertools.chain.from_iterable(one.read() for one in documents.values())
        tokenizer = build_tokenizer(config.tokenizer, texts, special=added_tokens(config))
        known.insert(0, (tokenizer_sha256(tokenizer), tokenizer, "the texts"))
    for digest, own, label in known[1:]:
        ends = {one.end_of_text for one in (own, known[0][1]) if one is not None}
        if digest != known[0][0] or len(ends) > 1:
            raise DataError(
                f"{label} was made with another tokenizer than the rest of the mixture, or ends documents otherwise; "
                f"set data.tokenizer.kind=file data.tokenizer.path={label}/tokenizer.json, or prepare it again"
            )
    return [
        shards[i] if i in shards else encoded_source(source, documents[i], tokenizer=tokenizer)
        for i, source in enumerate(components)
    ]


def markov_tokens(config: SyntheticData, *, sequence_length: int) -> TokenSource:
    """Generates the tokens of all rows by a fixed random Markov chain of order 1.

    The entropy of the chain, about 1.2 nats, is the lowest loss that a model can reach; the uniform distribution has a
    loss of log(vocab_size).

    Args:
        config: Number of rows and of token ids.
        sequence_length: Tokens per row.
    """
    random = np.random.default_rng(SYNTHETIC_SEED)
    successors_VxS = random.integers(0, config.vocab_size, (config.vocab_size, _NUM_SUCCESSORS))
    cumulative_VxS = np.cumsum(random.dirichlet(np.full(_NUM_SUCCESSORS, 2.0), config.vocab_size), axis=1)
    num_rows = config.num_rows + max(1, config.num_rows // 8)
    # One chain per row, all advanced together: a Python loop over single tokens would take minutes.
    tokens_RxL = np.empty((num_rows, sequence_length), token_dtype(config.vocab_size))
    state_R = random.integers(0, config.vocab_size, num_rows)
    for position in range(sequence_length):
        tokens_RxL[:, position] = state_R
        drawn_R = (random.random(num_rows)[:, None] > cumulative_VxS[state_R]).sum(axis=1)
        state_R = successors_VxS[state_R, np.minimum(drawn_R, _NUM_SUCCESSORS - 1)]
    # The last row of each part needs one more token, as its last target.
    tokens = np.append(tokens_RxL.reshape(-1), tokens_RxL[0, :1])
    return TokenSource(
        segments=(tokens,),
        vocab_size=config.vocab_size,
        tokenizer=None,
        label="synthetic tokens",
        identity={"kind": "synthetic", "task": "tokens", "vocab_size": config.vocab_size, "seed": SYNTHETIC_SEED},
    )
