"""Errors that a user can cause: each is one line, and has an exit code for the command line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """A mistake that the user can correct; the message says what is wrong, where it was set and what would work.

    Example:
        >>> try:
        ...     jt.load_config("quickstart", overrides=["train.step=10"])
        ... except jt.UserError as error:  # any of them
        ...     print(error, error.exit_code)
        unknown key 'train.step' (command line); did you mean 'train.steps'? 2
    """

    exit_code = 2
    # Whether every process of the cluster raised it at the same place, so that none of them waits for another.
    raised_by_all = False


class ConfigError(UserError):
    """A key, a value, a size or a call is wrong (exit code 2).

    Example:
        >>> try:
        ...     jt.make_mesh(data=0)
        ... except jt.ConfigError as error:
        ...     print(error)
        make_mesh: data takes a whole number of 1 or more, not 0; write data=4 or data='auto'
    """


class DataError(UserError):
    """Data is missing, empty, corrupt or out of range (exit code 3).

    Example:
        >>> try:
        ...     step.place({"inputs": np.ones((8, 4), np.float32), "targets": np.full(8, 7)})
        ... except jt.DataError as error:
        ...     print(str(error).split(";")[0])
        the batch holds targets of 7, but the model has ids 0 to 2
    """

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint is missing or damaged, or belongs to another model (exit code 4).

    Example:
        >>> try:
        ...     jt.Checkpointer("runs/none/checkpoints").restore(step.abstract_state)
        ... except jt.CheckpointError as error:
        ...     print("start at step 0")
        start at step 0
    """

    exit_code = 4


class DivergedError(UserError):
    """Training stopped because too many steps in a row had non-finite gradients (exit code 5).

    Example:
        >>> try:
        ...     raise jt.DivergedError("gradients were not finite 10 steps in a row")  # as run_config does
        ... except jt.DivergedError as error:
        ...     print(error.exit_code)
        5
    """

    exit_code = 5


class PreemptedError(UserError):
    """A signal stopped the run after its state was saved; the same command continues it (exit code 75).

    Example:
        >>> try:
        ...     raise jt.PreemptedError("stopped after step 40 of 100")  # as run_config does after a signal
        ... except jt.PreemptedError as error:
        ...     print("run the same call again")
        run the same call again
    """

    exit_code = 75


class StorageError(UserError):
    """What a run writes cannot be written any longer, because of the disk and not of a setting (exit code 1).

    Example:
        >>> from jaxtrain.errors import StorageError
        >>> try:
        ...     raise StorageError("step 40 is not saved: No space left on device")  # as run_config does
        ... except jt.UserError as error:
        ...     print(error.exit_code)
        1
    """

    exit_code = 1


class LostProcessError(UserError):
    """Another process of the run is gone, or did not come; another start may get over it (exit code 70)."""

    exit_code = 70


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, of 300 characters at most, or the name of its class if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


# What code raises that meets a text, a list or a zero in the place of an object or a size.
_WRONG_KINDS = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


@contextlib.contextmanager
def reading_published(path: Path | str) -> Iterator[None]:
    """A context in which a file that somebody else published is read: what it raises becomes a CheckpointError."""
    try:
        yield
    except _WRONG_KINDS as error:
        raise CheckpointError(f"{path} is missing or damaged ({error}); download it again") from None
