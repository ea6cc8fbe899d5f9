"""Arguments of `jaxtrain import` and `jaxtrain export`. No jax here."""

import argparse

from jaxtrain.commands.command import count
from jaxtrain.commands.shared_arguments import add_check, add_emulate, add_overrides, add_step

_SHARD_SIZE = "5GB"


def import_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain import`."""
    parser.add_argument(
        "path",
        metavar="FOLDER",
        help="published folder (config.json, safetensors), a .gguf file, or an adapter of PEFT",
    )
    add_overrides(parser)
    parser.add_argument("-o", "--output", metavar="RUN_DIR", help="directory of the run to make; --check needs none")
    parser.add_argument("--base", metavar="FOLDER", help="published model that an adapter is of")
    add_check(parser)
    add_emulate(parser)


def import_published(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain import`."""
    from jaxtrain.commands.published import run_import

    return run_import(
        arguments.path,
        arguments.overrides,
        output=arguments.output,
        base=arguments.base,
        check=arguments.check,
        emulate=arguments.emulate,
    )


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain export`."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="directory of a run, or a published folder or .gguf file to write again"
    )
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="folder to make")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="the same, by name")
    parser.add_argument(
        "--to",
        choices=("published", "stablehlo"),
        default="published",
        help="config.json and safetensors (published, the default), or a program that runs without jaxtrain",
    )
    parser.add_argument(
        "--batch", type=count, metavar="N", help="rows per call of a program; default: any number where it can be"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of the tensors; default: that of the model that the run started from, else float32",
    )
    parser.add_argument(
        "--max-shard-size", default=_SHARD_SIZE, metavar="SIZE", help=f"most bytes per file; default: {_SHARD_SIZE}"
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a run with adapters: add them to the base and write all of the model"
    )
    parser.add_argument(
        "--base",
        choices=("nf4",),
        help="write linear layers in 4 bits as bitsandbytes does, which transformers and model.from read",
    )
    add_step(parser)
    add_check(parser)
    add_emulate(parser)


def export_published(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain export`."""
    from jaxtrain.commands.published import named_folder, run_export, run_export_program

    folder = named_folder(arguments.folder, arguments.output)
    if arguments.to == "stablehlo":
        size = None if arguments.max_shard_size == _SHARD_SIZE else arguments.max_shard_size
        weights = (arguments.dtype, size, arguments.merge, arguments.base, arguments.check)
        options = ("--dtype", "--max-shard-size", "--merge", "--base", "--check")
        return run_export_program(
            arguments.run_dir,
            folder,
            unused=[option for option, given in zip(options, weights, strict=True) if given],
            batch_size=arguments.batch,
            step=arguments.step,
            emulate=arguments.emulate,
        )
    return run_export(
        arguments.run_dir,
        output=folder,
        batch_size=arguments.batch,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        step=arguments.step,
        merge=arguments.merge,
        base=arguments.base,
        check=arguments.check,
        emulate=arguments.emulate,
    )
