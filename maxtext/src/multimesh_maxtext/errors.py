"""Errors of the launcher. Each says what is wrong, where, and how to mend it; each class has its own exit code."""

from __future__ import annotations

from collections.abc import Iterable


class LauncherError(Exception):
    """Something that keeps a run from being a success; ``maxtext/run.py`` ends with its ``exit_code``.

    Attributes
    ----------
    shared
        Whether all processes of a job find it, in the command line that they share.
    """

    exit_code = 1
    shared = False


class UsageError(LauncherError):
    """Flags that do not fit together; found before anything is started."""

    exit_code = 2
    shared = True


class FileError(UsageError):
    """A file or folder of a flag that cannot be used on this machine."""

    shared = False


class UnsupportedError(LauncherError):
    """Something sensible that this backend cannot do."""

    exit_code = 3
    shared = True


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


class DamagedCheckpointError(CheckpointError):
    """A checkpoint does not hold the bytes that were written; it was set aside."""


class ProcessLostError(TrainerFailedError):
    """One of several processes was killed, stopped or out of reach; MultiMesh's own code for that."""

    exit_code = 17


class DoesNotFitError(LauncherError):
    """A run needs more memory than a device or a machine has."""

    exit_code = 16


class PreemptedError(LauncherError):
    """A signal ended the run; all processes wrote a checkpoint first, and a run with ``--resume`` goes on after it."""

    exit_code = 18
    shared = True


class UnreadError(LauncherError):
    """Nobody reads the output any more: the code of programs that SIGPIPE ends."""

    exit_code = 141


class Several(LauncherError):
    """More than one thing wrong with a command line, a line each; the exit code is that of the first."""

    def __init__(self, errors: Iterable[LauncherError]) -> None:
        """Take at least one."""
        self.errors = tuple(errors)
        self.exit_code = self.errors[0].exit_code
        self.shared = all(error.shared for error in self.errors)
        super().__init__("\n".join(map(str, self.errors)))


def raise_all(errors: Iterable[LauncherError]) -> None:
    """Raise all errors at once; return if there are none."""
    found = list(dict.fromkeys(errors))
    if len(found) > 1:
        raise Several(found)
    if found:
        raise found[0]
