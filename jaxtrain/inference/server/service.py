"""From an opened model to what the endpoints serve: its programs are compiled here, before the first request."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtrain.errors import ConfigError
from jaxtrain.inference.engine.engine import Engine, checked_length
from jaxtrain.inference.server.app import Service
from jaxtrain.inference.server.embedder import Embedder
from jaxtrain.inference.server.incoming import Limits
from jaxtrain.inference.server.prompts import PromptReader
from jaxtrain.inference.server.served import Served

# Of a model that takes longer texts, unless more is asked for: the cache of every slot is of this length.
_LONGEST = 4096
# A character of a prompt takes at most so many bytes of JSON, and a token is rarely longer than so many of them.
_BYTES_PER_TOKEN = 64
_LEAST_BODY = 2**20


@dataclass(frozen=True)
class Started:
    """A service that answers, and the way to end it.

    Attributes:
        service: what the endpoints serve.
        close: ends the engine; what runs is finished first.
        summary: what is served, in words.
    """

    service: Service
    close: Callable[[], None]
    summary: str


def start_service(
    served: Served, *, slots: int, length: int | None, queue: int, speculate: int = 0, api_key: str | None = None
) -> Started:
    """Compiles what a model needs to be asked.

    Args:
        served: from `open_served`.
        slots: requests that run at a time.
        length: tokens of prompt and answer together, or of a text to embed; None: all that the model takes, up to
            4,096.
        queue: requests that may wait while all slots are taken.
        speculate: see `Engine`.
        api_key: that clients must give; None: none.

    Raises:
        ConfigError: a number that does not fit the model.
    """
    model = served.sharded_model.model
    vocab_size = served.tokenizer.vocab_size if model.vocab_size is None else model.vocab_size
    reader = PromptReader(served.tokenizer, served.chat, vocab_size=vocab_size, special=served.special)
    if served.embeds:
        embedder = Embedder(served, length=embedded_length(served, length))
        embedder.start()
        service = _service(
            served, reader, embedder=embedder, length=embedder.length, most=slots + queue, api_key=api_key
        )
        return Started(service, lambda: None, f"embeddings of texts of up to {embedder.length} tokens")
    if length is None and model.decoder is not None:
        short = model.decoder.short_length or _LONGEST
        length = min(_LONGEST, short, model.decoder.max_length)
    elif length is not None and model.decoder is not None:
        length = checked_length(model.decoder, length, what="--length", equals=" ")
    engine = Engine(served.sharded_model, served.params, slots=slots, length=length, queue=queue, speculate=speculate)
    engine.start()
    service = _service(served, reader, engine=engine, length=engine.length, most=slots + queue, api_key=api_key)
    return Started(
        service, lambda: engine.close(drain=True), f"{slots} slots of {engine.length} tokens, {queue} may wait"
    )


def embedded_length(served: Served, length: int | None) -> int:
    """Tokens of the longest text that is embedded.

    Raises:
        ConfigError: more than the model has positions.
    """
    if length is None:
        return _LONGEST if served.max_length is None else min(_LONGEST, served.max_length)
    if served.max_length is not None and length > served.max_length:
        raise ConfigError(
            f"--length {length} exceeds the {served.max_length} positions of {served.name}; use at most those"
        )
    return length


def _service(
    served: Served,
    reader: PromptReader,
    *,
    length: int,
    most: int,
    api_key: str | None,
    engine: Engine | None = None,
    embedder: Embedder | None = None,
) -> Service:
    limits = Limits(body_bytes=max(_LEAST_BODY, length * _BYTES_PER_TOKEN))
    compiled = None if embedder is None else lambda: embedder.compiled
    return Service(served.name, served.created, reader, engine, embedder, length, most, api_key, limits, compiled)
