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
