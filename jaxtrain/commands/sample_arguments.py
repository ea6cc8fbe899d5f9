"""The arguments of `jaxtrain sample`. No jax here."""

import argparse

from jaxtrain.commands.command import count, number, step_number
from jaxtrain.commands.shared_arguments import add_emulate, add_json, add_quantize, add_step


def sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain sample`."""
    parser.add_argument("run_dir", metavar="RUN|FOLDER", help="a run, a published folder or GGUF file, or an adapter")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "-p", "--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated; default: stdin"
    )
    prompts.add_argument("--chat", action="append", metavar="QUESTION", help="question to answer; may be repeated")
    parser.add_argument("-n", "--tokens", type=count, metavar="N", help="new tokens; default: 200, or as many as fit")
    parser.add_argument("--temperature", type=number, default=0.8, metavar="T", help="0 is greedy; default: 0.8")
    parser.add_argument("--top-k", type=count, metavar="K", help="only the K most likely tokens")
    parser.add_argument("--top-p", type=number, metavar="P", help="only the most likely tokens that add up to P")
    parser.add_argument("--min-p", type=number, metavar="P", help="only tokens of at least P times the best one")
    parser.add_argument(
        "--repetition-penalty", type=number, default=1.0, metavar="R", help="weaken tokens of the text; default: 1, not"
    )
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; give it several times")
    parser.add_argument("--beams", type=count, metavar="N", help="search the most likely text among N beginnings")
    parser.add_argument("--seed", type=step_number, default=0, metavar="N", help="seed of random choices; default: 0")
    parser.add_argument(
        "--stream", action="store_true", help="print text as it is written; default: where it goes to a terminal"
    )
    parser.add_argument(
        "--logprobs",
        type=step_number,
        nargs="?",
        const=0,
        metavar="K",
        help="log-probability of each new token, and of the K likeliest ones in its place",
    )
    parser.add_argument("--special-tokens", action="store_true", help="show the special tokens that the model writes")
    add_quantize(parser)
    add_step(parser)
    add_emulate(parser)
    add_json(parser)


def sample(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain sample`."""
    from jaxtrain.commands.sample import run_sample

    return run_sample(
        arguments.run_dir,
        prompts=arguments.prompt,
        questions=arguments.chat,
        new_tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        stop=arguments.stop or (),
        beams=arguments.beams,
        seed=arguments.seed,
        quantize=arguments.quantize,
        step=arguments.step,
        emulate=arguments.emulate,
        as_json=arguments.json,
        stream=arguments.stream,
        logprobs=arguments.logprobs,
        special_tokens=arguments.special_tokens,
    )
