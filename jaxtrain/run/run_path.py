"""What stands for the path of a run, so that it is taken wherever that path is."""

from pathlib import Path


class RunPath:
    """A run that is there as an object; `step.init(0, params=run)` reads what the path of the run holds.

    Attributes:
        run_dir: its directory.
    """

    run_dir: Path
    _wanted_step: int | None = None  # which checkpoint; None: the newest intact one

    def __fspath__(self) -> str:
        """The path of the run, or of the one step of it that was asked for."""
        step = self._wanted_step
        if step is None:
            return str(self.run_dir)
        from jaxtrain.checkpoint.run_folder import checkpoint_folder

        return str(checkpoint_folder(self.run_dir) / str(step))
