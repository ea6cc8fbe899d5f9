"""The checkpoints of a run that are elsewhere than in its directory: taken, and never mixed with those of before."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import live_steps
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.run_folder import NOTE, Owner, checkpoint_folder, configured_folder, set_steps_aside, take
from jaxtrain.config.checkpoint import CheckpointConfig
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.agreement import together


def take_folder(
    keep: CheckpointConfig,
    run_dir: Path,
    *,
    name: str,
    resume: str | None,
    main: bool,
    report: Callable[[str], None],
) -> tuple[Place, Owner | None]:
    """The folder of a run's checkpoints, for this start alone; every process calls this.

    Args:
        keep: the config.
        run_dir: directory of the run, which is locked.
        name: of the run.
        resume: how it is resumed.
        main: whether this process writes.
        report: receives one line where another run's folder is taken over.

    Returns:
        The folder, and the hold on it; None where it is in the run directory, or another process has it.

    Raises:
        ConfigError: the folder is another run's, cannot be used, or is empty while the former one is not.
        CheckpointError: a note in one of the directories is damaged.
    """

    def work() -> tuple[Place, Owner | None]:
        folder = configured_folder(keep.directory, run_dir)
        if not main:
            return folder, None
        former = checkpoint_folder(run_dir)
        if former != folder and resume != "never" and not live_steps(folder):
            _check_former(former, folder)
        if keep.directory is None:
            if former != folder and resume != "never" and live_steps(folder):
                # The run goes on here: who asks for its checkpoints must not be led to where they were.
                (run_dir / NOTE).unlink()
            return folder, None
        owner, line = take(folder, run_dir, name=name, takes_over=resume == "must")
        if line is not None:
            report(line)
        return folder, owner

    return together(work)


def _check_former(former: Place, folder: Place) -> None:
    """Refuse to start anew by mistake, where the config names another folder than it did."""
    steps = live_steps(former)
    if steps:
        raise ConfigError(
            f"checkpoint.directory: this run has its checkpoints in {former} (the newest is step {steps[-1]}), and "
            f"{folder} has none; set it back, copy them there and add --resume must, or start again with --resume never"
        )


def begin_there(
    checkpointer: Checkpointer, keep: CheckpointConfig, run_dir: Path, report: Callable[[str], None]
) -> None:
    """Move what an earlier run left in the folder away, as what it left in the run directory is; process 0 alone."""
    if keep.directory is None:
        with contextlib.suppress(FileNotFoundError):
            (run_dir / NOTE).unlink()
        return
    moved = set_steps_aside(checkpointer.directory)
    if moved is not None:
        report(f"the checkpoints of an earlier run were moved to {moved}")
