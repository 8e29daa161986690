"""Errors that MultiMesh raises.

Every message says what is wrong, where (the user's source line, if there is one) and what to change. A command line of
this package ends with the ``exit_code`` of the error that stopped it.
"""

from __future__ import annotations

import functools
import sys
from importlib import metadata


class MultiMeshError(Exception):
    """MultiMesh cannot do something with its arguments. The message names the place and the remedy.

    In a released package a note below the message links to the page with the messages of its module.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if page := _page():
            module = sys._getframe(1).f_globals.get("__name__", "").removeprefix("multimesh.")
            self.add_note(f"{page}#{module.strip('_').replace('.', '-').replace('_', '-')}")


@functools.cache
def _page() -> str:
    """Return the address of the page of error messages; empty if the package does not know its site."""
    try:
        urls = metadata.metadata("multimesh-jax").get_all("Project-URL") or ()
    except metadata.PackageNotFoundError:
        urls = ()
    sites = [url.partition(", ")[2] for url in urls if url.startswith("Documentation, ")]
    return f"{sites[0].rstrip('/')}/docs/troubleshooting.html" if sites else ""


class UsageError(MultiMeshError):
    """Arguments or flags do not fit together. It is found before anything is traced or started."""

    exit_code = 2


class DamagedError(UsageError):
    """A checkpoint does not hold the bytes that were written: some are others, or missing."""


class NoRecordError(UsageError):
    """A checkpoint of Orbax has no record of its checksums, so nothing can be compared."""


class MissingPartError(MultiMeshError):
    """A source tree, package or device that the command needs is not on this machine."""

    exit_code = 4


class DisagreementError(MultiMeshError):
    """Two runs that must give the same losses and gradient norms do not."""

    exit_code = 14


class DoesNotFitError(UsageError):
    """More memory is needed than a device has."""

    exit_code = 16


class LostProcessError(MultiMeshError):
    """Another process was killed, stopped, did not come, or could send nothing. All others end with its exit code."""

    exit_code = 17


def internal_error(case: str) -> MultiMeshError:
    """Return the error of a case that the passes should have excluded."""
    return MultiMeshError(f"internal error of MultiMesh: {case}; please report it with the function that you compiled")
