"""Chat templates: where they come from, how they write conversations, and which of the tokens are trained.

A template is code of whoever published the model: jinja2 runs it in a sandbox. It may mark what a model writes
(`{% generation %}`). Otherwise an answer is the text that a conversation which ends with it has in addition to the
prompt, where the prompt ends with the beginning of an answer (`add_generation_prompt`).
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
from jaxtrain.errors import ConfigError, DataError, first_line
from jaxtrain.formats.chat_template import read_template, with_tool_use

# Templates that need no file: each message between two tokens, or the texts one after another.
BUILT_IN = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "plain": "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
}
# Folder of a run, beside its tokenizer, with the small files of the published model that it started from.
_PUBLISHED_FOLDER = "published"
_KIND = "chat"

# Put before and after what a model writes. Unicode guarantees that no text holds these characters.
_OPEN = "\ufdd0"
_CLOSE = "\ufdd1"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_MARKED_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become text.

    `source` is the template, and `label` names it in messages. `tokens` are the special tokens that it uses, name
    (eos_token) -> text. A model stops at the ids `stop`.
    """

    source: str
    label: str
    tokens: Mapping[str, str]
    stop: tuple[int, ...]

    def to_reading(self) -> dict[str, Any]:
        """Returns the format as JSON values, for `Data.reading`."""
        return {
            "kind": _KIND,
            "template": self.source,
            "label": self.label,
            "tokens": dict(self.tokens),
            "stop": list(self.stop),
        }


def format_of_reading(reading: Mapping[str, Any] | None) -> ChatFormat | None:
    """Returns the format that a run recorded in its `Data.reading`, or None if the run is not on chats."""
    if reading is None or reading.get("kind") != _KIND:
        return None
    return ChatFormat(reading["template"], reading["label"], reading["tokens"], tuple(reading["stop"]))


def chat_format(config: ChatData, tokenizer: NamedTokens) -> ChatFormat:
    """Returns the format of a config.

    The template is `data.template`, else the one beside the tokenizer's file, else chatml for tokenizers without one.
    """
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
        stop_id = tokenizer.token_id(config.stop)
        form = replace(form, stop=() if stop_id is None else (stop_id,))
    if not form.stop:
        raise ConfigError(f"the tokenizer has no stop token (data.stop={config.stop}); set its name")
    return form


def files_beside(tokenizer: Path) -> dict[str, str]:
    """Returns name -> text of the files that describe the chats of a published model, or of their copy in a run."""
    tokenizer = tokenizer.expanduser()
    copy = tokenizer.parent / _PUBLISHED_FOLDER
    if copy.is_dir():
        tokenizer = copy / "tokenizer.json"
    files = tokenizers.files_beside(tokenizer)
    if TEMPLATE_FILE in files:
        files[TEMPLATE_FILE] = read_template(tokenizer.parent)
    return files


def published_format(files: Mapping[str, str], where: str, tokenizer: NamedTokens) -> ChatFormat | None:
    """Returns the format that `files_beside` describe (`where` in messages), or None if they hold no template."""
    source = files.get(TEMPLATE_FILE)
    label = TEMPLATE_FILE
    if source is None:
        label = f"of {where}"
        source = json_beside(files, SETTINGS_FILE).get("chat_template")
    if isinstance(source, list):
        sources = {entry.get("name"): entry.get("template") for entry in source}
        source = sources.get("default") and with_tool_use(sources["default"], sources.get("tool_use"))
    if source is None:
        return None
    return ChatFormat(source, label, *published_tokens(files, tokenizer))


def published_tokens(files: Mapping[str, str], tokenizer: NamedTokens) -> tuple[dict[str, str], tuple[int, ...]]:
    """Returns name (bos_token) -> text of the special tokens, and the ids at which the model stops.

    Both follow from `files_beside`, or without files from the tokenizer, which was then made for a run.
    """
    if files:
        tokens = special_names(files)
    else:
        tokens = {"bos_token": TURN_BEGINS, "eos_token": TURN_ENDS}
        tokens = {name: token for name, token in tokens.items() if tokenizer.token_id(token) is not None}
    stop = json_beside(files, GENERATION_FILE).get("eos_token_id")
    if not isinstance(stop, list):
        stop = [stop]
    stop = dict.fromkeys([*stop, tokenizer.token_id(tokens.get("eos_token", ""))])
    return tokens, tuple(number for number in stop if number is not None)


@dataclass(frozen=True)
class Template:
    """A template that is ready to render; `marks_answers` if it marks what a model writes by `{% generation %}`."""

    compiled: jinja2.Template
    format: ChatFormat
    marks_answers: bool


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, from `where` (file and line).

    `answers` are (start, end) in characters of what a model writes, as far as the template marks it.
    """

    where: str
    text: str
    answers: tuple[tuple[int, int], ...]


class _RefusedError(Exception):
    """Raised by a template that calls `raise_exception`."""


class _AnswerBlocks(Extension):
    """The block `{% generation %} ... {% endgeneration %}`, whose text is put between two marks."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """Returns the text of the block between two marks."""
        return f"{_OPEN}{caller()}{_CLOSE}"


def compile_template(format: ChatFormat, *, today: datetime.date) -> Template:
    """Compiles a template, which may ask for the date; a ConfigError names the line of an error of syntax."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _AnswerBlocks]
    )
    # The filter of jinja2 would escape characters for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = today.strftime
    try:
        compiled = environment.from_string(format.source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template {format.label} has an error in line {error.lineno}: {first_line(error)}; fix it, or "
            "set data.template to another"
        ) from None
    return Template(compiled, format, _MARKED_BLOCK.search(format.source) is not None)


def render(template: Template, conversation: Conversation, *, prompt: bool) -> Rendered:
    """Writes a conversation as text; with `prompt` it ends where the answer begins (`add_generation_prompt`).

    Raises:
        DataError: The template refuses the messages, such as for the order of their roles.
        ConfigError: The template fails.
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
        label = f"{conversation.where}: the chat template {template.format.label}"
        remedy = f"{first_line(error)}; fix it, or data.template"
        if isinstance(error, _RefusedError):
            raise DataError(f"{label} refuses the conversation: {remedy}") from None
        raise ConfigError(f"{label} fails: {type(error).__name__}: {remedy}") from None
    if not template.marks_answers:
        return Rendered(conversation.where, text, ())
    # Parts 1, 3, ... stand between marks.
    parts = _MARKS.split(text)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return Rendered(conversation.where, "".join(parts), tuple(zip(ends[:-1:2], ends[1::2], strict=True)))


def _refuse(message: str) -> str:
    raise _RefusedError(message)


@dataclass(frozen=True)
class Encoded:
    """A text as tokens: `ids` int32 [num_tokens], and `starts` int64 [num_tokens], the first character of each."""

    ids: np.ndarray
    starts: np.ndarray


class ChatEncoder:
    """Encodes rendered chats; text that spells a special token becomes that token.

    Elsewhere such text is data (`BpeTokenizer`), but a template has no other way to write a special token.
    """

    def __init__(self, tokenizer: ByteTokenizer | BpeTokenizer):
        self._tokenizer = tokenizer
        if isinstance(tokenizer, ByteTokenizer):
            # The longest name first, as it may begin with another one; (?!) matches nothing.
            names = sorted(tokenizer.special, key=len, reverse=True)
            self._special = re.compile(("|".join(map(re.escape, names)) or "(?!)").encode())
            return
        from tokenizers import Tokenizer

        # A copy, because the run's own tokenizer reads such text as data.
        self._model: Any = Tokenizer.from_str(tokenizer.to_json())
        self._model.encode_special_tokens = False
        # Nothing is added to a template's text, and a post-processor may leave spaces out of the start of a token.
        self._model.post_processor = None

    def encode(self, texts: Sequence[str]) -> Iterator[Encoded]:
        """Yields the tokens of each text; none is added at its beginning or end."""
        if isinstance(self._tokenizer, ByteTokenizer):
            for text in texts:
                yield self._encode_bytes(self._tokenizer, text)
            return
        with tokenizers.encoding():
            encoded = self._model.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encoded:
            starts = [start for start, _ in encoding.offsets]
            yield Encoded(np.array(encoding.ids, np.int32), np.array(starts, np.int64))

    def _encode_bytes(self, tokenizer: ByteTokenizer, text: str) -> Encoded:
        ids = tokenizer.encode(text)
        # The first byte of a character is not 10xxxxxx.
        starts = np.cumsum((ids & 0xC0) != 0x80) - 1
        is_token = np.ones(len(ids), bool)
        for match in self._special.finditer(ids.astype(np.uint8).tobytes()):
            ids[match.start()] = tokenizer.token_id(match[0].decode())
            is_token[match.start() + 1 : match.end()] = False
        return Encoded(ids[is_token], starts[is_token])
