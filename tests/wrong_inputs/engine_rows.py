"""Wrong inputs of the engine and of what it is asked."""

import functools
from typing import Any

import given

import jaxtrain as jt


@functools.cache
def sharded() -> jt.ShardedModel:
    return jt.shard_model(given.text_model(), mesh=given.one_device())


def engine(**changed: Any) -> jt.Engine:
    """An engine that is not started, on no parameters: what is wrong is found before either matters."""
    return jt.Engine(changed.pop("model", sharded()), changed.pop("params", {}), **changed)


def closed() -> jt.Engine:
    ended = engine()
    ended.close()
    return ended


def request(**changed: Any) -> jt.Request:
    return jt.Request(**{"tokens": (1, 2), "new_tokens": 4, "sampling": jt.Sampling(), **changed})


ROWS = {
    "Engine: a model on no mesh": (lambda: engine(model=given.text_model()), "not a Model", "Engine(sharded_model"),
    "Engine: a state": (lambda: engine(params=None), "not None", "Engine(sharded_model, params"),
    "Engine: no slots": (lambda: engine(slots=0), "not 0", "slots=8"),
    "Engine: more positions than the model has": (lambda: engine(length=9), "length=9", "use length=8"),
    "Engine: a length of words": (lambda: engine(length="8"), "'8'", "length=8"),
    "Engine: an empty chunk": (lambda: engine(chunk=0), "not 0", "chunk=128"),
    "Engine: a cache of 4 bits": (lambda: engine(cache_dtype="int4"), "'int4'", "cache_dtype='bfloat16'"),
    "Engine: no queue": (lambda: engine(queue=0), "not 0", "queue=256"),
    "Engine: a draft below 0": (lambda: engine(speculate=-1), "not -1", "speculate=4"),
    "Engine: reuse of 1": (lambda: engine(reuse_prefixes=1), "not 1", "reuse_prefixes=True"),
    "Engine: a model that does not generate": (
        lambda: engine(model=jt.shard_model(given.model(), mesh=given.one_device())),
        "does not generate text",
        "model",
    ),
    "Engine.submit: a text": (lambda: engine().submit("hello"), "'hello'", "submit(Request("),
    "Engine.submit: before the start": (lambda: engine().submit(request()), "does not run", "call start() first"),
    "Engine.submit: after the end": (lambda: closed().submit(request()), "is closed", "start another one"),
    "Request: a text": (lambda: request(tokens="hello"), "'hello'", "Request((72, 105)"),
    "Request: no tokens": (lambda: request(tokens=()), "is empty", "at least one token"),
    "Request: an id below 0": (lambda: request(tokens=(1, -1)), "not -1", "0 or more"),
    "Request: a token that is a text": (lambda: request(tokens=["a"]), "'a'", "Request((72, 105)"),
    "Request: no new tokens": (lambda: request(new_tokens=0), "not 0", "1 or more"),
    "Request: a temperature": (lambda: request(sampling=0.5), "not 0.5", "sampling=Sampling()"),
    "Request: a seed below 0": (lambda: request(seed=-1), "not -1", "0 or more"),
    "Request: a stop token that is a text": (lambda: request(stop_tokens="</s>"), "'</s>'", "stop_tokens={0}"),
    "Request: 21 alternatives": (lambda: request(top=21), "top is 21", "at most 20"),
}
