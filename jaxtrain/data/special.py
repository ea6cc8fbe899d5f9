"""The special tokens of rows that are not plain text, in a tokenizer."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtrain.config.data import TokenizerConfig
from jaxtrain.errors import DataError, UserError

# Role -> the names that published tokenizers give it, in the order in which they are tried.
_NAMES = {
    "start": ("[CLS]", "<s>"),
    "end": ("[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
    "mask": ("[MASK]", "<mask>"),
    "padding": ("[PAD]", "<pad>"),
}
SETTINGS_FILE, OLDER_SETTINGS_FILE = "tokenizer_config.json", "special_tokens_map.json"
END_KEY = "eos_token"
# Role -> the key of tokenizer_config.json.
_FILE_KEYS = {"start": "cls_token", "end": "sep_token", "mask": "mask_token", "padding": "pad_token"}


@runtime_checkable
class NamedTokens(Protocol):
    """A tokenizer whose special tokens have names."""

    vocab_size: int

    def token_id(self, name: str) -> int | None:
        """Returns the id of a token; None: there is no such token."""
        ...

    def special_ids(self) -> list[int]:
        """Returns the ids that no text has."""
        ...


class NumberedTokens:
    """Special tokens above the ids of data that no tokenizer made.

    Args:
        vocab_size: Ids of the data.
        special: Names of the tokens, whose ids follow.
    """

    def __init__(self, vocab_size: int, special: tuple[str, ...]):
        self._first = vocab_size
        self._special = special
        self.vocab_size = vocab_size + len(special)

    def token_id(self, name: str) -> int | None:
        return self._first + self._special.index(name) if name in self._special else None

    def special_ids(self) -> list[int]:
        return list(range(self._first, self.vocab_size))


@dataclass(frozen=True)
class SpecialIds:
    """Ids of special tokens; None: the tokenizer has no such token.

    Attributes:
        start: begins a row of an encoder.
        end: ends a text.
        mask: hides a token.
        padding: fills rows up.
    """

    start: int | None
    end: int | None
    mask: int | None
    padding: int | None


def special_ids(tokenizer: NamedTokens, config: TokenizerConfig | None) -> SpecialIds:
    """Finds the special tokens of a tokenizer.

    The config's names come first, then those of the tokenizer_config.json beside the file, then the usual ones.

    Args:
        tokenizer: Has the ids.
        config: May name them; None: nothing does.

    Raises:
        DataError: The config names a token that the tokenizer does not have.
    """
    config = config or TokenizerConfig()
    listed = _listed(config)
    found = {role: _find(tokenizer, role, getattr(config, role), listed.get(role)) for role in _NAMES}
    return SpecialIds(**found)


def _find(tokenizer: NamedTokens, role: str, given: str | None, listed: str | None) -> int | None:
    if given is not None:
        i = tokenizer.token_id(given)
        if i is None:
            raise DataError(f"data.tokenizer.{role}={given!r} is no token of the tokenizer; give the name of one")
        return i
    names = (listed, *_NAMES[role]) if listed else _NAMES[role]
    return next((i for i in map(tokenizer.token_id, names) if i is not None), None)


def _listed(config: TokenizerConfig) -> dict[str, str]:
    """Returns role -> name of what the tokenizer_config.json beside a tokenizer says."""
    if config.kind != "file" or config.path is None:
        return {}
    # A run keeps the end of text in the other file, and evaluates with the frame that it was trained with.
    names = _names_in(Path(config.path).expanduser().with_name(SETTINGS_FILE))
    values = {role: names.get(key) for role, key in _FILE_KEYS.items()}
    values["end"] = values["end"] or names.get(END_KEY)
    return {role: name for role, name in values.items() if name is not None}


def names_beside(tokenizer: Path) -> dict[str, str]:
    """Returns key (eos_token) -> name of the special tokens that the files beside a tokenizer, or a GGUF file, give.

    Args:
        tokenizer: The tokenizer.json, whose folder may hold tokenizer_config.json and special_tokens_map.json.
    """
    from jaxtrain.interop.formats.gguf import read_gguf  # which few need
    from jaxtrain.interop.formats.gguf_tokenizer import tokenizer_files

    path = tokenizer.expanduser()
    found: dict[str, str] = {}
    for name in (OLDER_SETTINGS_FILE, SETTINGS_FILE):
        if path.suffix == ".gguf":
            with contextlib.suppress(OSError, ValueError, UserError):  # what reads a file as a whole says what is wrong
                found |= _names_of(json.loads(tokenizer_files(path, read_gguf(path).metadata).get(name, "{}")))
        else:
            found |= _names_in(path.with_name(name))
    return found


def _names_in(file: Path) -> dict[str, str]:
    """Returns the names of special tokens in a file, none where it cannot be read."""
    try:
        return _names_of(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, UserError):
        return {}


def _names_of(content: Any) -> dict[str, str]:
    names = content.items() if isinstance(content, dict) else ()
    plain = {key: value.get("content") if isinstance(value, dict) else value for key, value in names}
    return {key: value for key, value in plain.items() if key.endswith("_token") and isinstance(value, str)}


def needed(found: int | None, role: str, *, what: str) -> int:
    """Returns the id of a special token that rows cannot be made without.

    Args:
        found: The id; None: the tokenizer has none.
        role: start, end, mask or padding.
        what: What takes it.

    Raises:
        DataError: There is none.
    """
    if found is None:
        raise DataError(
            f"{what} takes a token that is its {role}, and the tokenizer has none of {', '.join(_NAMES[role])}; set "
            f"data.tokenizer.{role} to a token that it has, or use data.tokenizer.kind=bpe"
        )
    return found
