"""Text of tokens as they come: whole characters, stop strings, and the spaces of a continuation."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers

from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.inference.decoding import Generated, Writing
from jaxtrain.inference.generate import TextStream, whole_texts
from jaxtrain.inference.sampling import Sampling
from jaxtrain.models.decoder import Decoder


def spaced() -> BpeTokenizer:
    """Words with SentencePiece's mark for a space, and bytes for what is no word."""
    words = ["<unk>", "a", "▁the", "▁cat", "s", "</s>", *(f"<0x{byte:02X}>" for byte in "é€".encode())]
    model = Model(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(parts)  # pyright: ignore[reportAttributeAccessIssue] a setter
    return BpeTokenizer(model)


def fed(stream: TextStream, tokens) -> list[str]:
    return [*(stream.feed(token) for token in tokens), stream.finish()]


BYTES = ByteTokenizer()
ROWS = {
    "a character when its bytes are there": (BYTES, "é€".encode(), {}, ["", "é", "", "", "€", ""]),
    "a character that never ends": (BYTES, b"a\xe2\x82", {}, ["a", "", "", "\ufffd"]),
    "bytes that begin nothing do not wait": (BYTES, b"\xff" * 5, {}, ["", "", "", "\ufffd", "\ufffd", "\ufffd" * 3]),
    "a stop string": (BYTES, b"abENDc", dict(stop=["END"]), ["a", "b", "", "", "", "", ""]),
    "a stop string that is none": (BYTES, b"aENx", dict(stop=["END"]), ["a", "", "", "ENx", ""]),
    "a beginning in a beginning": (BYTES, b"aaab", dict(stop=["aab"]), ["", "", "a", "", ""]),
    "a stop token": (BYTES, b"ab\x00c", dict(stop_tokens=[0]), ["a", "b", "", "", ""]),
    "a stop token gives out what was held": (BYTES, b"aE\x00", dict(stop=["END"], stop_tokens=[0]), ["a", "", "E", ""]),
    "spaces before words stay": (spaced(), [2, 3, 4], {}, [" the", " cat", "s", ""]),
    "bytes between words": (spaced(), [2, 6, 7, 3], {}, [" the", "", "é", " cat", ""]),
    "a byte that is wrong": (spaced(), [2, 6, 3], {}, [" the", "", "\ufffd cat", ""]),
}  # fmt: skip


@pytest.mark.parametrize(("tokenizer", "tokens", "options", "wanted"), ROWS.values(), ids=ROWS)
def test_what_each_token_gives_out(tokenizer, tokens, options, wanted):
    stream = TextStream(tokenizer, **options)
    assert fed(stream, tokens) == wanted
    ends = [chr(token) for token in options.get("stop_tokens", ())] + list(options.get("stop", ()))
    text = tokenizer.decode(list(tokens)) if tokenizer is BYTES else ""
    assert stream.stopped == any(end in text for end in ends)


def bytes_alone() -> BpeTokenizer:
    """A token for each byte; its decoder writes all of a row of them as U+FFFD if one is wrong."""
    model = Model(models.BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)}, merges=[], byte_fallback=True))
    parts = [decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence(parts)  # pyright: ignore[reportAttributeAccessIssue] a setter
    return BpeTokenizer(model)


def test_a_long_row_of_bytes_that_are_no_text_is_no_long_work():
    tokenizer, decoded = bytes_alone(), 0

    class Counted:
        def encode(self, text):
            return [97]

        def decode(self, ids):
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids)

    assert "".join(fed(TextStream(Counted()), [0x80] * 2000)) == "\ufffd" * 2000
    assert decoded < 100 * 2000


def test_only_a_text_that_stands_alone_loses_its_first_space(monkeypatch):
    made = Model(models.BPE(vocab={"▁": 0, "a": 1, "b": 2, "▁b": 3}, merges=[("▁", "b")]))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # pyright: ignore[reportAttributeAccessIssue] a setter
    made.decoder = decoders.Metaspace(prepend_scheme="first")  # pyright: ignore[reportAttributeAccessIssue] a setter
    found = Generated(np.full((2, 1), 3), np.ones(2, np.int32))
    monkeypatch.setattr("jaxtrain.inference.generate.generation_pieces", lambda *_, **__: iter([found]))
    decoder = Decoder(lambda *_: {}, lambda *_: None, max_length=8)
    model: Any = SimpleNamespace(model=SimpleNamespace(decoder=decoder))
    found = whole_texts(model, {}, BpeTokenizer(made), ["a", ""], Writing(1, Sampling(0)))
    assert found == ["a b", "b"]
