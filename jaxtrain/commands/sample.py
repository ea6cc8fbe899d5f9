"""`jaxtrain sample` prints text from a checkpoint or a published model; `jaxtrain serve` answers as OpenAI does."""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxtrain.commands.shared import own_code, print_text
from jaxtrain.errors import ConfigError
from jaxtrain.inference.generate import Written
from jaxtrain.inference.open import open_model, open_served
from jaxtrain.inference.predict import Writing, write, writer_of
from jaxtrain.inference.sampling import Sampling
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark

# Tokens between two looks for a stop, for which the host waits.
_PIECE = 16


def run(arguments: argparse.Namespace) -> int:
    """Print each prompt with its continuation: as it is written on a terminal, elsewhere when it is done.

    Several prompts are one batch, and an empty line separates the texts.
    """
    answers = arguments.chat is not None
    if answers and arguments.stop:
        raise ConfigError("jaxtrain sample: --chat takes no --stop; leave one out")
    texts = arguments.chat if answers else _prompts(arguments.prompt)
    distributed.start(emulate=arguments.emulate)
    writing = _writing(arguments)
    model = open_model(arguments.run_dir, quantize=arguments.quantize, step=arguments.step)
    with own_code(model.config):
        writer = writer_of(model, answers=answers)
        written: Iterable[Written] = write(writer, texts, writing, answers=answers)
        if arguments.json or writing.piece != 1:
            written = list(written)  # an error comes before any text
        if distributed.is_main_process() and not arguments.json:
            print_stream(written, len(texts))
            return 0
        pieces = list(written)
    if distributed.is_main_process():
        for row, prompt in enumerate(texts):
            of_row = [piece for piece in pieces if piece.row == row]
            answer: dict[str, Any] = {"prompt": prompt, "text": "".join(piece.text for piece in of_row)}
            print_text(json.dumps(answer, ensure_ascii=False))
    return 0


def _writing(arguments: argparse.Namespace) -> Writing:
    penalty, min_p = arguments.repetition_penalty, arguments.min_p
    sampling = Sampling(
        arguments.temperature, arguments.top_k, arguments.top_p, min_p=min_p, repetition_penalty=penalty
    )
    # Several processes must take pieces of one length, and only some of them may have a terminal.
    watched = sys.stdout.isatty() and jax.process_count() == 1
    # Without a stop nobody looks before the end.
    piece = 1 if arguments.stream or watched else _PIECE if arguments.stop else None
    return Writing(arguments.tokens, sampling, arguments.seed, arguments.stop, piece=piece)


def _prompts(given: Sequence[str] | None) -> Sequence[str]:
    if given is not None:
        return given
    if sys.stdin.isatty():
        raise ConfigError("jaxtrain sample: no prompt; give -p TEXT, or text on standard input")
    # The line end belongs to `echo`, not to the text.
    return [sys.stdin.read().removesuffix("\n")]


def print_stream(written: Iterable[Written], count: int) -> None:
    """Print the `count` texts of a batch one after another.

    An empty line is between them, and Ctrl-C ends the line that is being written.
    """
    waiting: list[list[Written]] = [[] for _ in range(count)]
    ended, current, begun = set(), 0, False
    try:
        for one in written:
            waiting[one.row].append(one)
            if one.ended:
                ended.add(one.row)
            while current < count:
                text = "".join(piece.text for piece in waiting[current])
                waiting[current].clear()
                if text:
                    print_text(text, end="", flush=True, is_content=True)
                    begun = True
                if current not in ended:
                    break
                print_text("")
                begun, current = False, current + 1
                if current < count:
                    print_text("")
    except KeyboardInterrupt:
        if begun:
            print_text("", flush=True)
        raise


def serve(arguments: argparse.Namespace) -> int:
    """Serve a model until SIGTERM or Ctrl-C; what runs then is finished.

    Standard output gets one line, with the address, when requests are answered; nothing is compiled after it.
    """
    missing = [package for package in ("starlette", "uvicorn") if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"jaxtrain serve needs {' and '.join(missing)}: pip install '.[serve]'")
    from jaxtrain.inference.server.app import build_app
    from jaxtrain.inference.server.serve import address_of, bind, read_api_key, serve_app, start_service

    key = read_api_key(arguments.api_key_file)
    with bind(arguments.host, arguments.port, has_key=key is not None) as taken:
        began = time.monotonic()
        distributed.start(emulate=arguments.emulate)
        served = open_served(
            arguments.path,
            adapter=arguments.adapter,
            quantize=arguments.quantize,
            step=arguments.step,
            overrides=arguments.overrides,
            name=arguments.name,
        )
        service = start_service(
            served, slots=arguments.slots, length=arguments.length, queue=arguments.queue, api_key=key
        )
        address = address_of(taken)
        print_remark(f"{served.sharded_model!r}")
        summary = f"{arguments.slots} slots of {service.length} tokens, {arguments.queue} may wait"
        print_remark(f"model {served.name!r}: {summary}; compiled in {time.monotonic() - began:.1f} s")
        print_remark(f"clients: base_url {address}/v1; in a browser: {address}")

        def say_ready() -> None:
            print_text(f"ready: {address}", flush=True)

        try:
            serve_app(build_app(service, host=arguments.host), taken, when_ready=say_ready)
        finally:
            service.engine.close()
    return 0
