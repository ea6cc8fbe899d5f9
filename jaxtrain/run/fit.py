"""A run of parts from Python: `fit` makes the spec that its arguments say, and trains it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from jaxtrain.config import load_config
from jaxtrain.config.kinds import PREFERENCES
from jaxtrain.config.schema import AXES, EarlyStopping, Parallelism
from jaxtrain.data.configured import with_batch_size
from jaxtrain.data.sources.given import data_of, renamed
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import Model, Params
from jaxtrain.models.task import Task
from jaxtrain.models.tasks import ERRORS, TASKS, named_task
from jaxtrain.run.callbacks import Callback
from jaxtrain.run.directory import numbered_folder, run_folder
from jaxtrain.run.spec import RunSpec, with_callbacks
from jaxtrain.run.trainer import Result, train
from jaxtrain.runtime import distributed
from jaxtrain.train.state import EvaluationState, TrainState, check_parts


def fit(
    model: Model,
    task: Task | str,
    optimizer: optax.GradientTransformation,
    *,
    data: Any,
    validation: Any = None,
    columns: Mapping[str, str] | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    mesh: Mesh | None = None,
    policy: str = "fp32",
    accumulation_steps: int = 1,
    clip_norm: float | None = None,
    ema_decay: float | None = None,
    trainable: Callable[[str], bool] | None = None,
    learning_rate: optax.Schedule | float | None = None,
    rules: Mapping[str, tuple[str, ...]] | None = None,
    parallelism: Parallelism | None = None,
    params: Params | TrainState | EvaluationState | Any = None,
    skip: Sequence[str] = (),
    seed: int = 0,
    run_dir: str | Path | None = None,
    resume: str | None = None,
    finetune: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    logging: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback | EarlyStopping] = (),
) -> Result:
    """Train your own model as a run: locked, logged, evaluated, saved, reported, and resumed by the same call.

    Args:
        model: from `from_nnx`, `from_linen`, `from_stages`, `from_functions`, or a shipped one.
        task: what outputs are compared with; or its name: "classification", "regression", "mae".
        optimizer: any optax transformation, already made with its learning rate.
        data: a dict of arrays [num_rows, ...] (NumPy or jax; nested dicts too) such as {"inputs": x, "targets": y}, a
            named tuple of them, or the pair (x, y); rows with an index (`ArrayRows`, any `grain.MapDataset` of single
            rows, a torch or Hugging Face dataset: `__len__`, and `__getitem__` giving a dict or a pair); a `Data`; or
            an iterable of batches, in one process, whose first batches a resumed run skips.
        validation: rows for evaluation, in the same forms but the last, or the share of the rows that are kept for it
            (0.1), where a `Data` has no held-out rows yet; None: those of a `Data`, else none. All of them are
            evaluated; evaluation={"max_batches": 50} takes 50 batches of rows spread over them.
        columns: entry of a row that the model or task takes -> what the rows call it: {"inputs": "image", "targets":
            "label"}, and "weights" where there are any; others are left out. None: the rows have our names.
        steps: total number of optimizer steps. Give it or `epochs`.
        epochs: passes over the training rows, in place of `steps`.
        batch_size: rows per step over all devices and microbatches; None: 32, or that of an iterable of batches.
        mesh: from `make_mesh`; None: all devices on the `data` axis.
        policy: number formats: fp32, tf32, bf16, bf16_pure, fp16 or fp8.
        accumulation_steps: microbatches per step.
        clip_norm: largest global norm of the gradient; None: no clipping.
        ema_decay: largest decay of a moving average of the parameters, which evaluation uses; None: none.
        trainable: parameter path -> whether it is trained; None: all are.
        learning_rate: the rate of the optimizer that metrics and report show, a number or a schedule; None: none.
        rules, parallelism: see `make_train_step`.
        params: what training starts from: a tree of arrays, a state (whose averages are taken, where it has any, and
            whose model_state comes along), the path of a run or of a published model, or what `fit` or `open_run`
            returned; None: what the model draws.
        skip: patterns of parameters that are drawn although `params` has them: ["head/*"].
        seed: of the parameters, the order of the rows, dropout, and the rows that a share takes.
        run_dir: where everything is written; None: a directory of its own, runs/<name of the model>-<number>.
        resume: None goes on with the run that `run_dir` holds if it trains the same (more steps are allowed) and
            refuses another one; never starts anew; must and auto are as for `run_config`.
        finetune: adapters to train in place of the weights, as in the group of a config: {"lora": {"rank": 8}}.
        evaluation, checkpoint, logging: keys of these groups of a config, such as {"every": 100}.
        overrides: any keys of a config on top of the arguments, dotted or nested: {"optimizer.offload": True}.
        callbacks: `Callback` and `EarlyStopping`.

    Returns:
        The result, once all steps are done or the run has stopped early: the last state and its metrics.

    Raises:
        ConfigError, DataError, CheckpointError: before training starts.
        DivergedError: non-finite steps in a row.
        PreemptedError: stopped by a signal; the state is saved, and the same call goes on from it.

    Example:
        >>> result = jt.fit(
        ...     model, jt.classification(), optax.adamw(1e-3), data=rows, steps=4, batch_size=8, run_dir="runs/fit"
        ... )
        done: step 4
        report: runs/fit/report.html
        >>> result.step
        4
    """
    if (steps is None) == (epochs is None):
        raise ConfigError("fit takes steps= or epochs=: " + ("give one of them" if steps is None else "leave one out"))
    settings: dict[str, Any] = {
        "seed": seed,
        "train": {"accumulation_steps": accumulation_steps},
        "optimizer": {"clip_norm": clip_norm, "ema_decay": ema_decay},
        "precision": {"policy": policy},
        "finetune": finetune or {},
        "evaluation": evaluation or {},
        "checkpoint": checkpoint or {},
        "logging": logging or {},
    }
    if steps is not None:
        settings["train"]["steps"] = steps
    else:
        settings["train"]["epochs"] = epochs
    if batch_size is not None:
        settings["train"]["global_batch_size"] = batch_size
    is_named = isinstance(task, str) and task in TASKS
    task = named_task(task)
    check_parts(model=model, task=task, optimizer=optimizer)
    config_task = "regression" if task.name in ERRORS else task.name
    if config_task in TASKS:
        settings["task"] = config_task
    if mesh is not None:
        settings["parallel"] = {axis: mesh.shape[axis] for axis in AXES}
    if parallelism is not None:
        # Over the degrees of the mesh: a step refuses others that are set.
        settings.setdefault("parallel", {}).update(parallelism.model_dump(exclude_unset=True))
    model_state = None
    if isinstance(params, TrainState | EvaluationState):
        model_state = params.evaluation_model_state
        params = params.evaluation_params
    # Before jax is asked for anything: what is wrong with the settings, and where compiled programs are kept.
    loaded = load_config(settings, keywords=overrides, origin="jaxtrain.fit")
    distributed.start(compilation_cache=loaded.config.compilation_cache)
    if columns is not None:
        data = renamed(data, columns, "data")
        validation = renamed(validation, columns, "validation")
    counts_tokens = task.name in ("language_modeling", *PREFERENCES)
    opened = data_of(data, validation=validation, seed=loaded.config.seed, counts_tokens=counts_tokens)
    config = with_batch_size(loaded.config, opened, is_set="train.global_batch_size" in loaded.origins)
    notes = loaded.notes
    if run_dir is None:
        folder = numbered_folder(model.name)
        notes += (f"run_dir was not given: this run is in {folder}; run_dir='{folder}' resumes it",)
    else:
        folder = run_folder(run_dir, "run")
    name = loaded.config.name or folder.name or "run"
    loaded = dataclasses.replace(loaded, config=config.model_copy(update={"name": name}), name=name, notes=notes)
    spec = RunSpec(
        loaded,
        folder,
        resume,
        model=model,
        # A task that the config names is the config's: whoever opens the run need not give it again.
        task=None if is_named else task,
        data=opened,
        optimizer=optimizer,
        mesh=mesh,
        learning_rate=learning_rate,
        trainable=trainable,
        rules=rules,
        params=params,
        model_state=model_state,
        skip=skip,
    )
    return train(with_callbacks(spec, callbacks))
