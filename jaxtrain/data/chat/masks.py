"""Which tokens of a conversation are trained: those that the model is to write, its stop token included.

A template may say so itself (`{% generation %}`). Otherwise an answer is what a conversation up to it has more than the
conversation before it, the beginning of an answer included that a template writes where the model goes on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data.chat.conversations import ANSWERS, Conversation, is_trained
from jaxtrain.data.chat.encoding import ChatEncoder
from jaxtrain.data.chat.templates import Rendered, Template, render
from jaxtrain.data.skipped import BadRecordError, SkippedRecords
from jaxtrain.errors import ConfigError, DataError

# Characters that are encoded at a time: enough for every core, few enough for their tokens as Python objects.
_CHUNK_CHARACTERS = 2**20


@dataclass(frozen=True)
class MaskedTokens:
    """A conversation as tokens.

    Attributes:
        where: File and line, for messages.
        ids: int32 [num_tokens].
        trained: bool [num_tokens].
    """

    where: str
    ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True)
class _Marked:
    """A conversation as text, and (start, end) in characters of what is trained."""

    where: str
    text: str
    spans: tuple[tuple[int, int], ...]


def masked_tokens(
    conversations: Sequence[Conversation],
    template: Template,
    encoder: ChatEncoder,
    *,
    train_on: str,
    skipped: SkippedRecords | None = None,
) -> Iterator[MaskedTokens]:
    """Encodes conversations and marks what is trained.

    Args:
        conversations: What was said.
        template: How it is written.
        encoder: Makes the ids.
        train_on: As `ChatData.train_on`.
        skipped: Counts the conversations that the template refuses, which have no tokens then; None: an error.

    Raises:
        DataError: The template refuses a conversation.
        ConfigError: The template fails, or the tokens of an answer or its stop token cannot be found.
    """

    def marked(one: Conversation) -> _Marked:
        try:
            return _marked(one, template, train_on=train_on)
        except BadRecordError as error:
            if skipped is None:
                raise
            skipped.add(error, of=len(conversations))
            return _Marked(one.where, "", ())

    for chunk in _chunks(map(marked, conversations)):
        encoded = encoder.encode([one.text for one in chunk])
        for one, found in zip(chunk, encoded, strict=True):
            trained = np.zeros(len(found.ids), bool)
            for start, stop in one.spans:
                # A token that begins before the answer belongs to the prompt.
                first, last = np.searchsorted(found.starts, (start, stop))
                ends = first + np.flatnonzero(np.isin(found.ids[first:last], template.format.stop))
                if not len(ends):
                    raise _unstopped(template, one, found.ids[first:last], train_on)
                # What a template writes after the stop token (a line end) nobody generates.
                trained[first : last if template.marks_answers or train_on == "all" else ends[-1] + 1] = True
            yield MaskedTokens(one.where, found.ids, trained)


def _marked(conversation: Conversation, template: Template, *, train_on: str) -> _Marked:
    where, messages = conversation.where, conversation.messages
    tools = conversation.tools
    whole = render(template, messages, prompt=False, where=where, tools=tools)
    if train_on == "all":
        if not all(map(is_trained, messages)):
            raise DataError(f"{where} has a message of weight 0, and data.train_on=all trains each; set it to answers")
        return _Marked(where, whole.text, ((0, len(whole.text)),))
    said = [i for i, one in enumerate(messages) if one["role"] == ANSWERS]
    answers = [i for i in said if i >= conversation.first and is_trained(messages[i])]
    answers = answers[-1:] if train_on == "last" else answers
    if template.marks_answers:
        spans = _blocks(whole, template, len(said), where)
        return _Marked(where, whole.text, tuple(spans[said.index(i)] for i in answers))
    spans = []
    for i in answers:
        before = render(template, messages[:i], prompt=True, where=where, tools=tools).text
        last = i + 1 == len(messages)
        shorter = whole if last else render(template, messages[: i + 1], prompt=False, where=where, tools=tools)
        after = shorter.text
        if not (after.startswith(before) and whole.text.startswith(after)):
            raise _moved(template, where, i, is_prompt=not after.startswith(before))
        spans.append((len(before), len(after)))
    return _Marked(where, whole.text, tuple(spans))


def prompt_text(template: Template, conversation: Sequence[dict[str, str]]) -> str:
    """Returns messages as the text after which the model writes its answer.

    Args:
        template: How they are written.
        conversation: The messages; the last one is not the model's.

    Raises:
        DataError: The template refuses them.
        ConfigError: The template fails.
    """
    return render(template, conversation, prompt=True, where="the question").text


def _blocks(whole: Rendered, template: Template, count: int, where: str) -> Sequence[tuple[int, int]]:
    if len(whole.answers) != count:
        raise ConfigError(
            f"the chat template {template.format.label} marks {len(whole.answers)} answers by {{% generation %}}, but "
            f"{where} has {count}; let it mark each message of role {ANSWERS} once"
        )
    return whole.answers


def _moved(template: Template, where: str, i: int, *, is_prompt: bool) -> ConfigError:
    label = template.format.label
    if is_prompt:
        return ConfigError(
            f"the chat template {label} writes message {i + 1} of {where} otherwise than it asks the model to begin "
            "(add_generation_prompt), so the answer cannot be told apart; mark answers by {% generation %} in a "
            "template of your own (data.template)"
        )
    return ConfigError(
        f"the chat template {label} writes message {i + 1} of {where} otherwise where more messages follow, so the "
        "answer cannot be told apart; set data.train_on=last, or mark answers by {% generation %} (data.template)"
    )


def _unstopped(template: Template, one: _Marked, ids: np.ndarray, train_on: str) -> ConfigError | DataError:
    stop = " or ".join(map(str, template.format.stop))
    if not len(ids):
        return DataError(f"{one.where} has an answer without any token of its own; fix or remove the row")
    inside = " inside {% generation %}" if template.marks_answers and train_on != "all" else ""
    return ConfigError(
        f"the chat template {template.format.label} writes no stop token (id {stop}){inside} at the end of an answer "
        f"({one.where}), so a model would never learn to stop: template or stop tokens (data.stop, or the files of the "
        "model) are not the model's; set data.stop to the token that it writes there, or data.template to another "
        "template"
    )


def _chunks(marked: Iterable[_Marked]) -> Iterator[list[_Marked]]:
    chunk: list[_Marked] = []
    size = 0
    for one in marked:
        chunk.append(one)
        size += len(one.text)
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
