"""Mixtures of several token sources with one tokenizer."""

import itertools
from collections.abc import Iterator

from jaxtrain.config.data import MixtureData, TokenData, added_tokens
from jaxtrain.data.remote import with_local_paths
from jaxtrain.data.sources.shards import shard_source
from jaxtrain.data.sources.texts import TextSource, documents_of, text_source
from jaxtrain.data.tokenizer import build_tokenizer, tokenizer_sha256
from jaxtrain.data.tokens import TokenSource
from jaxtrain.errors import DataError


def open_mixture(config: MixtureData) -> list[TokenSource]:
    """Opens the sources of a mixture with the mixture's tokenizer; BPE is trained on all its texts.

    Token shards contain the ids of their own tokenizer; a mixture of shards alone uses that one.

    Args:
        config: The sources and their tokenizer.

    Returns:
        One stream per component, in the order of the components.

    Raises:
        DataError: A source cannot be read, or shards were made with another tokenizer than the rest.
    """
    sources = [with_local_paths(component.source) for component in config.components]
    texts = [source for source in sources if not isinstance(source, TokenData)]
    shards = {i: shard_source(source) for i, source in enumerate(sources) if isinstance(source, TokenData)}
    tokenizer = build_tokenizer(config.tokenizer, _read(texts), special=added_tokens(config)) if texts else None
    expected = tokenizer_sha256(tokenizer) if tokenizer else None
    for shard in shards.values():
        found = shard.identity["tokenizer_sha256"]
        expected = expected or found
        ends = [one.end_of_text for one in (tokenizer, shard.tokenizer) if one is not None]
        if found == expected and len(set(ends)) > 1:
            raise DataError(
                f"documents of {shard.label} end with another token than those of the rest of the mixture; set "
                "data.tokenizer.end to that of the shards, or prepare them again"
            )
        if found != expected:
            raise DataError(
                f"{shard.label} was made with another tokenizer than the rest of the mixture; "
                f"set data.tokenizer.kind=file data.tokenizer.path={shard.label}/tokenizer.json, or prepare it again"
            )
    return [
        shards[i] if isinstance(source, TokenData) else text_source(source, tokenizer=tokenizer)
        for i, source in enumerate(sources)
    ]


def _read(texts: list[TextSource]) -> Iterator[str]:
    return itertools.chain.from_iterable(documents_of(text).read() for text in texts)
