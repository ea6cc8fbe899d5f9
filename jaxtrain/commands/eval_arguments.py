"""Arguments of `jaxtrain eval`, and which of its two kinds of evaluation they ask for. No jax here."""

import argparse

from jaxtrain.commands.command import count, step_number
from jaxtrain.commands.shared_arguments import add_emulate, add_json, add_overrides, add_quantize, add_step
from jaxtrain.errors import ConfigError


def eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="directory of a run; with --tasks also a published folder or GGUF file"
    )
    add_overrides(parser)
    parser.add_argument(
        "--tasks",
        metavar="FILE|NAME",
        help="tasks of lm-eval-harness in place of held-out rows, as task.yaml or arc_easy,hellaswag (extra: harness)",
    )
    parser.add_argument("--limit", type=count, metavar="N", help="with --tasks: documents of each task; default: all")
    parser.add_argument(
        "--shots", type=step_number, metavar="N", help="with --tasks: examples before a question; default: the task's"
    )
    parser.add_argument("--chat", action="store_true", help="with --tasks: ask by the chat template of the run")
    parser.add_argument("--batch", type=count, metavar="N", help="with --tasks: rows of a batch; default: by length")
    add_quantize(parser)
    add_step(parser)
    add_emulate(parser)
    add_json(parser)


def evaluate(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if arguments.tasks is not None:
        from jaxtrain.commands.eval_tasks import run_eval_tasks

        return run_eval_tasks(
            arguments.run_dir,
            arguments.overrides,
            tasks=arguments.tasks,
            limit=arguments.limit,
            shots=arguments.shots,
            chat=arguments.chat,
            batch_size=arguments.batch,
            quantize=arguments.quantize,
            step=arguments.step,
            emulate=arguments.emulate,
            as_json=arguments.json,
        )
    _refuse_without_tasks(arguments)
    from jaxtrain.commands.eval import run_eval

    return run_eval(
        arguments.run_dir,
        arguments.overrides,
        quantize=arguments.quantize,
        step=arguments.step,
        emulate=arguments.emulate,
        as_json=arguments.json,
    )


def _refuse_without_tasks(arguments: argparse.Namespace) -> None:
    """Raises where an option of tasks is given without tasks.

    Raises:
        ConfigError: names the option.
    """
    for name in ("limit", "shots", "chat", "batch"):
        value = getattr(arguments, name)
        if value is not None and value is not False:
            raise ConfigError(
                f"jaxtrain eval: --{name} is for --tasks; for held-out rows write evaluation.max_batches=N"
            )
