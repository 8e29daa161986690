"""Every error that ends a command of this package. Its exit code says where the remedy is.

Messages are one line: the component or file, the fault, and the remedy. Only ``cli.main`` prints them. Errors that do
not depend on each other are raised as a group, whose first has the exit code.
"""

from __future__ import annotations

import errno
import re
import tomllib
from pathlib import Path

_OF_DISKS = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space")
_OF_DISKS |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable")


class ToolingError(Exception):
    """This machine is at fault: a full disk, a missing program. The base of all errors that a user may see."""

    exit_code = 1


class OptionError(ToolingError):
    """Options that do not fit together or name things that do not exist."""

    exit_code = 2


class SourceError(ToolingError):
    """A source, a package, a pin or a patch is malformed, not the pinned one, or not safe to replace."""

    exit_code = 3


class NotThereError(SourceError):
    """A source cannot be had here: no server in reach, nothing pinned, or not where it should be."""


class EngineError(ToolingError):
    """A container engine or a registry does not answer, or refuses; an image cannot be built."""

    exit_code = 4


class SmokeError(ToolingError):
    """An image was built but failed its check; no public tag was moved."""

    exit_code = 5


def explain(program: str, output: str, **names: object) -> ToolingError:
    """Return what the output of a failed program means, by ``complaints.toml``; ``names`` are those of its rows."""
    rows = tomllib.loads(Path(__file__).with_name("complaints.toml").read_text(encoding="utf-8"))["complaint"]
    row = next(row for row in rows if program in row["of"] and re.search(row["pattern"], output, re.MULTILINE))
    kind: type[ToolingError] = globals()[row["error"]]
    return kind(row["message"].format(**names))


def describe(error: Exception) -> str:
    """Return an error in one line; of a disk's with the file and the remedy."""
    if not isinstance(error, OSError):
        return str(error)
    remedy = _OF_DISKS.get(error.errno or 0)
    then = f"; {remedy} and run the same command again" if remedy else ""
    return f"{error.filename or ('a file' if remedy else 'system call')}: {error.strerror or error}{then}"
