"""Opening a finished (or running) run: what was given is checked, and nothing is read but `run.json`."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.config.arguments import check_whole
from jaxtrain.config.local_path import local_path
from jaxtrain.config.saved_run import read_run
from jaxtrain.errors import ConfigError
from jaxtrain.run.mended import mend_run
from jaxtrain.run.opened import OpenedRun
from jaxtrain.run.saved_config import changed_keys, saved_config, trained_rows_line
from jaxtrain.runtime.terminal import print_remark

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxtrain.models.model import Model
    from jaxtrain.models.task import Task


def open_run(
    run_dir: str | Path,
    *,
    step: int | None = None,
    model: "Model | None" = None,
    task: "Task | None" = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    mesh: "Mesh | None" = None,
    quantize: str | None = None,
    report: Callable[[str], None] = print_remark,
) -> OpenedRun:
    """Open a run to predict, evaluate, sample and plot; each part is read when it is first used.

    Args:
        run_dir: directory of the run, which may still be training.
        step: which checkpoint; None: the newest intact one.
        model: of a run whose model came from Python: the same model again.
        task: of a run whose task came from Python, which `evaluate` needs.
        overrides: settings on top of the run's config, as `key=value` strings or as a mapping
            ({"parallel.fsdp": 4, "evaluation.max_batches": None}).
        mesh: from `make_mesh`; None: all devices on the `data` axis, unless overrides say otherwise.
        quantize: a format of `quantize` for the linear layers ("int8"); None: as they were trained.
        report: receives one line for each damaged checkpoint that is passed over, and the like.

    Raises:
        ConfigError: not a run, a wrong override, or another model than the run's.

    Example:
        >>> result = jt.fit(
        ...     model, jt.classification(), optax.adamw(1e-3), data=rows, steps=4, batch_size=8, run_dir="runs/opened"
        ... )
        done: step 4
        report: runs/opened/report.html
        >>> run = jt.open_run("runs/opened", model=model)
        >>> run.predict(np.ones((8, 4), np.float32)).shape
        (8, 3)
    """
    run_dir = local_path(_given_path(run_dir), what="run directory")
    mend_run(run_dir, report)
    info = read_run(run_dir)
    if step is not None:
        write = "step=100, the number of a checkpoint, or None for the newest"
        step = check_whole(step, what="open_run: step", least=0, write=write)
    if isinstance(overrides, str):
        raise ConfigError(f"overrides is one text, {overrides!r}; give a list of texts: [{overrides!r}]")
    _check_given(info, run_dir, model=model, task=task, mesh=mesh)
    overrides = overrides if isinstance(overrides, Mapping) else list(overrides)
    config = saved_config(run_dir, overrides=overrides).config
    if any(key.partition(".")[0] == "data" for key in changed_keys(overrides)):
        line = trained_rows_line(saved_config(run_dir).config, config)
        if line is not None:
            report(line)
    return OpenedRun(
        run_dir,
        config,
        step=step,
        model=model,
        task=task,
        mesh=mesh,
        quantize=quantize,
        changed=changed_keys(overrides),
        report=report,
    )


def _given_path(run_dir: Any) -> str | Path:
    if not isinstance(run_dir, str | Path):
        raise ConfigError(
            f"open_run takes the directory of a run, not {type(run_dir).__name__}; write jt.open_run('runs/x')"
        )
    return run_dir


def _check_given(info: Mapping[str, Any], run_dir: Path, *, model: Any, task: Any, mesh: Any) -> None:
    """Raise where a part from Python is of another kind, or a model has another name than the run's."""
    if model is None and task is None and mesh is None:
        return
    from jax.sharding import Mesh

    from jaxtrain.train.checks import check_model, check_task

    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(f"the mesh is {type(mesh).__name__}; write mesh=jt.make_mesh(data=2, fsdp=4)")
    if task is not None:
        check_task(task)
    if model is None:
        return
    check_model(model)
    trained = (info.get("model") or {}).get("name")
    if trained is not None and model.name != trained:
        raise ConfigError(
            f"{run_dir} was trained with the model {trained}, not {model.name}; give that model, or "
            f"dataclasses.replace(model, name={trained!r}) if only its name differs"
        )
