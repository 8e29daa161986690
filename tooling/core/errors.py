"""Every error that ends a command of this package; the exit code says which kind it was.

Codes from 20 on are of this package alone: those of the library and of its launcher are below.

Messages are one line: the component or file, what is wrong with it, and what to do. Only ``cli.main`` prints them.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence


class ToolingError(Exception):
    """Something that this tooling cannot do; the base of all errors that a user may see."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code


class UsageError(ToolingError, exit_code=2):
    """Options that do not fit together or name things that do not exist."""


class ManifestError(ToolingError, exit_code=23):
    """``sources.yaml``, ``sources.lock`` or a patch series is malformed or asks for something unsafe."""


class PinError(ToolingError, exit_code=24):
    """``sources.lock`` has no pin for the wanted component, or a pin of something else."""


class DirtyTreeError(ToolingError, exit_code=25):
    """A tree under ``third_party/`` holds work that a sync would lose."""


class NetworkError(ToolingError, exit_code=26):
    """No server could be reached, or the network is switched off and needed."""


class MissingCommitError(ToolingError, exit_code=27):
    """The server does not have the pinned commit, or the package index not the pinned file."""


class IntegrityError(ToolingError, exit_code=28):
    """Fetched bytes are not the pinned ones."""


class PatchError(ToolingError, exit_code=29):
    """A patch does not apply, or touches a file that no patch may touch."""


class DiskError(ToolingError, exit_code=30):
    """The disk is full, read-only or out of reach."""


class ToolError(ToolingError, exit_code=31):
    """A program that this tooling runs is missing or failed in a way that it does not understand."""


class SeveralErrors(ToolingError):
    """Errors of pieces of work that do not depend on each other. The exit code is that of the first."""

    def __init__(self, messages: Sequence[str], exit_code: int) -> None:
        super().__init__("; ".join(messages))
        self.messages = tuple(messages)
        self.exit_code = exit_code


class EngineError(ToolingError, exit_code=33):
    """No container engine answers, or the one that does lacks an ability."""


class BuildError(ToolingError, exit_code=34):
    """An image cannot be built."""


class SmokeError(ToolingError, exit_code=35):
    """An image was built but failed its check; no public tag was moved."""


class RegistryError(ToolingError, exit_code=36):
    """A registry refuses an image, or cannot be reached in spite of all retries."""


class CacheError(ToolingError, exit_code=37):
    """The Bazel cache cannot be started or stopped."""


def disk_message(error: OSError) -> str:
    """Say which file could not be written and what to do about it."""
    remedy = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some of your quota"}.get(
        error.errno or 0, "make it writable"
    )
    return f"{error.filename or 'a file'}: {error.strerror}; {remedy} and run the same command again"
