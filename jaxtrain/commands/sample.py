"""`jaxtrain sample`: prints text of a run or a published model."""

import argparse
import json
import sys
from collections.abc import Sequence

import jax

from jaxtrain.commands.shared import print_text
from jaxtrain.errors import ConfigError
from jaxtrain.inference.decoding import Writing
from jaxtrain.inference.generate import joined
from jaxtrain.inference.open import open_model
from jaxtrain.inference.sampling import Sampling
from jaxtrain.runtime import distributed

# Tokens between two looks for a stop, for which the host waits.
_PIECE = 16


def run(arguments: argparse.Namespace) -> int:
    """Print each prompt with its continuation; return 0.

    A single text is printed as it is written on a terminal, elsewhere when it is done. Several prompts are one batch,
    and an empty line separates the texts.
    """
    is_chat = bool(arguments.chat)
    if is_chat and arguments.stop:
        raise ConfigError("jaxtrain sample: --chat takes no --stop; leave one out")
    prompts = arguments.chat if is_chat else _prompts(arguments.prompt)
    distributed.start(emulate=arguments.emulate)
    # Several processes must take pieces of one length, and only some of them may have a terminal.
    is_watched = sys.stdout.isatty() and jax.process_count() == 1
    is_stream = len(prompts) == 1 and not arguments.json and (arguments.stream or is_watched)
    model = open_model(arguments.run_dir, quantize=arguments.quantize, step=arguments.step)
    sampling = Sampling(
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    piece = None
    if is_stream:
        piece = 1
    elif arguments.stop:
        piece = _PIECE
    writing = Writing(arguments.tokens, sampling, arguments.seed, arguments.stop, piece=piece)
    written = model.write(prompts, writing, chat=is_chat)
    if is_stream and distributed.is_main_process():
        for piece in written:
            print_text(piece.text, end="", flush=True, is_content=True)
        print_text("")
        return 0
    texts = joined(written, len(prompts))
    if not distributed.is_main_process():
        return 0
    if not arguments.json:
        print_text("\n\n".join(texts), is_content=True)
        return 0
    for prompt, text in zip(prompts, texts, strict=True):
        print_text(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
    return 0


def _prompts(prompts: Sequence[str] | None) -> Sequence[str]:
    """Return the prompts of the command line, or the text on standard input."""
    if prompts:
        return prompts
    if sys.stdin.isatty():
        raise ConfigError("jaxtrain sample: no prompt; give -p TEXT, or text on standard input")
    # The line end belongs to `echo`, not to the text.
    return [sys.stdin.read().removesuffix("\n")]
