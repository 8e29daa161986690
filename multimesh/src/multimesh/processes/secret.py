"""The secret of a job: who lacks it can't join the job's watchers, stop them or mislead them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from multimesh.errors import UsageError

VARIABLE = "MULTIMESH_JOB_SECRET"
FILE = "MULTIMESH_JOB_SECRET_FILE"
SHORTEST = 16


def found() -> str:
    """The secret that the launcher gave in the environment, else that in the user's file; empty if there is none.

    Raises
    ------
    UsageError
        If it is too short, or if others can read the file.
    """
    if given := os.environ.get(VARIABLE):
        return _checked(given, VARIABLE)
    named = os.environ.get(FILE)
    path = Path(named or "~/.config/multimesh/secret").expanduser()
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise UsageError(f"{path}: others can read the secret of your jobs; chmod 600 {path}, and make it anew")
            return _checked(file.read().strip(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        if not named:
            return ""
        raise UsageError(f"{FILE}={path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _checked(secret: str, source: str) -> str:
    if len(secret) < SHORTEST:
        raise UsageError(
            f"{source}: a secret of {len(secret)} characters can be guessed; openssl rand -hex 32 makes one"
        )
    return secret
