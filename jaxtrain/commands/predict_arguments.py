"""Arguments of `jaxtrain predict`. No jax here."""

import argparse

from jaxtrain.commands.command import count
from jaxtrain.commands.shared_arguments import add_emulate, add_quantize, add_run, add_step


def predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain predict`."""
    add_run(parser)
    parser.add_argument(
        "file",
        metavar="FILE",
        help="table (.csv, .jsonl, .parquet), folder or list of images, texts (.txt), or array (.npy)",
    )
    parser.add_argument("--out", metavar="FILE", help="write FILE (.csv or .jsonl); default: CSV on standard output")
    parser.add_argument("--batch", type=count, metavar="N", help="the largest batch; default: a microbatch of the run")
    parser.add_argument("--probabilities", action="store_true", help="add the probability of each class")
    add_quantize(parser)
    add_step(parser)
    add_emulate(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row instead of CSV")


def predict(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain predict`."""
    from jaxtrain.commands.predict import run_predict

    return run_predict(
        arguments.run_dir,
        arguments.file,
        out=arguments.out,
        batch_size=arguments.batch,
        probabilities=arguments.probabilities,
        quantize=arguments.quantize,
        step=arguments.step,
        emulate=arguments.emulate,
        as_json=arguments.json,
    )
