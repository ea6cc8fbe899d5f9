"""`jaxtrain eval`: a checkpoint of a run on held-out rows, or on tasks of lm-eval-harness."""

import argparse
from typing import Any

import jax

from jaxtrain.commands.shared import print_json, print_records
from jaxtrain.config.data import CalledData
from jaxtrain.config.schema import CHANGED_BY_EVALUATION
from jaxtrain.errors import ConfigError
from jaxtrain.inference.open import open_run
from jaxtrain.metrics.evaluation import evaluate_batches
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.writers import flat_scalars
from jaxtrain.runtime import distributed


def run(arguments: argparse.Namespace) -> int:
    """Print the metrics of a checkpoint, or of a published model on tasks; return 0."""
    if arguments.tasks is None:
        for name in ("limit", "shots", "chat", "batch"):
            if getattr(arguments, name):
                raise ConfigError(f"--{name} is for --tasks; for held-out rows write evaluation.max_batches=N")
    for override in arguments.overrides:
        if not override.startswith(CHANGED_BY_EVALUATION):
            keys = ", ".join(CHANGED_BY_EVALUATION)
            raise ConfigError(f"{override} cannot change for a trained run; eval takes {keys}")
    distributed.start(emulate=arguments.emulate)
    with Progress(process_index=jax.process_index()) as progress:
        if arguments.tasks is None:
            metrics = _evaluate_rows(arguments, progress)
            records = [metrics]
        else:
            metrics = _evaluate_tasks(arguments, progress)
            records = metrics["tasks"]
    if progress.silent:
        return 0
    if arguments.json:
        print_json({"run_dir": arguments.run_dir, **metrics})
    else:
        print_records(records)
    return 0


def _evaluate_rows(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return step, number of rows and metrics of a checkpoint on held-out rows."""
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
    return {"step": run.step, "rows": held_out.num_rows, **metrics}


def _evaluate_tasks(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the step of a checkpoint, None for a published model, and a record for each metric of each task."""
    from jaxtrain.inference.tasks import evaluate_tasks

    with progress.phase("evaluating") as phase:
        step, records = evaluate_tasks(
            arguments.run_dir,
            [task.strip() for task in arguments.tasks.split(",") if task.strip()],
            limit=arguments.limit,
            shots=arguments.shots,
            chat=arguments.chat,
            batch_size=arguments.batch,
            overrides=arguments.overrides,
            step=arguments.step,
            quantize=arguments.quantize,
            report=phase.note,
        )
    return {"step": step, "tasks": records}
