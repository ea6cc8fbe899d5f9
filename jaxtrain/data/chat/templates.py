"""Chat templates: jinja2 in a sandbox, because a template is code of whoever published the model."""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxtrain.data.chat.conversations import Message
from jaxtrain.data.chat.formats import ChatFormat
from jaxtrain.data.skipped import BadRecordError
from jaxtrain.errors import ConfigError, DataError

# Unicode guarantees that these are no characters of any text.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_MARKED_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# What jinja2 calls the source of a template that is no file.
_TEMPLATE_FRAME = "<template>"


@dataclass(frozen=True)
class Template:
    """A template that is ready to render.

    Attributes:
        compiled: By jinja2.
        format: What it was made of.
        marks_answers: Whether it says itself what a model writes: `{% generation %}`.
    """

    compiled: jinja2.Template
    format: ChatFormat
    marks_answers: bool


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: What is encoded.
        answers: (start, end) in characters of each block that the template marks as written by the model.
    """

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
    """Compiles a template.

    Args:
        format: The template, and the tokens that it may name.
        today: The date for templates that ask for it.

    Raises:
        ConfigError: The template has an error of syntax; names its line.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _AnswerBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.combine(today, datetime.time()).strftime(form)
    try:
        compiled = environment.from_string(format.source)
    except jinja2.TemplateSyntaxError as error:
        said = str(error.message).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"the chat template {format.label} has an error in line {error.lineno}: {said}; mend it, or set "
            "data.template to another"
        ) from None
    except RecursionError:
        raise ConfigError(f"the chat template {format.label} is nested too deeply; set data.template") from None
    return Template(compiled, format, _MARKED_BLOCK.search(format.source) is not None)


def render(
    template: Template,
    messages: Sequence[Message],
    *,
    prompt: bool,
    where: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Rendered:
    """Writes messages as text.

    Args:
        template: How.
        messages: What was said.
        prompt: Whether the text ends where the model's answer begins (`add_generation_prompt`).
        where: File and line of the messages.
        tools: What the model may call, a list of JSON schemas.

    Raises:
        DataError: The template refuses the messages, such as for the order of their roles; names its line.
        ConfigError: The template fails.
    """
    values: Mapping[str, Any] = {
        **template.format.tokens,
        "messages": [dict(one) for one in messages],
        "tools": None if tools is None else list(tools),
        "documents": None,
        "add_generation_prompt": prompt,
    }
    label = template.format.label
    try:
        text = template.compiled.render(values)
    except _RefusedError as error:
        raise BadRecordError(
            f"{where}: line {_line(error)} of the chat template {label} refuses the conversation: {_first_line(error)}"
        ) from None
    except Exception as error:  # a template is somebody's code, and may fail in any way
        raise ConfigError(
            f"the chat template {label} fails in line {_line(error)} on {where}: {type(error).__name__}: "
            f"{_first_line(error)}; mend it, or set data.template to another"
        ) from None
    return _without_marks(text, where) if template.marks_answers else Rendered(text, ())


def _without_marks(text: str, where: str) -> Rendered:
    parts: list[str] = []
    spans, at, begin = [], 0, None
    last = 0
    for mark in _MARKS.finditer(text):
        parts.append(text[last : mark.start()])
        at += mark.start() - last
        last = mark.end()
        if (mark.group() == _OPEN) != (begin is None):
            raise DataError(f"{where} holds the character {mark.group()!a}, which is none of any text; remove it")
        if begin is None:
            begin = at
        else:
            spans.append((begin, at))
            begin = None
    return Rendered("".join([*parts, text[last:]]), tuple(spans))


def _refuse(message: str) -> str:
    raise _RefusedError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes a value as JSON without the escapes for HTML that jinja2's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _line(error: BaseException) -> int:
    """Returns the line of the template where an error was raised; 1 where that is not known."""
    line, trace = 1, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE_FRAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "it gives no reason")[:300]
