"""The token that ends documents where a file or a config names it: it is kept beside tokenizer.json, and identified."""

import contextlib
import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtrain.data.special import END_KEY, OLDER_SETTINGS_FILE, SETTINGS_FILE, names_beside
from jaxtrain.runtime.files import write_bytes_atomic


@runtime_checkable
class EndedTokenizer(Protocol):
    """A tokenizer whose end of text may be another token than its names say; see `BpeTokenizer`."""

    usual_end: int | None
    end_of_text: int | None

    def token_id(self, name: str) -> int | None:
        """Returns the id of a token; None: there is no such token."""
        ...

    def token_name(self, token: int) -> str | None:
        """Returns the name of a token; None: there is no such token."""
        ...


def save_end(tokenizer: EndedTokenizer, path: Path) -> None:
    """Writes the name of the end of text beside a tokenizer.json, which has no place for it, where it is not known."""
    said = tokenizer.token_id(names_beside(path).get(END_KEY, ""))
    if tokenizer.end_of_text in (tokenizer.usual_end if said is None else said, None):
        return
    # Frames of encoders are named in the one file alone, and may end otherwise.
    is_settings = path.with_name(SETTINGS_FILE).exists()
    file = path.with_name(SETTINGS_FILE if is_settings else OLDER_SETTINGS_FILE)
    content: Any = None
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_text("utf-8"))
    name = tokenizer.token_name(tokenizer.end_of_text)
    content = {**(content if isinstance(content, dict) else {}), END_KEY: name}
    write_bytes_atomic(file, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def named_end(tokenizer: Any) -> dict[str, int]:
    """Returns the end of text as an entry of an identity where it is not the usual one of the tokenizer; else nothing.

    Ids of texts do not depend on it, so that a tokenizer's hash does not either.
    """
    if not isinstance(tokenizer, EndedTokenizer) or tokenizer.end_of_text in (tokenizer.usual_end, None):
        return {}
    return {"end_of_text": tokenizer.end_of_text}


def end_lines(tokenizer: Any) -> list[str]:
    """Returns a line about what ends documents, where it is not the usual end of text of the tokenizer."""
    if not isinstance(tokenizer, EndedTokenizer):
        return []
    if tokenizer.end_of_text is None:
        return [
            "documents end with a newline: neither the tokenizer nor a file beside it names its end of text (set "
            "data.tokenizer.end)"
        ]
    return [f"documents end with {tokenizer.token_name(tokenizer.end_of_text)}"] if named_end(tokenizer) else []
