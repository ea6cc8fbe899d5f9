"""Errors a user can cause: one line each, and the exit code of the command line."""


class UserError(Exception):
    """A mistake the user can mend: what is wrong, where it was set, what would work."""

    exit_code = 2


class ConfigError(UserError):
    """A wrong key, value, size or usage (exit 2)."""


class DataError(UserError):
    """Data that is missing, empty, corrupt or out of range (exit 3)."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another model (exit 4)."""

    exit_code = 4


class DivergedError(UserError):
    """Training that produced non-finite gradients too many times in a row (exit 5)."""

    exit_code = 5


class PreemptedError(UserError):
    """A run stopped by a signal after its state was saved: run again to go on (exit 75)."""

    exit_code = 75
