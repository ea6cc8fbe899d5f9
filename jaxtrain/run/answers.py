"""Answers of a saved run to questions."""

from collections.abc import Sequence

from jaxtrain.data.chat.formats import ChatFormat, files_beside, format_of_reading, published_format
from jaxtrain.data.special import NamedTokens
from jaxtrain.errors import ConfigError
from jaxtrain.inference.chat import answer_questions
from jaxtrain.inference.sampling import Sampling
from jaxtrain.run.opened import OpenedRun

_DEFAULT_TOKENS = 200


def run_answers(
    run: OpenedRun, questions: Sequence[str], *, new_tokens: int | None, sampling: Sampling, seed: int
) -> list[str]:
    """Answers questions with the template that a run was trained with, or with that of its published model.

    Args:
        run: opened.
        questions: what the user says.
        new_tokens: tokens of an answer, at most; None: 200.
        sampling: how tokens are chosen.
        seed: of the random choices.

    Raises:
        ConfigError: the run has no chat template, or the model cannot generate.
    """
    return answer_questions(
        run.sharded_model,
        run.params,
        run.tokenizer,
        run_chat_format(run, instead="use -p TEXT to continue a text"),
        questions,
        new_tokens=_DEFAULT_TOKENS if new_tokens is None else new_tokens,
        sampling=sampling,
        seed=seed,
    )


def format_of_run(run: OpenedRun) -> ChatFormat | None:
    """The chat template of a run: the one that it was trained with, or that of its published model; None: neither."""
    tokenizer = run.tokenizer
    found = format_of_reading((run.info.get("data") or {}).get("reading"))
    if found is None and isinstance(tokenizer, NamedTokens):
        found = published_format(files_beside(run.run_dir / "tokenizer.json"), str(run.run_dir), tokenizer)
    return found


def run_chat_format(run: OpenedRun, *, instead: str) -> ChatFormat:
    """Returns the chat template that a run was trained with, or that of its published model.

    Args:
        run: Opened.
        instead: What to do without one, for the message.

    Raises:
        ConfigError: There is none.
    """
    found = format_of_run(run)
    if found is None:
        raise ConfigError(
            f"{run.run_dir} has no chat template: it was not trained on data.kind=chat, and its published model came "
            f"without one; {instead}"
        )
    return found
