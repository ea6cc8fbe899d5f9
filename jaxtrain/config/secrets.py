"""Secrets in settings and command lines, which a run must not write down. No jax here.

They are found by the name of a key (`api_key`), by where they stand in an address (before the host, and in its query:
`https://user:password@host/path?key=value`), or by the beginning that tokens of well-known services have.
"""

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"

_NAMES = re.compile(
    r"(^|[_.-])(pwd|pass(word|wd|phrase)?|authorization|secret|credentials?|token|\w+[_-]?token"
    r"|(api|access|account|private|secret)[_-]?key)$",
    re.IGNORECASE,
)
_TEXTS = re.compile(
    r"""(?<=://)[^\s"'<>/?#]+(?=@)|(?<=\bbearer )[^\s"'{}]+"""
    r"|\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)",
    re.IGNORECASE,
)
# Only http has a query without values: elsewhere a question mark is a pattern of file names.
_WITH_QUERY = re.compile(r"""https?://[^\s"'<>]+|\?[\w.%-]+=[^\s"'<>]*""", re.IGNORECASE)
# A key and its value inside of `data.args={api_key: abc}`.
_PAIR = re.compile(r"""([\w.-]+)(["']?\s*:\s*)("[^"]*"|'[^']*'|[^,{}\[\]]+)""")


def names_secret(key: str) -> bool:
    """Returns whether a key, or a dotted path of keys, says that its value is a secret."""
    return _NAMES.search(key) is not None


def redacted_text(text: str) -> str:
    """Returns a text with what may be a secret replaced.

    These are the user and password of an address, every value of its query, and the tokens of well-known services.
    """
    return _TEXTS.sub(REDACTED, _WITH_QUERY.sub(_without_values, text))


def _without_values(address: re.Match[str]) -> str:
    path, mark, query = address[0].partition("?")
    return path + mark + re.sub(r"((?:^|&)(?:[^&=]*=)?)[^&]+", rf"\1{REDACTED}", query)


def redacted(value: Any, key: str = "") -> Any:
    """Returns the settings (mappings, lists, values) of a key with secrets replaced by "(redacted)"."""
    if isinstance(value, Mapping):
        # What a secret is made of is secret too: {credentials: {user: ..., pass: ...}}.
        return {name: redacted(item, key if names_secret(key) else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, key) for item in value]
    # Tokens that are a number, or a text in brackets, are those of a vocabulary.
    ordinary = isinstance(value, bool | None) or (key.endswith("token") and not re.match(r"[^<\[\d]", str(value)))
    if names_secret(key) and not ordinary:
        return REDACTED
    return redacted_text(value) if isinstance(value, str) else value


def redacted_words(words: list[str]) -> list[str]:
    """Returns the words of a command line (`sys.argv`) with secrets replaced: `model.args.api_key=...`, `--token X`."""
    shown = []
    for word, before in zip(words, ["", *words], strict=False):
        key, equals, value = word.partition("=")
        if "{" in value:  # data.args={api_key: abc}
            value = _PAIR.sub(lambda pair: f"{pair[1]}{pair[2]}{redacted(pair[3], pair[1])}", value)
        if equals:
            text = f"{key}={redacted(value, key)}"
        else:
            text = redacted(word, before if "--" in before else "")
        # The word itself may be an address with a query.
        shown.append(redacted_text(text))
    return shown


def redacted_keys(values: Any, path: str = "") -> list[str]:
    """Returns the dotted paths of the settings whose secret was left out when they were written."""
    if isinstance(values, Mapping):
        return [key for name in values for key in redacted_keys(values[name], f"{path}.{name}".lstrip("."))]
    if isinstance(values, list | tuple):
        return [key for item in values for key in redacted_keys(item, path)]
    return [path] if isinstance(values, str) and REDACTED in values else []
