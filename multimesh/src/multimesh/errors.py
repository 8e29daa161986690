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


class MissingPartError(MultiMeshError):
    """A source tree, package or device that the command needs is not on this machine."""

    exit_code = 4


class DisagreementError(MultiMeshError):
    """Two runs that must give the same losses and gradient norms do not."""

    exit_code = 14


class LostProcessError(MultiMeshError):
    """Another process of the job was killed, stopped, or has not come; also the exit code of those that end with it."""

    exit_code = 17


def internal_error(what: str) -> MultiMeshError:
    """Error of a case that the passes should have excluded."""
    return MultiMeshError(f"internal error of MultiMesh: {what}; please report it with the function that you compiled")
