"""Secrets in settings and command lines, which a run must not write down. No jax here.

A secret belongs into the environment, which no run records. Where one stands in a config or on a command line all the
same, it is found by the name of its key (`api_key`), by the form of an address (`https://user:password@host`), or by
the beginning that tokens of well-known services have.
"""

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"

_NAMES = re.compile(
    r"(^|[_.-])(password|passwd|passphrase|secret|secrets|credential|credentials|bearer|apikey"
    r"|(api|access|private|secret|auth|signing|encryption|account|service)[_-]?key"
    r"|(api|access|auth|oauth|bearer|refresh|session|hf|hub|github|wandb|security|secret)[_-]?token|token)$",
    re.IGNORECASE,
)
# Special tokens of texts are written so, and are no secrets.
_SPECIAL_TOKEN = re.compile(r"[<\[].*[>\]]")
_ADDRESS = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")
_QUERY = re.compile(r"(?<=[?&])((?:[\w-]*(?:token|secret|password|signature|api_?key|sig))=)[^&\s]+", re.IGNORECASE)
# A key and its value inside of `data.args={api_key: abc}`.
_PAIR = re.compile(r"""([\w.-]+)(["']?\s*:\s*)("[^"]*"|'[^']*'|[^\s,{}\[\]]+)""")
_TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)


def names_secret(key: str) -> bool:
    """Returns whether a key, or a dotted path of keys, says that its value is a secret."""
    return _NAMES.search(key) is not None


def redacted_text(text: str) -> str:
    """Returns a text with the passwords of addresses and the tokens of well-known services replaced."""
    for pattern, by in ((_ADDRESS, REDACTED), (_QUERY, rf"\1{REDACTED}"), (_TOKEN, REDACTED)):
        text = pattern.sub(by, text)
    return text


def redacted(value: Any, key: str = "") -> Any:
    """Returns settings with secrets replaced by "(redacted)".

    Args:
        value: Mappings, lists and values; other objects stay as they are.
        key: Name of the key whose value it is.
    """
    if isinstance(value, Mapping):
        # What a secret is made of is secret too: {credentials: {user: ..., pass: ...}}.
        return {name: redacted(item, key if names_secret(key) else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, key) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        # A password may be written in digits; the token that is a number is one of a vocabulary.
        return REDACTED if names_secret(key) and not key.lower().endswith("token") else value
    if not isinstance(value, str):
        return value
    if value and names_secret(key) and not _SPECIAL_TOKEN.fullmatch(value):
        return REDACTED
    return redacted_text(value)


def redacted_words(words: list[str]) -> list[str]:
    """Returns the words of a command line with secrets replaced, as in `model.args.api_key=...` and `--token X`.

    Args:
        words: As `sys.argv` has them.
    """
    found: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        before = found[-1] if found else ""
        if equals and names_secret(key.lstrip("-")):
            found.append(f"{key}={REDACTED if value.startswith('{') else redacted(value, key)}")
        elif equals and "{" in value:
            found.append(redacted_text(f"{key}={_PAIR.sub(_redacted_pair, value)}"))
        elif before.startswith("--") and "=" not in before and names_secret(before.lstrip("-")):
            found.append(REDACTED)
        else:
            found.append(redacted_text(word))
    return found


def _redacted_pair(pair: re.Match[str]) -> str:
    name, colon, value = pair.groups()
    return f"{name}{colon}{redacted(value, name)}"


def redacted_keys(values: Any, path: str = "") -> list[str]:
    """Returns the dotted paths of the settings whose secret was left out when they were written."""
    if isinstance(values, Mapping):
        inner = [redacted_keys(item, f"{path}.{name}" if path else str(name)) for name, item in values.items()]
        return [key for keys in inner for key in keys]
    if isinstance(values, list | tuple):
        return [key for item in values for key in redacted_keys(item, path)]
    return [path] if isinstance(values, str) and REDACTED in values else []
