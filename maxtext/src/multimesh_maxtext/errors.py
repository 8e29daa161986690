"""Errors of the launcher: each says what is wrong, where, and what to change, and has an exit code of its own."""

from __future__ import annotations


class LauncherError(Exception):
    """Something that keeps a run from being a success; ``maxtext/run.py`` ends with its ``exit_code``."""

    exit_code = 1


class UsageError(LauncherError):
    """Flags that do not fit together; found before anything is started."""

    exit_code = 2


class UnsupportedError(LauncherError):
    """Something sensible that this backend cannot do."""

    exit_code = 3


class MissingPartError(LauncherError):
    """MaxText, a package or a device is not on this machine."""

    exit_code = 4


class TrainerFailedError(LauncherError):
    """The trainer's process ended with an error."""

    exit_code = 10


class StoppedEarlyError(LauncherError):
    """The trainer ended without an error before all steps had run."""

    exit_code = 11


class LossNotFiniteError(LauncherError):
    """A loss is NaN or infinite."""

    exit_code = 12


class LossNotFallingError(LauncherError):
    """Every step ran, but the model learned nothing."""

    exit_code = 13


class DisagreementError(LauncherError):
    """Two runs that must give the same losses and gradient norms do not."""

    exit_code = 14


class CheckpointError(LauncherError):
    """A checkpoint cannot be read, written or continued from."""

    exit_code = 15


class DoesNotFitError(LauncherError):
    """A run needs more memory than a device has."""

    exit_code = 16
