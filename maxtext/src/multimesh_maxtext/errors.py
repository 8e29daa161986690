"""Errors of the launcher. Each says what is wrong, where, and how to mend it; each class has its own exit code."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

MORE_MEMORY = "use fewer devices or smaller sizes here, or ask for more: --mem of Slurm, --memory of Docker"
"""The remedy where a machine has too little memory."""


class LauncherError(Exception):
    """Something that keeps a run from being a success; ``maxtext/run.py`` ends with its ``exit_code``."""

    exit_code = 1
    shared = False  # whether all processes of a job find it, in the command line that they share
    cause = "error"  # in the outcome of a process: the name of the class
    doubt = 0  # how likely another process knows better why all ended
    who = ""  # the process that ended by it
    log: Path | None = None  # of that process's trainer

    def __init_subclass__(cls, **attributes: object) -> None:
        cls.cause = re.sub("(?<!^)(?=[A-Z])", "-", cls.__name__.removesuffix("Error")).lower()
        for name, value in attributes.items():
            setattr(cls, name, value)


class FlagError(LauncherError, exit_code=2, shared=True, cause="usage"):
    """Flags that do not fit together; found before anything is started."""


class FileError(FlagError, shared=False):
    """A file or folder of a flag that cannot be used on this machine."""


class UnsupportedError(LauncherError, exit_code=3, shared=True):
    """Something sensible that this backend cannot do."""


class MissingPartError(LauncherError, exit_code=4):
    """MaxText, a package or a device is not on this machine."""


class TrainerFailedError(LauncherError, exit_code=10, doubt=2):
    """The trainer's process ended with an error."""


class StoppedEarlyError(LauncherError, exit_code=11):
    """The trainer ended without an error before all steps had run."""


class LossNotFiniteError(LauncherError, exit_code=12):
    """A loss is NaN or infinite."""


class LossNotFallingError(LauncherError, exit_code=13):
    """Every step ran, but the model learned nothing."""


class DisagreementError(LauncherError, exit_code=14):
    """Two runs that must give the same losses and gradient norms do not."""


class CheckpointError(LauncherError, exit_code=15):
    """A checkpoint cannot be read, written or continued from."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint does not hold the bytes that were written; it was set aside."""


class ProcessLostError(TrainerFailedError, exit_code=17, doubt=3):
    """One of several processes was killed, stopped or out of reach; MultiMesh's own code for that."""


class ProcessKilledError(ProcessLostError, doubt=0):
    """A signal killed the trainer of this process, which is the reason why others lose it."""


class DoesNotFitError(LauncherError, exit_code=16):
    """A run needs more memory than a device or a machine has."""


class PreemptedError(LauncherError, exit_code=18, shared=True, doubt=1):
    """A signal ended the run; all processes wrote a checkpoint first, and a run with ``--resume`` goes on after it."""


class UnfitError(LauncherError, exit_code=19, shared=True):
    """The check before training found a device, a node or a link that pipelines cannot run on."""


class NoSpaceError(LauncherError, exit_code=20):
    """A file of the run could not be written: the disk is full, or a limit of the user's or of the file is reached."""


class InterruptedRunError(LauncherError, exit_code=130, shared=True, doubt=1):
    """A signal ended the run before a checkpoint could be written for it."""


class UnreadError(LauncherError, exit_code=141):
    """Nobody reads the output any more: the code of programs that SIGPIPE ends."""


def error_classes() -> dict[str, type[LauncherError]]:
    """Return every class of errors by its cause."""
    classes = [LauncherError]
    for kind in classes:
        classes += kind.__subclasses__()
    return {kind.cause: kind for kind in classes}


def raise_all(errors: Iterable[LauncherError]) -> None:
    """Raise all errors at once, a line each, with the exit code of the first; return if there are none."""
    distinct = list(dict.fromkeys(errors))
    if distinct:
        several = LauncherError("\n".join(map(str, distinct)))
        several.exit_code = distinct[0].exit_code
        several.shared = all(error.shared for error in distinct)
        raise several if len(distinct) > 1 else distinct[0]


def first_line(error: BaseException) -> str:
    """Return the beginning of an error's text."""
    return str(error).strip().partition("\n")[0][:300]


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FILE_OF_TENSORSTORE = re.compile(r'local file "([^"]+)"')


def full_file(error: BaseException) -> NoSpaceError | None:
    """Return the error of a file that could not be written for want of room; none for any other exception."""
    text, numbers = str(error), (error.errno,) if isinstance(error, OSError) else ()
    number = next((full for full in _FULL if full in numbers or os.strerror(full) in text), None)
    if number is None or isinstance(error, LauncherError):
        return None
    of_tensorstore = _FILE_OF_TENSORSTORE.search(text)
    name = of_tensorstore[1] if of_tensorstore else getattr(error, "filename", None)
    log = "/proc/self/fd/1"  # a line that cannot be written there names no file
    if not name and os.path.isfile(log) and not os.statvfs(log).f_bavail:
        name = os.readlink(log)
    if not name:
        name = first_line(error) if "/" in first_line(error) else "a file of --output, --checkpoint or --metrics-file"
    if Path(name).is_absolute():
        name = str(Path(name).resolve())  # MaxText writes checkpoints through a link
    return NoSpaceError(
        f"{name}: {os.strerror(number)} ({errno.errorcode[number]}); make room, or raise the limit, and start again"
    )
