"""The state of a trace: whether `multimesh.jit` traces the running code, and inside which task."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from multimesh.core import _compat
from multimesh.core.submesh import Placement, describe
from multimesh.errors import UsageError

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
Manager = contextlib.AbstractContextManager[None]

_tracing: contextvars.ContextVar[bool] = contextvars.ContextVar("multimesh_tracing", default=False)
_loops: contextvars.ContextVar[Change | None] = contextvars.ContextVar("multimesh_loops", default=None)
_has_warned = False
_called: dict[str, tuple[str, str]] = {}  # a task by its mark: its name, and the line that last called it in a trace
_compiling: contextvars.ContextVar[bool] = contextvars.ContextVar("multimesh_compiling", default=False)
_task: contextvars.ContextVar[Placement | None] = contextvars.ContextVar("multimesh_task", default=None)
_meshes: contextvars.ContextVar[list[Mesh] | None] = contextvars.ContextVar("multimesh_meshes", default=None)


@contextlib.contextmanager
def _setting(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def note_meshes(meshes: list[Mesh]) -> Manager:
    """Add to ``meshes`` the submeshes with Explicit axes of the tasks that are traced inside the block."""
    return _setting(_meshes, meshes)


def note_mesh(mesh: Mesh) -> None:
    """Note the submesh of a task for `note_meshes`."""
    meshes = _meshes.get()
    if meshes is not None and mesh not in meshes and _compat.is_typed(mesh):
        meshes.append(mesh)


def in_loops(change: Change) -> Manager:
    """Apply ``change`` to the function of each microbatch loop that is traced inside the block."""
    return _setting(_loops, change)


def of_loop(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a microbatch loop, as `in_loops` changes it."""
    change = _loops.get()
    return fn if change is None else change(fn)


def is_partitioning() -> bool:
    """Return whether this is a trace whose tasks will be placed on their submeshes."""
    return _tracing.get()


def _tell_one_program(mark: str) -> None:
    """Warn, once in a process, of a task that becomes a part of somebody else's program.

    JAX keeps traces: the task may have been traced for `multimesh.jit`, long before.
    """
    global _has_warned
    if not _has_warned and not _compiling.get():
        _has_warned = True
        name, line = _called[mark]
        _compat.warn_at(
            line,
            f"task {name!r} is a part of one program here, and runs on the devices of that: "
            "jax.jit, nnx.jit or a loop is around it, and no multimesh.jit; call multimesh.jit in its place, or say "
            "that one program is meant: with multimesh.context(ignore_transforms=True)",
        )


_task_p = _compat.identity_primitive("multimesh_task", lowered=_tell_one_program)


def note_task(mark: str, name: str, result: Any) -> Any:
    """Note that a task made a result, so that a program that it becomes a part of can be told of."""
    leaves, tree = jax.tree.flatten(result)
    if not leaves:
        return result
    _called[mark] = name, _compat.caller_line()
    return jax.tree.unflatten(tree, [_task_p.bind(leaves[0], mark=mark), *leaves[1:]])


def compiling() -> Manager:
    """Note that kernels of a plan are lowered: tasks are on their submeshes, so no warning of one program is due."""
    return _setting(_compiling, True)


def is_recording() -> bool:
    """Return whether operations are recorded, by `multimesh.jit` or another trace, instead of run."""
    return is_partitioning() or _compat.in_a_trace()


def current_task() -> Placement | None:
    """Return the innermost task around the traced code."""
    return _task.get()


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Pause Python's garbage collector. It would walk a growing trace again and again, and find next to nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def inside(task: Placement) -> Iterator[None]:
    """Trace the code of a task: bare partition specs name the axes of its submesh. Outside of a trace do nothing.

    Axes are Auto or Explicit inside, as the submesh says.
    """
    if not is_partitioning():
        with in_a_mesh(f"task {task.name!r}"):
            yield
        return
    mesh = task.types or task.mesh
    note_mesh(task.mesh)
    axes = _compat.abstract_mesh_context(mesh, typed=_compat.is_typed(mesh))
    with _compat.explain(functools.partial(_explain, task)), _setting(_task, task), axes:
        yield


def in_a_mesh(code: str) -> Manager:
    """Add the remedy to JAX's error if code with bare partition specs runs where no mesh has their axes."""

    def meaning(error: Exception, line: str, says: str) -> UsageError | None:
        bare = re.search("requires a non-empty mesh|not under a mesh context", str(error))
        if not bare or not isinstance(error, RuntimeError | ValueError):
            return None
        return UsageError(
            f"{line}: {code} has a bare PartitionSpec, and runs without a submesh here; run it under multimesh.jit, "
            "outside of jax.jit, jax.checkpoint and loops, as multimesh.jit(jax.checkpoint(f)); or in "
            "jax.set_mesh(mesh); or use multimesh.with_sharding_constraint, which has no effect without a submesh"
        )

    return _compat.explain(meaning)


_OF_TYPES = {
    "acts as an assert": "use jax.sharding.reshard in place of with_sharding_constraint, or give the mesh "
    "AxisType.Auto axes",
    "^ShardingTypeError|out_sharding": "say the layout of the result (out_sharding=, jax.sharding.reshard), or give "
    "the mesh AxisType.Auto axes, where the compiler chooses it",
}
_OF_KINDS = {
    "(?s)context mesh.*shard_map|shard_map.*context mesh": "drop mesh= of jax.shard_map, which takes the submesh from "
    "its context",
    "context mesh": "pass arrays as arguments, since one that a function captures keeps Explicit axes in its type",
    "type Auto|Auto axes": "out_sharding= and jax.sharding.reshard name Explicit axes only: give the submesh "
    "AxisType.Explicit axes, or use with_sharding_constraint(x, P(...)) for Auto ones",
}
"""Remedies by patterns in JAX's errors: where an axis is Explicit, and where code is for other kinds of axes."""


def _explain(task: Placement, error: Exception, line: str, says: str) -> UsageError | None:
    """Return what an error of JAX about axes means in a task, with the remedy; None for any other error."""
    message, where, mesh = str(error), describe(task.mesh), task.types or task.mesh
    if _compat.is_typed(mesh):
        named = f"{type(error).__name__}: {message}"
        if remedy := next((remedy for pattern, remedy in _OF_TYPES.items() if re.search(pattern, named)), None):
            return UsageError(
                f"{line}: task {task.name!r}: {where} has Explicit axes, as jax.make_mesh makes them, so that types "
                f"have layouts; {remedy}. {says}"
            )
    if match := re.search(r"Resource axis: (\S+) of (P.*?\)) is not found in mesh", message):
        return UsageError(
            f"{line}: task {task.name!r}: {match[2]} names axis {match[1]!r}, which its submesh {where} does not have; "
            "make the submesh with this axis, or leave it out of the spec. Names of Flax Linen (with_partitioning, "
            "with_logical_partitioning) are axes of the submesh: rename them by rules, or drop them with "
            "flax.linen.unbox"
        )
    if match := re.search(r"but (P.*\)) has duplicate entries for `?(\w+)", message):
        return UsageError(
            f"{line}: task {task.name!r}: {match[1]} lays out two dimensions along axis {match[2]!r} of its submesh "
            f"{where}; name it once. Two names of logical_axes for one axis can't meet in one array"
        )
    remedies = _OF_KINDS if isinstance(error, ValueError) else {}
    pattern = next((pattern for pattern in remedies if re.search(pattern, message)), None)
    if pattern is None or ("Auto" in pattern and task.mesh == _compat.auto(task.mesh)):
        return None
    kinds = ", ".join(f"{name} {kind.name}" for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True))
    return UsageError(
        f"{line}: inside task {task.name!r} axes are as its submesh says, {kinds}; {remedies[pattern]}. {says}"
    )


@contextlib.contextmanager
def partitioning() -> Iterator[None]:
    """Mark the enclosed trace as one that will be partitioned; its inner jits stay under ``jax.disable_jit``."""
    with _setting(_tracing, True), jax.disable_jit(False):
        yield
