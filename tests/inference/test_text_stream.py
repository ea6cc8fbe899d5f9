"""Text of tokens as they come: whole characters, stop strings, and the spaces of a continuation."""

import pytest
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models

from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.text_stream import TextStream


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
    "letters at once": (BYTES, b"abc", {}, ["a", "b", "c", ""]),
    "a character when its bytes are there": (BYTES, "é€".encode(), {}, ["", "é", "", "", "€", ""]),
    "a character that never ends": (BYTES, b"a\xe2\x82", {}, ["a", "", "", "\ufffd"]),
    "a broken character": (BYTES, b"\xe2\x82a", {}, ["", "", "\ufffda", ""]),
    "bytes that begin nothing do not wait": (BYTES, b"\xff" * 5, {}, ["", "", "", "\ufffd", "\ufffd", "\ufffd" * 3]),
    "a stop string": (BYTES, b"abENDc", dict(stop=["END"]), ["a", "b", "", "", "", "", ""]),
    "a stop string that is none": (BYTES, b"aENx", dict(stop=["END"]), ["a", "", "", "ENx", ""]),
    "a beginning at the end": (BYTES, b"aEN", dict(stop=["END"]), ["a", "", "", "EN"]),
    "a beginning in a beginning": (BYTES, b"aaab", dict(stop=["aab"]), ["", "", "a", "", ""]),
    "the first of two stops": (BYTES, b"xyz", dict(stop=["z", "yz"]), ["x", "", "", ""]),
    "a stop of one character of two bytes": (BYTES, "aéb".encode(), dict(stop=["é"]), ["a", "", "", "", ""]),
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
    assert stream.text == "".join(wanted)
    ends = [chr(token) for token in options.get("stop_tokens", ())] + list(options.get("stop", ()))
    text = tokenizer.decode(list(tokens)) if tokenizer is BYTES else ""
    assert stream.stopped == any(end in text for end in ends)


def test_characters_are_never_divided_whatever_the_text():
    text = "naïve 🙂 日本語 e\u0301 <|x|> \n\t end"
    stream = TextStream(BYTES, stop=["never"])
    pieces = fed(stream, text.encode())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["END", ["END", ""], [3], None], ids=str)
def test_a_stop_that_is_no_text_is_one_line(stop):
    with pytest.raises(ConfigError, match=r"^stop (is|has) [^\n]*; use [^\n]*\['END'\]$"):
        TextStream(BYTES, stop=stop)
