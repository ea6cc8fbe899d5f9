"""The special tokens of rows that are not plain text, in a tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtrain.config.data import TokenizerConfig
from jaxtrain.errors import DataError
from jaxtrain.published.json_text import parse_json

# Role -> the names that published tokenizers give it, in the order in which they are tried.
_NAMES = {
    "start": ("[CLS]", "<s>"),
    "end": ("[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
    "mask": ("[MASK]", "<mask>"),
    "padding": ("[PAD]", "<pad>"),
}
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
    """Returns role -> name of what the tokenizer_config.json beside a tokenizer.json says."""
    if config.kind != "file" or config.path is None:
        return {}
    try:
        content: Any = parse_json((Path(config.path).expanduser().parent / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    values = {role: content.get(key) for role, key in _FILE_KEYS.items()}
    values["end"] = values["end"] or content.get("eos_token")
    named = {role: value.get("content") if isinstance(value, dict) else value for role, value in values.items()}
    return {role: name for role, name in named.items() if isinstance(name, str)}


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
