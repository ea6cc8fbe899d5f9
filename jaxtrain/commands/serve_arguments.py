"""The arguments of `jaxtrain serve`. No jax here."""

import argparse

from jaxtrain.commands.command import count, step_number
from jaxtrain.commands.shared_arguments import add_emulate, add_overrides, add_quantize, add_step


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `serve`."""
    parser.add_argument("path", metavar="RUN|FOLDER", help="a run, a published folder or GGUF file, or an adapter")
    add_overrides(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: this machine only, 127.0.0.1")
    parser.add_argument("--port", type=step_number, default=8000, metavar="N", help="0: a free one; default: 8000")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="the key that clients give; default: JAXTRAIN_API_KEY (environment)"
    )
    parser.add_argument("--name", metavar="NAME", help="what clients call the model; default: the name of the folder")
    parser.add_argument("--slots", type=count, default=8, metavar="N", help="answers that run at a time; default: 8")
    parser.add_argument("--length", type=count, metavar="N", help="tokens of prompt and answer; default: up to 4096")
    parser.add_argument("--queue", type=count, default=256, metavar="N", help="answers that may wait; default: 256")
    parser.add_argument(
        "--speculate",
        type=step_number,
        default=0,
        metavar="N",
        help="draft up to N tokens by prompt lookup; default: 0",
    )
    parser.add_argument("--adapter", metavar="DIR", help="an adapter of PEFT over a published folder")
    add_quantize(parser)
    add_step(parser)
    add_emulate(parser)


def serve(arguments: argparse.Namespace) -> int:
    """Runs `serve`."""
    from jaxtrain.commands.serve import run_serve

    return run_serve(
        arguments.path,
        arguments.overrides,
        host=arguments.host,
        port=arguments.port,
        api_key_file=arguments.api_key_file,
        slots=arguments.slots,
        length=arguments.length,
        queue=arguments.queue,
        speculate=arguments.speculate,
        adapter=arguments.adapter,
        quantize=arguments.quantize,
        step=arguments.step,
        name=arguments.name,
        emulate=arguments.emulate,
    )
