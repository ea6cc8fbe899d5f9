"""`jaxtrain eval`: a checkpoint of a run on held-out rows, or on tasks of lm-eval-harness."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxtrain.commands.shared import own_code, print_json, print_records, print_table
from jaxtrain.config import Config
from jaxtrain.config.data import CalledData
from jaxtrain.config.files import is_run
from jaxtrain.config.schema import CHANGED_BY_EVALUATION
from jaxtrain.errors import ConfigError
from jaxtrain.inference.open import open_run, saved_config
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.writers import flat_scalars
from jaxtrain.runtime import distributed


def run(arguments: argparse.Namespace) -> int:
    """Print the metrics of a checkpoint; return 0."""
    if arguments.tasks is not None:
        return _evaluate_tasks(arguments)
    for name in ("limit", "shots", "chat", "batch"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} is for --tasks; for held-out rows write evaluation.max_batches=N")
    config = _evaluated_config(arguments.run_dir, arguments.overrides)
    distributed.start(emulate=arguments.emulate, compilation_cache=config.compilation_cache)
    from jaxtrain.metrics.evaluation import evaluate_batches

    with own_code(config), Progress(process_index=jax.process_index()) as progress:
        with progress.phase("opening the run"):
            run = open_run(
                arguments.run_dir,
                overrides=arguments.overrides,
                step=arguments.step,
                quantize=arguments.quantize,
                report=progress.message,
            )
            evaluator = run.evaluator
            held_out = run.held_out()
            # A mistake in the layout is found before anything is restored.
            evaluator.feed.shardings(held_out.spec())
            state = run.state
        with progress.phase("evaluating") as phase:
            metrics = flat_scalars(evaluate_batches(evaluator, state, held_out))
            data = run.config.data
            source = data.call if isinstance(data, CalledData) else data.kind
            phase.note(f"{held_out.num_rows:,} rows of {source}")
    record = {"step": run.step, "rows": held_out.num_rows, **metrics}
    if progress.silent:
        return 0
    if arguments.json:
        print_json({"run_dir": arguments.run_dir, **record})
    else:
        print_records([record])
    return 0


def _evaluated_config(run_dir: str, overrides: Sequence[str]) -> Config:
    """Return the config of a run with the settings that an evaluation changes."""
    config = saved_config(run_dir, overrides=overrides).config
    for override in overrides:
        if not override.startswith(CHANGED_BY_EVALUATION):
            keys = ", ".join(CHANGED_BY_EVALUATION)
            raise ConfigError(f"{override} cannot change for a trained run; eval takes {keys}")
    return config


def _evaluate_tasks(arguments: argparse.Namespace) -> int:
    """Print the metrics of a checkpoint, or of a published model, on tasks; return 0."""
    tasks = [task.strip() for task in arguments.tasks.split(",") if task.strip()]
    path = arguments.run_dir
    config = None
    cache = "auto"
    if is_run(Path(path)):  # a published model has no config of its own
        config = _evaluated_config(path, arguments.overrides)
        cache = config.compilation_cache
    from jaxtrain.inference.tasks import evaluate_tasks

    distributed.start(emulate=arguments.emulate, compilation_cache=cache)
    from jaxtrain.inference.harness import HEADER, shown_rows

    progress = Progress(process_index=jax.process_index())
    with own_code(config), progress, progress.phase("evaluating") as phase:
        step, rows = evaluate_tasks(
            path,
            tasks,
            limit=arguments.limit,
            shots=arguments.shots,
            chat=arguments.chat,
            batch_size=arguments.batch,
            overrides=arguments.overrides,
            step=arguments.step,
            quantize=arguments.quantize,
            report=phase.note,
        )
    if progress.silent:
        return 0
    if arguments.json:
        print_json({"run_dir": path, "step": step, "tasks": rows})
    else:
        print_table(HEADER, shown_rows(rows))
    return 0
