"""Every error that ends a command of this package; the exit code says which kind it was.

Messages are one line: the component or file, what is wrong with it, and what to do. Only ``cli.main`` prints them.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence


class WorkflowsError(Exception):
    """Something that this tooling cannot do; the base of all errors that a user may see."""

    exit_code = 1


class UsageError(WorkflowsError):
    """Options that do not fit together or name things that do not exist."""

    exit_code = 2


class ManifestError(WorkflowsError):
    """``sources.yaml``, ``sources.lock`` or a patch series is malformed or asks for something unsafe."""

    exit_code = 3


class PinError(WorkflowsError):
    """``sources.lock`` has no pin for what is wanted, or a pin of something else."""

    exit_code = 4


class DirtyTreeError(WorkflowsError):
    """A tree under ``third_party/`` holds work that a sync would lose."""

    exit_code = 5


class NetworkError(WorkflowsError):
    """No server could be reached, or the network is switched off and needed."""

    exit_code = 6


class MissingCommitError(WorkflowsError):
    """The server does not have the pinned commit, or the package index not the pinned file."""

    exit_code = 7


class IntegrityError(WorkflowsError):
    """Fetched bytes are not the pinned ones."""

    exit_code = 8


class PatchError(WorkflowsError):
    """A patch does not apply, or touches what no patch may touch."""

    exit_code = 9


class DiskError(WorkflowsError):
    """The disk is full, read-only or out of reach."""

    exit_code = 10


class ToolError(WorkflowsError):
    """A program that this tooling runs is missing or failed in a way that it does not understand."""

    exit_code = 11


class SeveralErrors(WorkflowsError):
    """What went wrong in pieces of work that do not depend on each other; the exit code is that of the first."""

    def __init__(self, messages: Sequence[str], exit_code: int) -> None:
        super().__init__("; ".join(messages))
        self.messages = tuple(messages)
        self.exit_code = exit_code


class EngineError(WorkflowsError):
    """No container engine answers, or it cannot do what is asked."""

    exit_code = 13


class BuildError(WorkflowsError):
    """An image cannot be built."""

    exit_code = 14


class SmokeError(WorkflowsError):
    """An image was built but failed its check; no public tag was moved."""

    exit_code = 15


class RegistryError(WorkflowsError):
    """A registry refuses an image, or cannot be reached in spite of all retries."""

    exit_code = 16


class CacheError(WorkflowsError):
    """The Bazel cache cannot be started or stopped."""

    exit_code = 17


def disk_message(error: OSError) -> str:
    """Say which file could not be written and what to do about it."""
    remedy = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some of your quota"}.get(
        error.errno or 0, "make it writable"
    )
    return f"{error.filename or 'a file'}: {error.strerror}; {remedy} and run the same command again"
