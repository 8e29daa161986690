"""Whether the code that runs now is being traced by `multimesh.jit`."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_tracing: contextvars.ContextVar[bool] = contextvars.ContextVar("multimesh_tracing", default=False)


def partitioned_trace() -> bool:
    """True inside a trace whose tasks will be placed on their submeshes."""
    return _tracing.get()


@contextlib.contextmanager
def partitioning() -> Iterator[None]:
    """Mark the enclosed trace as one that will be partitioned."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)
