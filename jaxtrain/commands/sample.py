"""`jaxtrain sample`: text from a checkpoint or a published model, printed alone on standard output."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jaxtrain.commands.shared import own_code, print_table, print_text
from jaxtrain.config import Config
from jaxtrain.config.local_path import local_path
from jaxtrain.config.saved_run import is_run
from jaxtrain.errors import ConfigError
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.written import TokenScore, Written
from jaxtrain.interop.weights import is_published
from jaxtrain.published.hub import published_place
from jaxtrain.published.peft import is_adapter_folder
from jaxtrain.run.open_run import open_run
from jaxtrain.run.saved_config import saved_config
from jaxtrain.run.written import (
    Writing,
    search_continuations,
    write_answers,
    write_continuations,
    writer_of_folder,
    writer_of_run,
)
from jaxtrain.runtime import distributed

# Tokens between two looks for a stop, for which the host waits.
_PIECE = 16


def run(arguments: argparse.Namespace) -> int:
    """Print each prompt with its continuation: as it is written on a terminal, elsewhere when it is done.

    Several prompts are one batch, and an empty line separates the texts.
    """
    answers, beams = arguments.chat is not None, arguments.beams
    if (beams is not None and (answers or arguments.logprobs is not None)) or (answers and arguments.stop):
        raise ConfigError("jaxtrain sample: --beams takes no --chat and no --logprobs, and --chat no --stop")
    # What is no run is opened as a published model, if it looks like one; else as a run, which says what is missing.
    path = local_path(published_place(arguments.run_dir, what="run or model"), what="run directory")
    is_folder = not is_run(path) and (is_published(path) or is_adapter_folder(path))
    config = Config() if is_folder else saved_config(arguments.run_dir).config
    texts = arguments.chat if answers else _prompts(arguments.prompt)
    distributed.start(emulate=arguments.emulate, compilation_cache=config.compilation_cache)
    as_written = (arguments.stream or _is_watched()) and not arguments.json and beams is None
    writing = _writing(arguments, as_written=as_written)
    with own_code(config):
        if is_folder:
            writer = writer_of_folder(path, answers=answers, quantize=arguments.quantize, step=arguments.step)
        else:
            run = open_run(arguments.run_dir, step=arguments.step, quantize=arguments.quantize)
            writer = writer_of_run(run, answers=answers)
        if beams is not None:
            found, scores = search_continuations(writer, texts, writing, beams=beams), [[] for _ in texts]
        else:
            written = (write_answers if answers else write_continuations)(writer, texts, writing)
            if as_written and distributed.is_main_process():
                print_stream(written, len(texts), scored=arguments.logprobs is not None)
                return 0
            found, scores = _gathered(written, len(texts))
    if distributed.is_main_process():
        for index, (prompt, text, scored) in enumerate(zip(texts, found, scores, strict=True)):
            if arguments.json:
                more = {} if arguments.logprobs is None else {"logprobs": _scores_json(scored)}
                print_text(json.dumps({"prompt": prompt, "text": text, **more}, ensure_ascii=False))
                continue
            print_text(("\n" if index else "") + text)
            if arguments.logprobs is not None:
                _print_scores(scored)
    return 0


def _writing(arguments: argparse.Namespace, *, as_written: bool) -> Writing:
    sampling = Sampling(
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    # Without a stop nobody looks before the end.
    piece = 1 if as_written else (_PIECE if arguments.stop else None)
    skip = not arguments.special_tokens
    return Writing(arguments.tokens, sampling, arguments.seed, arguments.stop, skip, arguments.logprobs, piece)


def _is_watched() -> bool:
    """Whether standard output is the terminal of the one process that there is."""
    import jax

    # Several processes must take pieces of one length, and only some of them may have a terminal.
    return sys.stdout.isatty() and jax.process_count() == 1


def _prompts(given: Sequence[str] | None) -> Sequence[str]:
    if given is not None:
        return given
    if sys.stdin.isatty():
        raise ConfigError("jaxtrain sample: no prompt; give -p TEXT, or text on standard input")
    # The line end belongs to `echo`, not to the text.
    return [sys.stdin.read().removesuffix("\n")]


def print_stream(written: Iterable[Written], count: int, *, scored: bool) -> None:
    """Print texts as they are written: those of a batch one after another, with an empty line between them.

    Args:
        written: of a batch.
        count: texts in it.
        scored: whether the log-probabilities of a text follow it.

    Raises:
        KeyboardInterrupt: Ctrl-C; the line is ended first.
    """
    waiting: list[list[str]] = [[] for _ in range(count)]
    scores: list[list[TokenScore]] = [[] for _ in range(count)]
    ended, current, begun = [False] * count, 0, False
    try:
        for one in written:
            scores[one.row].extend(one.scores)
            ended[one.row] = ended[one.row] or one.ended
            waiting[one.row].append(one.text)
            while current < count:
                text = "".join(waiting[current])
                waiting[current].clear()
                if text:
                    print_text(text, end="", flush=True, is_content=True)
                    begun = True
                if not ended[current]:
                    break
                print_text("")
                begun = False
                if scored:
                    _print_scores(scores[current])
                current += 1
                if current < count:
                    print_text("")
    except KeyboardInterrupt:
        if begun:
            print_text("", flush=True)
        raise


def _gathered(written: Iterable[Written], count: int) -> tuple[list[str], list[list[TokenScore]]]:
    """The texts of a batch, and the scores of their new tokens, when all are written."""
    texts, scores = [""] * count, [[] for _ in range(count)]
    for one in written:
        texts[one.row] += one.text
        scores[one.row].extend(one.scores)
    return texts, scores


def _print_scores(scores: Sequence[TokenScore]) -> None:
    """Print a table of tokens with their log-probabilities; texts are quoted as in JSON."""
    rows = []
    for one in scores:
        likeliest = "  ".join(f"{_quoted(text)} {value:.4f}" for text, value in one.top)
        rows.append((f"{one.log_probability:.4f}", _quoted(one.text), likeliest))
    width = 3 if any(one.top for one in scores) else 2
    print_table(("logprob", "token", "likeliest")[:width], [row[:width] for row in rows])


def _scores_json(scores: Sequence[TokenScore]) -> list[dict[str, Any]]:
    return [
        {
            "token": one.text,
            "logprob": one.log_probability,
            "top_logprobs": [{"token": text, "logprob": value} for text, value in one.top],
        }
        for one in scores
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
