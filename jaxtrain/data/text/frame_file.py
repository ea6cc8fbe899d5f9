"""The frame of a row as the post-processor of a tokenizer.json, by which other programs make the same rows."""

import json
from collections.abc import Sequence
from typing import Any

from jaxtrain.data.special import SpecialIds
from jaxtrain.data.text.frame import Frame, make_frame
from jaxtrain.data.tokenizer import BpeTokenizer
from jaxtrain.errors import DataError

_TEXTS = {"first": "A", "second": "B"}


def framed_file(text: str, tokenizer: BpeTokenizer, special: SpecialIds, *, pair: bool) -> str | None:
    """Adds the frame of rows to a tokenizer.json that does not say it.

    Args:
        text: The tokenizer.json.
        tokenizer: What it makes.
        special: Its special tokens.
        pair: Whether the rows have two texts.

    Returns:
        The tokenizer.json with a post-processor; None where it has one that adds tokens, or nothing is to be added.

    Raises:
        DataError: A pair has no token between its texts.
    """
    frame = make_frame(tokenizer, special, pair=pair)
    if not frame.num_special or any(isinstance(entry, int) for entry, _ in tokenizer.frame(pair=pair)):
        return None
    content = json.loads(text)
    single, double = make_frame(tokenizer, special, pair=False), _of_pairs(tokenizer, special)
    ids = dict.fromkeys(entry for entry, _ in (*single.entries, *double.entries) if isinstance(entry, int))
    names = {i: tokenizer.token_name(i) for i in ids}
    template = {
        "type": "TemplateProcessing",
        "single": _pieces(single, names),
        "pair": _pieces(double, names),
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()},
    }
    before = content.get("post_processor")
    # One that adds no tokens moves the places of characters, and goes on doing so.
    content["post_processor"] = (
        template if before is None else {"type": "Sequence", "processors": [*_parts(before), template]}
    )
    return json.dumps(content, ensure_ascii=False, indent=2)


def _of_pairs(tokenizer: BpeTokenizer, special: SpecialIds) -> Frame:
    try:
        return make_frame(tokenizer, special, pair=True)
    except DataError:  # of texts alone: readers ask for a pair all the same
        return Frame((*make_frame(tokenizer, special, pair=False).entries, ("second", 1)))


def _pieces(frame: Frame, names: dict[int, str | None]) -> list[dict[str, Any]]:
    return [
        {"SpecialToken": {"id": names[entry], "type_id": kind}}
        if isinstance(entry, int)
        else {"Sequence": {"id": _TEXTS[entry], "type_id": kind}}
        for entry, kind in frame.entries
    ]


def _parts(processor: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return processor["processors"] if processor.get("type") == "Sequence" else [processor]
