"""Errors that a user can cause: each is one line, and has an exit code for the command line."""


class UserError(Exception):
    """A mistake that the user can correct; the message says what is wrong, where it was set and what would work."""

    exit_code = 2


class ConfigError(UserError):
    """A key, a value, a size or a call is wrong (exit code 2)."""


class DataError(UserError):
    """Data is missing, empty, corrupt or out of range (exit code 3)."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint is missing or damaged, or belongs to another model (exit code 4)."""

    exit_code = 4


class DivergedError(UserError):
    """Training stopped because too many steps in a row had non-finite gradients (exit code 5)."""

    exit_code = 5


class PreemptedError(UserError):
    """A signal stopped the run after its state was saved; the same command continues it (exit code 75)."""

    exit_code = 75
