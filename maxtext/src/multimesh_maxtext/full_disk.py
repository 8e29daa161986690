"""A file that cannot be written for want of room: on the disk, in a quota, or below the limit of a file's size."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from multimesh_maxtext.errors import LauncherError, NoSpaceError

_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST = 300
_OF_TENSORSTORE = re.compile(r'local file "([^"]+)"')


def full_file(error: BaseException) -> NoSpaceError | None:
    """Return the error of a file that could not be written for want of room; none for any other exception."""
    number = error.errno if isinstance(error, OSError) else None
    if number not in _NUMBERS:
        number = next((candidate for candidate in _NUMBERS if os.strerror(candidate) in str(error)), None)
    if number is None or isinstance(error, LauncherError):
        return None
    text = str(error).strip().partition("\n")[0][:_LONGEST]
    of_tensorstore = _OF_TENSORSTORE.search(str(error))
    name = of_tensorstore[1] if of_tensorstore else getattr(error, "filename", None)
    name = name or (text if "/" in text else "a file of --output, --checkpoint or --metrics-file")
    if Path(name).is_absolute():
        name = str(Path(name).resolve())  # MaxText writes checkpoints through a link
    return NoSpaceError(
        f"{name}: {os.strerror(number)} ({errno.errorcode[number]}); make room, or raise the limit, and start again"
    )
