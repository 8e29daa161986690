"""The original's classes for where a task runs: `TaskMesh`, `Task` and `MultiMesh`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from multimesh.core import submesh
from multimesh.errors import UsageError
from multimesh.marking import contexts, registrations

Pairs = Sequence[tuple[str, str]]
_NOTHING = re.compile("(?!)")  # matches no scope


class TaskMesh:
    """A submesh by the numbers of its devices.

    Parameters
    ----------
    devices
        Positions in ``jax.devices()``, or in the ``devices=`` of `multimesh.jit` for registered tasks.
    axis_sizes, axis_names
        Shape of the submesh and a name for each of its dimensions.
    abstract
        A ``jax.sharding.AbstractMesh``, instead of the two.

    Raises
    ------
    UsageError
        When sizes, names and devices do not fit together.
    """

    def __init__(
        self,
        *,
        devices: Any,
        axis_sizes: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        abstract: AbstractMesh | None = None,
    ):
        if abstract is None:
            if axis_sizes is None or axis_names is None:
                raise UsageError("TaskMesh: give axis_sizes= and axis_names=, or abstract=")
            if len(axis_sizes) != len(axis_names):
                raise UsageError(f"TaskMesh: {len(axis_sizes)} axis_sizes for {len(axis_names)} axis_names")
            abstract = AbstractMesh(tuple(axis_sizes), tuple(axis_names))
        numbers = np.asarray(devices)
        if numbers.size != abstract.size or not np.issubdtype(numbers.dtype, np.integer):
            raise UsageError(f"TaskMesh: devices= must be {abstract.size} numbers of devices, got {devices!r}")
        self.mesh = abstract
        self.devices = numbers.reshape(abstract.axis_sizes)

    def place(self, devices: Any) -> TaskMesh:
        """Return the same axes on other devices, given by their numbers."""
        return TaskMesh(devices=devices, abstract=self.mesh)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """Sizes and names of the axes."""
        return self.mesh

    def on(self, devices: Sequence[jax.Device]) -> Mesh:
        """Return its mesh of these devices."""
        if not 0 <= self.devices.min() <= self.devices.max() < len(devices):
            raise UsageError(f"TaskMesh: devices={self.devices.ravel().tolist()}, but there are {len(devices)}")
        chosen = [devices[i] for i in self.devices.flat]
        return Mesh(np.asarray(chosen, dtype=object).reshape(self.devices.shape), self.mesh.axis_names)


@dataclass
class Task:
    """A task as the original describes it.

    ``mesh``, or ``mesh_slice`` of the `MultiMesh` in force, says where it runs.
    """

    name: str | None = None
    mesh: TaskMesh | Mesh | None = None
    logical_axes: Pairs | None = None
    mesh_slice: Mapping[str, int] | None = None
    extra_axes: Pairs | None = None
    split_backprop: tuple[str, str] | None = None
    loop_dependent_mesh_slice: Callable[[int], Mapping[str, int]] | None = None

    def placed(self, default: str, devices: Sequence[jax.Device]) -> submesh.Placement:
        """Place the task on its submesh of these devices, under its own name or the default."""
        name = self.name or default
        if self.split_backprop is not None:
            raise UsageError(f"task {name!r}: split_backprop= is a matter of the schedule; use schedule='zb-h1'")
        if self.loop_dependent_mesh_slice is not None:
            raise UsageError(
                f"task {name!r}: loop_dependent_mesh_slice= is not supported: a task has one submesh; register one "
                "task for each submesh"
            )
        if (self.mesh is None) == (self.mesh_slice is None):
            raise UsageError(f"task {name!r}: give either mesh= or mesh_slice=, not both or neither")
        mesh, around = self.mesh, innermost()
        if self.mesh_slice is not None:
            if around is None:
                raise UsageError(
                    f"task {name!r}: mesh_slice= is a slice of a MultiMesh; call inside `with MultiMesh(...):`"
                )
            mesh = around.slice(**self.mesh_slice)
        if isinstance(mesh, TaskMesh):
            mesh = mesh.on(devices)
        if not isinstance(mesh, Mesh):
            raise UsageError(f"task {name!r}: mesh= must be a TaskMesh or a jax.sharding.Mesh, not {mesh!r}")
        pairs = list(self.logical_axes or [(axis, axis) for axis in mesh.axis_names]) + list(self.extra_axes or ())
        return submesh.make_task(name, mesh=mesh, logical_axes=pairs)


@dataclass(frozen=True)
class Entered(registrations.Registration):
    """Matches no scope. It tells `multimesh.jit` and `Task` which `MultiMesh` is in force."""

    mesh: Mesh | None = None
    owner: Any = field(default=None, compare=False)


def innermost() -> MultiMesh | None:
    """Return the `MultiMesh` in force, or None."""
    return next((r.owner for r in registrations.in_force() if isinstance(r, Entered)), None)


class MultiMesh(contextlib.ContextDecorator):
    """A mesh of all devices, of which tasks take slices. A ``with`` block over it also opens `autoshard`.

    Tasks that are registered inside the block are in force inside it only, and again when it is entered again. The
    object has all attributes of ``jax.sharding.Mesh``.

    Parameters
    ----------
    axis_sizes, axis_names, devices
        Shape, axis names and devices (by default all) of the mesh.
    global_mesh
        A mesh, instead of the three.
    """

    def __init__(
        self,
        *,
        axis_sizes: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        devices: Any = None,
        global_mesh: Mesh | None = None,
    ):
        if global_mesh is None:
            if axis_names is None or (axis_sizes is None and devices is None):
                raise UsageError("MultiMesh: give axis_sizes= and axis_names=, or global_mesh=")
            grid = np.asarray(jax.devices() if devices is None else devices, dtype=object)
            shape = grid.shape if axis_sizes is None else tuple(axis_sizes)
            if int(np.prod(shape)) != grid.size or len(shape) != len(axis_names):
                raise UsageError(f"MultiMesh: axis_sizes={shape} and axis_names={axis_names} for {grid.size} devices")
            global_mesh = Mesh(grid.reshape(shape), tuple(axis_names))
        self.global_mesh = global_mesh
        self.registered: list[registrations.Registration] = []
        self._open: list[tuple[Entered, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "global_mesh":  # while unpickled or copied
            raise AttributeError(name)
        return getattr(self.global_mesh, name)

    def slice(self, **at: int) -> Mesh:
        """Return the submesh at these positions. An axis that is sliced stays, with size 1.

        Raises ``UsageError`` for an unknown axis or a position outside of it.
        """
        shape = self.global_mesh.shape
        for axis, position in at.items():
            if axis not in shape or not 0 <= position < shape[axis]:
                raise UsageError(f"MultiMesh.slice: {axis}={position}, but the mesh is {dict(shape)}")
        index = tuple(slice(at[a], at[a] + 1) if a in at else slice(None) for a in shape)
        return Mesh(self.global_mesh.devices[index], self.global_mesh.axis_names)

    def register_task(self, matcher: str, *, callback: Any = None, task: Task | None = None) -> None:
        """Register a task, as `register_task` does, for as long as the mesh is entered."""
        made = registration(matcher, callback=callback, task=task)
        self.registered.append(made)
        if self._open:
            registrations.add(made)

    def __enter__(self) -> MultiMesh:
        options = contexts.autoshard(True)
        options.__enter__()
        self._open.append((registrations.add(Entered(_NOTHING, mesh=self.global_mesh, owner=self)), options))
        for made in self.registered:
            registrations.add(made)
        return self

    def __exit__(self, *exc: Any) -> None:
        entered, options = self._open.pop()
        for made in self.registered:
            made.remove()
        entered.remove()
        options.__exit__(*exc)


@dataclass(frozen=True)
class _Registered(registrations.Registration):
    """A registration whose callback returns a `Task`, or a range of devices and a name."""

    def _place(self, answer: Any, label: str, devices: tuple[jax.Device, ...]) -> submesh.Placement:
        if isinstance(answer, Task):
            return answer.placed(label, devices)
        return super()._place(answer, label, devices)


def registration(
    matcher: str,
    *,
    callback: Any = None,
    task: Task | None = None,
    fixed: submesh.Placement | None = None,
    dims: Sequence[int] | None = None,
    device_axes: Sequence[str] | None = None,
    logical_axes: Any = None,
) -> registrations.Registration:
    """Make a registration of a callback, a `Task` or a fixed task; it is not in force yet.

    A pattern without a group counts as one group.
    """
    if fixed is None and (callback is None) == (task is None):
        raise UsageError(f"register_task({matcher!r}): give either callback= or task=, not both or neither")
    try:
        pattern = re.compile(matcher if "(" in matcher else f"({matcher})")
    except re.error as error:
        raise UsageError(f"register_task({matcher!r}): not a regular expression: {error}") from None
    answer: Any = callback if task is None else lambda label, backprop: task
    shape = None if dims is None else tuple(dims)
    axes = tuple(device_axes) if device_axes else None
    return _Registered(pattern, fixed, answer, shape, axes, tuple(dict(logical_axes or {}).items()))
