"""Arguments of `jaxtrain import` and `jaxtrain export`. No jax here."""

import argparse

from jaxtrain.commands.shared_arguments import add_check, add_emulate, add_overrides, add_step


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
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="published folder to make")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of the tensors; default: that of the model that the run started from, else float32",
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="most bytes per file; default: 5GB")
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
    from jaxtrain.commands.published import run_export

    return run_export(
        arguments.run_dir,
        output=arguments.output,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        step=arguments.step,
        merge=arguments.merge,
        base=arguments.base,
        check=arguments.check,
        emulate=arguments.emulate,
    )
