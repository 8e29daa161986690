"""Errors that MultiMesh raises.

Every message says what is wrong, where (the user's source line where there is one) and what to change.
Command lines of this package end with ``exit_code`` of the error that stopped them.
"""

from __future__ import annotations


class MultiMeshError(Exception):
    """Something that MultiMesh cannot do with what it was given; the message names the place and the remedy."""

    exit_code = 1


class UsageError(MultiMeshError):
    """Arguments or flags that do not fit together; found before anything is traced or started."""

    exit_code = 2


class UnsupportedError(MultiMeshError):
    """Something sensible that this version or backend cannot do."""

    exit_code = 3


class MissingPartError(MultiMeshError):
    """A source tree, package or device that the command needs is not on this machine."""

    exit_code = 4


class TrainerFailedError(MultiMeshError):
    """The trainer's process ended with an error."""

    exit_code = 10


class StoppedEarlyError(MultiMeshError):
    """The trainer ended without an error before all steps had run."""

    exit_code = 11


class LossNotFiniteError(MultiMeshError):
    """A loss is NaN or infinite."""

    exit_code = 12


class LossNotFallingError(MultiMeshError):
    """Every step ran, but the model learned nothing."""

    exit_code = 13


class CheckpointError(MultiMeshError):
    """A checkpoint cannot be read, written or continued from."""

    exit_code = 15


class DoesNotFitError(MultiMeshError):
    """A run needs more memory than a device has."""

    exit_code = 16


class DisagreementError(MultiMeshError):
    """Two runs that must give the same losses and gradient norms do not."""

    exit_code = 14


def internal_error(what: str) -> MultiMeshError:
    """Error of a case that the passes should have excluded."""
    return MultiMeshError(f"internal error of MultiMesh: {what}; please report it with the function that you compiled")
