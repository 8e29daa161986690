"""Whether the code that runs now is being traced by `multimesh.jit`, and inside which task."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from multimesh import _compat
from multimesh.submesh import Task

_tracing: contextvars.ContextVar[bool] = contextvars.ContextVar("multimesh_tracing", default=False)
_task: contextvars.ContextVar[Task | None] = contextvars.ContextVar("multimesh_task", default=None)


def partitioned_trace() -> bool:
    """True inside a trace whose tasks will be placed on their submeshes."""
    return _tracing.get()


def current_task() -> Task | None:
    """The innermost task around the code that is traced."""
    return _task.get()


@contextlib.contextmanager
def inside(task: Task) -> Iterator[None]:
    """Trace code of a task: bare partition specs name the axes of its submesh. Outside such a trace it does nothing."""
    if not partitioned_trace():
        yield
        return
    token = _task.set(task)
    try:
        with _compat.abstract_mesh_context(task.mesh):
            yield
    finally:
        _task.reset(token)


@contextlib.contextmanager
def partitioning() -> Iterator[None]:
    """Mark the enclosed trace as one that will be partitioned."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)
