"""`jaxtrain eval`: a checkpoint of a run on held-out rows, or on tasks of lm-eval-harness."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands.shared import own_code, print_json, print_table
from jaxtrain.config import Config
from jaxtrain.config.data import CalledData
from jaxtrain.config.files import is_run
from jaxtrain.errors import ConfigError
from jaxtrain.inference.open import open_run, saved_config
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.writers import flat_scalars
from jaxtrain.runtime import distributed

# Keys that eval may change (the base of adapters may have moved); the others describe the parameters that were trained.
_MAY_CHANGE = ("data.", "evaluation.", "parallel.", "train.global_batch_size", "compilation_cache", "model.from")


def run(arguments: argparse.Namespace) -> int:
    """Print the metrics of a checkpoint; 0."""
    if arguments.tasks is not None:
        return _evaluate_tasks(arguments)
    for name in ("limit", "shots", "chat", "batch"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} is for --tasks; for held-out rows write evaluation.max_batches=N")
    config = _evaluated_config(arguments.run_dir, arguments.overrides)
    distributed.start(emulate=arguments.emulate, compilation_cache=config.compilation_cache)
    main = distributed.is_main_process()
    from jaxtrain.metrics.evaluation import evaluate_batches

    with own_code(config), Progress(process_index=0 if main else 1) as progress:
        with progress.phase("opening the run"):
            run = open_run(
                arguments.run_dir,
                overrides=arguments.overrides,
                step=arguments.step,
                quantize=arguments.quantize,
                report=progress.message,
            )
            evaluator, held_out = run.evaluator, run.held_out()
            # A mistake in the layout is found before anything is restored.
            evaluator.feed.shardings(held_out.spec())
            state = run.state
        with progress.phase("evaluating") as phase:
            metrics = flat_scalars(evaluate_batches(evaluator, state, held_out))
            data = run.config.data
            phase.note(f"{held_out.num_rows:,} rows of {data.call if isinstance(data, CalledData) else data.kind}")
    if not main:
        return 0
    if arguments.json:
        print_json({"run_dir": arguments.run_dir, "step": run.step, "rows": held_out.num_rows, **metrics})
    else:
        shown = {name: f"{value:.6g}" for name, value in metrics.items()}
        print_table(("step", "rows", *shown), [(str(run.step), str(held_out.num_rows), *shown.values())])
    return 0


def _evaluated_config(run_dir: str, overrides: Sequence[str]) -> Config:
    """The config of a run with the settings that an evaluation changes; none of them describes what was trained."""
    config = saved_config(run_dir, overrides=overrides).config
    for override in overrides:
        if not override.startswith(_MAY_CHANGE):
            allowed = ", ".join(f"{prefix}*" if prefix.endswith(".") else prefix for prefix in _MAY_CHANGE)
            raise ConfigError(f"{override} cannot change for a trained run; eval takes {allowed}")
    return config


def _evaluate_tasks(arguments: argparse.Namespace) -> int:
    """Print the metrics of a checkpoint, or of a published model, on tasks."""
    listed = [task.strip() for task in arguments.tasks.split(",") if task.strip()]
    path = arguments.run_dir
    # A published model has no config of its own.
    config = _evaluated_config(path, arguments.overrides) if is_run(Path(path)) else None
    from jaxtrain.inference.tasks import HEADER, evaluate_tasks, shown_rows

    cache = "auto" if config is None else config.compilation_cache
    distributed.start(emulate=arguments.emulate, compilation_cache=cache)
    main = distributed.is_main_process()
    progress = Progress(process_index=0 if main else 1)
    with own_code(config), progress, progress.phase("evaluating") as phase:
        step, rows = evaluate_tasks(
            path,
            listed,
            limit=arguments.limit,
            shots=arguments.shots,
            chat=arguments.chat,
            batch_size=arguments.batch,
            overrides=arguments.overrides,
            step=arguments.step,
            quantize=arguments.quantize,
            report=phase.note,
        )
    if not main:
        return 0
    if arguments.json:
        print_json({"run_dir": path, "step": step, "tasks": rows})
    else:
        print_table(HEADER, shown_rows(rows))
    return 0
