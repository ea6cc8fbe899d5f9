"""`jaxtrain sample`: prints text of a run or a published model."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

import jax

from jaxtrain.commands.shared import own_code, print_text
from jaxtrain.errors import ConfigError
from jaxtrain.inference.generate import Written
from jaxtrain.inference.open import open_model
from jaxtrain.inference.predict import Writing, write, writer_of
from jaxtrain.inference.sampling import Sampling
from jaxtrain.runtime import distributed

# Tokens between two looks for a stop, for which the host waits.
_PIECE = 16


def run(arguments: argparse.Namespace) -> int:
    """Print each prompt with its continuation: as it is written on a terminal, elsewhere when it is done; return 0.

    Several prompts are one batch, and an empty line separates the texts.
    """
    is_chat = bool(arguments.chat)
    if is_chat and arguments.stop:
        raise ConfigError("jaxtrain sample: --chat takes no --stop; leave one out")
    prompts = arguments.chat if is_chat else _prompts(arguments.prompt)
    distributed.start(emulate=arguments.emulate)
    writing = _writing(arguments)
    model = open_model(arguments.run_dir, quantize=arguments.quantize, step=arguments.step)
    with own_code(model.config):
        written: Iterable[Written] = write(writer_of(model, answers=is_chat), prompts, writing, answers=is_chat)
        if arguments.json or writing.piece != 1:
            written = list(written)  # an error comes before any text
        if not distributed.is_main_process():
            list(written)  # each process takes part
        elif arguments.json:
            _print_json(written, prompts)
        else:
            print_stream(written, len(prompts))
    return 0


def _writing(arguments: argparse.Namespace) -> Writing:
    sampling = Sampling(
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    # Several processes must take pieces of one length, and only some of them may have a terminal.
    is_watched = sys.stdout.isatty() and jax.process_count() == 1
    piece = None
    if arguments.stream or is_watched:
        piece = 1
    elif arguments.stop:
        piece = _PIECE
    return Writing(arguments.tokens, sampling, arguments.seed, arguments.stop, piece=piece)


def _prompts(prompts: Sequence[str] | None) -> Sequence[str]:
    """Return the prompts of the command line, or the text on standard input."""
    if prompts:
        return prompts
    if sys.stdin.isatty():
        raise ConfigError("jaxtrain sample: no prompt; give -p TEXT, or text on standard input")
    # The line end belongs to `echo`, not to the text.
    return [sys.stdin.read().removesuffix("\n")]


def _print_json(written: Iterable[Written], prompts: Sequence[str]) -> None:
    texts = [""] * len(prompts)
    for piece in written:
        texts[piece.row] += piece.text
    for prompt, text in zip(prompts, texts, strict=True):
        print_text(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))


def print_stream(written: Iterable[Written], count: int) -> None:
    """Print the `count` texts of a batch one after another, with an empty line between two.

    Ctrl-C ends the line that is being written.
    """
    waiting = [""] * count
    ended: set[int] = set()
    row = 0
    is_in_line = False
    try:
        for piece in written:
            waiting[piece.row] += piece.text
            if piece.ended:
                ended.add(piece.row)
            while row < count:
                if waiting[row]:
                    print_text(waiting[row], end="", flush=True, is_content=True)
                    waiting[row] = ""
                    is_in_line = True
                if row not in ended:
                    break
                row += 1
                is_in_line = False
                print_text("\n" if row < count else "")
    except KeyboardInterrupt:
        if is_in_line:
            print_text("", flush=True)
        raise
