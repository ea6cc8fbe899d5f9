"""The chat template of a saved run."""

from jaxtrain.data.chat.formats import ChatFormat, files_beside, format_of_reading, published_format
from jaxtrain.data.special import NamedTokens
from jaxtrain.errors import ConfigError
from jaxtrain.run.opened import OpenedRun


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
