"""Chat templates: where they come from, how they write conversations, and which of the tokens are trained.

A template is code of whoever published the model: jinja2 runs it in a sandbox. It may say itself what a model writes
(`{% generation %}`). Otherwise an answer is what a conversation up to it has more than the conversation before it, the
beginning of an answer included that a template writes where the model goes on.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxtrain.config.data import TURN_BEGINS, TURN_ENDS, ChatData
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.chat.conversation import Conversation
from jaxtrain.data.files import require_file
from jaxtrain.data.tokenizer import (
    GENERATION_FILE,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    BpeTokenizer,
    ByteTokenizer,
    NamedTokens,
    json_beside,
    special_names,
)
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.interop.formats.chat_template import read_template, with_tool_use

# Templates that need no file: turns between two tokens, and the texts one after another.
BUILT_IN = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "plain": "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
}
# Folder of a run, beside its tokenizer, with the small files of the published model that it started from.
_OF_A_RUN = "published"
_KIND = "chat"

# Unicode guarantees that these are no characters of any text.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_MARKED_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become text.

    `tokens` are name (eos_token) -> text, as the template (`source`) uses them; a model stops at the ids `stop`.
    """

    source: str
    label: str
    tokens: Mapping[str, str]
    stop: tuple[int, ...]

    def to_reading(self) -> dict[str, Any]:
        """Returns the format as JSON values, for `Data.reading`."""
        stop = list(self.stop)
        return {"kind": _KIND, "template": self.source, "label": self.label, "tokens": dict(self.tokens), "stop": stop}


def format_of_reading(reading: Mapping[str, Any] | None) -> ChatFormat | None:
    """Returns the format that a run kept in its `Data.reading`; None: it is no run on chats."""
    if reading is None or reading.get("kind") != _KIND:
        return None
    return ChatFormat(reading["template"], reading["label"], reading["tokens"], tuple(reading["stop"]))


def chat_format(config: ChatData, tokenizer: NamedTokens) -> ChatFormat:
    """Finds the format of a config: its template, else that beside the tokenizer's file, else chatml."""
    path = config.tokenizer.path or ""
    name = config.template
    files = {}
    if config.tokenizer.kind == "file":
        files = files_beside(Path(path))
    elif name is None:
        name = "chatml"
    tokens, stop = published_tokens(files, tokenizer)
    if name is None:
        form = published_format(files, path, tokenizer)
        if form is None:
            raise ConfigError(
                f"{path} has no chat template beside it ({TEMPLATE_FILE}, or chat_template in {SETTINGS_FILE}); set "
                "data.template=chatml, data.template=plain or a file"
            )
    elif name in BUILT_IN:
        form = ChatFormat(BUILT_IN[name], f"{name} (built in)", tokens, stop)
    else:
        file = require_file(name, what="data.template (a file, chatml or plain)")
        form = ChatFormat(file.read_text("utf-8"), name, tokens, stop)
    if config.stop is not None:
        named = tokenizer.token_id(config.stop)
        form = replace(form, stop=() if named is None else (named,))
    if not form.stop:
        raise ConfigError(f"the tokenizer has no stop token (data.stop={config.stop}); set its name")
    return form


def files_beside(tokenizer: Path) -> dict[str, str]:
    """Returns name -> text of the files of a published model, or of its copy in a run, that say how it chats."""
    kept = tokenizer.expanduser().parent / _OF_A_RUN
    if kept.is_dir():
        tokenizer = kept / "tokenizer.json"
    files = tokenizers.files_beside(tokenizer)
    if TEMPLATE_FILE in files:
        files[TEMPLATE_FILE] = read_template(tokenizer.expanduser().parent)
    return files


def published_format(files: Mapping[str, str], where: str, tokenizer: NamedTokens) -> ChatFormat | None:
    """Returns the format that `files_beside` describe (`where` names them); None: they hold no template."""
    source = files.get(TEMPLATE_FILE)
    label = TEMPLATE_FILE
    if source is None:
        label = f"of {where}"
        source = json_beside(files, SETTINGS_FILE).get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default") and with_tool_use(named["default"], named.get("tool_use"))
    if source is None:
        return None
    return ChatFormat(source, label, *published_tokens(files, tokenizer))


def published_tokens(files: Mapping[str, str], tokenizer: NamedTokens) -> tuple[dict[str, str], tuple[int, ...]]:
    """Returns name (bos_token) -> text of the special tokens of `files_beside`, and the ids at which the model stops.

    No files: the tokenizer was made for a run.
    """
    if files:
        tokens = special_names(files)
    else:
        known = {"bos_token": TURN_BEGINS, "eos_token": TURN_ENDS}
        tokens = {name: token for name, token in known.items() if tokenizer.token_id(token) is not None}
    ends = json_beside(files, GENERATION_FILE).get("eos_token_id")
    ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.token_id(tokens.get("eos_token", ""))]
    return tokens, tuple(dict.fromkeys(one for one in ends if one is not None))


@dataclass(frozen=True)
class Template:
    """A template that is ready to render; `marks_answers`: it says itself what a model writes, `{% generation %}`."""

    compiled: jinja2.Template
    format: ChatFormat
    marks_answers: bool


@dataclass(frozen=True)
class Rendered:
    """A conversation as text; `answers` are (start, end) in characters of the blocks that the template marks."""

    text: str
    answers: tuple[tuple[int, int], ...]


class _RefusedError(Exception):
    """What a template raises by `raise_exception`."""


class _AnswerBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}`: puts marks around what stands inside."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """Returns the text of the block between two marks."""
        return f"{_OPEN}{caller()}{_CLOSE}"


def compile_template(format: ChatFormat, *, today: datetime.date) -> Template:
    """Compiles a template, which may ask for today; a ConfigError names the line of an error of syntax."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _AnswerBlocks]
    )
    # Without the escapes for HTML that the filter of jinja2 makes.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = today.strftime
    try:
        compiled = environment.from_string(format.source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template {format.label} has an error in line {error.lineno}: {_reason(error)}; fix it, or "
            "set data.template to another"
        ) from None
    return Template(compiled, format, _MARKED_BLOCK.search(format.source) is not None)


def render(template: Template, conversation: Conversation, *, prompt: bool) -> Rendered:
    """Writes a conversation as text; with `prompt` it ends where the answer begins (`add_generation_prompt`).

    The template may refuse the messages, such as for the order of their roles (DataError), or fail (ConfigError).
    """
    try:
        text = template.compiled.render(
            {**template.format.tokens, "documents": None},
            messages=list(conversation.messages),
            tools=conversation.tools,
            add_generation_prompt=prompt,
            **conversation.arguments,
        )
    except Exception as error:  # a template is somebody's code, and may fail in any way
        if isinstance(error, _RefusedError):
            kind, why = DataError, "refuses the conversation"
        else:
            kind, why = ConfigError, f"fails: {type(error).__name__}"
        label = f"{conversation.where}: the chat template {template.format.label}"
        raise kind(f"{label} {why}: {_reason(error)}; fix it, or data.template") from None
    if not template.marks_answers:
        return Rendered(text, ())
    # Every other part stands inside of marks.
    parts = _MARKS.split(text)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return Rendered("".join(parts), tuple(zip(ends[:-1:2], ends[1::2], strict=True)))


def _refuse(message: str) -> str:
    raise _RefusedError(message)


def _reason(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "it gives no reason")[:300]


@dataclass(frozen=True)
class Encoded:
    """A text as tokens: int32 [num_tokens], and int64 [num_tokens], the character at which each begins."""

    ids: np.ndarray
    starts: np.ndarray


class ChatEncoder:
    """Encodes rendered chats: special tokens that the template writes are read.

    Elsewhere text that spells a special token is data (`BpeTokenizer`); a template has no other way to write one.
    """

    def __init__(self, tokenizer: ByteTokenizer | BpeTokenizer):
        self._bytes = tokenizer if isinstance(tokenizer, ByteTokenizer) else None
        if isinstance(tokenizer, ByteTokenizer):
            # The longest name first, where one begins another; without a name, what matches nothing.
            names = sorted(tokenizer.special, key=len, reverse=True)
            self._special = re.compile(("|".join(map(re.escape, names)) or "(?!)").encode())
            return
        from tokenizers import Tokenizer

        # A copy: that of the run goes on reading such text as data.
        self._model: Any = Tokenizer.from_str(tokenizer.to_json())
        self._model.encode_special_tokens = False
        # Nothing is added to a template's text, and a post-processor may leave spaces out of where a token begins.
        self._model.post_processor = None

    def encode(self, texts: Sequence[str]) -> Iterator[Encoded]:
        """Yields the tokens of each text; none is added at its beginning or end."""
        if self._bytes is not None:
            yield from (self._encode_bytes(self._bytes, text) for text in texts)
            return
        with tokenizers.encoding():
            encoded = self._model.encode_batch(list(texts), add_special_tokens=False)
        for found in encoded:
            starts = np.fromiter((start for start, _ in found.offsets), np.int64, len(found.ids))
            yield Encoded(np.array(found.ids, np.int32), starts)

    def _encode_bytes(self, tokenizer: ByteTokenizer, text: str) -> Encoded:
        ids = tokenizer.encode(text)
        # The first byte of a character is not 10xxxxxx.
        starts = np.cumsum((ids & 0xC0) != 0x80) - 1
        is_token = np.ones(len(ids), bool)
        for match in self._special.finditer(ids.astype(np.uint8).tobytes()):
            ids[match.start()] = tokenizer.token_id(match[0].decode())
            is_token[match.start() + 1 : match.end()] = False
        return Encoded(ids[is_token], starts[is_token])
