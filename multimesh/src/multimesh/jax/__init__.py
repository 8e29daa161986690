"""The public names under the original's import path: ``import multimesh.jax as mm``.

It has the names of `multimesh`, and those that only the original has. Where the two differ, a function takes the calls
of both. ``multimesh.jax.flax`` has the helpers for Flax linen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multimesh import *  # noqa: F403
from multimesh import __all__ as _names_here
from multimesh.calling import jitted as _jitted
from multimesh.core import checks, submesh
from multimesh.errors import UsageError
from multimesh.marking import contexts, microbatching, registrations
from multimesh.marking import tasks as _marks
from multimesh.schedules import Schedule, custom

_CONTAINERS = tuple | list | dict


def _device_grid(label: str, devices: Any, shape: Any, choices: Sequence[jax.Device] | None = None) -> Any:
    """Return devices, given as such, by their ids or by their positions in ``choices``, as an array of this shape."""
    grid = np.asarray(devices, dtype=object)
    numbers = ((device.id, device) for device in jax.devices()) if choices is None else enumerate(choices)
    table: dict[Any, jax.Device] = dict(numbers) | {d: d for d in grid.flat if isinstance(d, jax.Device)}
    if unknown := [d for d in grid.flat if not isinstance(d, jax.Device | int | np.integer) or d not in table]:
        raise UsageError(f"{label}: {unknown[0]!r} is neither a device nor the number of one")
    shape = grid.shape if shape is None else checks.many(f"{label}: a shape", shape, "a sequence of ints")
    if math.prod(shape) != grid.size:
        remedy = "a submesh that rotates is not supported, register one task for each"
        raise UsageError(f"{label}: a shape of {shape} does not hold the {grid.size} devices; {remedy}")
    return np.array([table[device] for device in grid.flat], dtype=object).reshape(shape)


class TaskMesh:
    """A submesh by the numbers of its devices: positions in ``jax.devices()``, or in ``devices=`` of `mjit`.

    ``abstract`` is a ``jax.sharding.AbstractMesh``, instead of sizes and names of the axes.
    """

    def __init__(self, *, devices: Any, axis_sizes: Any = None, axis_names: Any = None, abstract: Any = None):
        if abstract is None:
            if axis_sizes is None or axis_names is None or len(axis_sizes) != len(axis_names):
                raise UsageError("TaskMesh: give axis_sizes= and axis_names= of one length, or abstract=")
            abstract = AbstractMesh(tuple(axis_sizes), tuple(axis_names))
        self.abstract_mesh = self.mesh = abstract
        self.devices = np.asarray(devices)

    def place(self, devices: Any) -> TaskMesh:
        """Return the same axes on other devices, given by their numbers."""
        return TaskMesh(devices=devices, abstract=self.mesh)

    def on(self, devices: Sequence[jax.Device]) -> Mesh:
        """Return its mesh of these devices."""
        return Mesh(_device_grid("TaskMesh", self.devices, self.mesh.axis_sizes, devices), self.mesh.axis_names)


_FIELDS = {
    "split_backprop": "the schedule says it; use schedule='zb-h1'",
    "loop_dependent_mesh_slice": "a task has one submesh; register one task for each submesh",
}


@dataclasses.dataclass
class Task:
    """A task: ``mesh``, or ``mesh_slice`` of the `MultiMesh` in force, says where it runs."""

    name: str | None = None
    mesh: TaskMesh | Mesh | None = None
    logical_axes: Sequence[tuple[str, str]] | None = None
    mesh_slice: Mapping[str, int] | None = None
    extra_axes: Sequence[tuple[str, str]] | None = None
    split_backprop: tuple[str, str] | None = None
    loop_dependent_mesh_slice: Callable[[int], Mapping[str, int]] | None = None

    def place_task(self, default: str, devices: Sequence[jax.Device]) -> submesh.Placement:
        """Place the task on its submesh of these devices, under its own name or the default."""
        name, mesh = self.name or default, self.mesh
        for absent, remedy in _FIELDS.items():
            if getattr(self, absent) is not None:
                raise UsageError(f"task {name!r}: {absent}= is not supported: {remedy}")
        if self.mesh_slice is not None:
            if mesh is not None or (outer := _innermost()) is None:
                raise UsageError(f"task {name!r}: give mesh_slice= without mesh=, inside `with MultiMesh(...):`")
            mesh = outer.slice(**self.mesh_slice)
        elif isinstance(mesh, TaskMesh):
            mesh = mesh.on(devices)
        pairs = list(self.logical_axes or [(axis, axis) for axis in getattr(mesh, "axis_names", ())])
        return submesh.make_task(name, mesh=mesh, logical_axes=[*pairs, *(self.extra_axes or ())])


@dataclasses.dataclass(frozen=True)
class _Entrance(registrations.Registration):
    """Matches no scope. It tells `multimesh.jit` and `Task` which `MultiMesh` is in force."""

    mesh: Mesh | None = None
    owner: Any = dataclasses.field(default=None, compare=False)


def _innermost() -> MultiMesh | None:
    """Return the `MultiMesh` in force, or None."""
    return next((r.owner for r in registrations.in_force() if isinstance(r, _Entrance)), None)


class MultiMesh(contextlib.ContextDecorator):
    """A mesh of all devices, of which tasks take slices. A ``with`` block over it also opens ``autoshard``.

    Tasks that are registered inside the block are in force inside it only, and again when it is entered again. The
    object has all attributes of ``jax.sharding.Mesh``. ``global_mesh`` is a mesh, instead of sizes, names and devices.
    """

    def __init__(self, *, axis_sizes: Any = None, axis_names: Any = None, devices: Any = None, global_mesh: Any = None):
        if global_mesh is None:
            grid = _device_grid("MultiMesh", jax.devices() if devices is None else devices, axis_sizes)
            global_mesh = submesh.make_task("MultiMesh", devices=grid, device_axes=axis_names).mesh
        self.global_mesh: Mesh = global_mesh
        self.registered: list[registrations.Registration] = []
        self.entered: list[contextlib.ExitStack] = []

    def __getattr__(self, name: str) -> Any:
        if name == "global_mesh":  # while unpickled or copied
            raise AttributeError(name)
        return getattr(self.global_mesh, name)

    def slice(self, **at: int) -> Mesh:
        """Return the submesh at these positions. An axis that is sliced stays, with size 1."""
        shape = self.global_mesh.shape
        for axis, position in at.items():
            if axis not in shape or not 0 <= position < shape[axis]:
                raise UsageError(f"MultiMesh.slice: {axis}={position}, but the mesh is {dict(shape)}")
        index = tuple(slice(at[a], at[a] + 1) if a in at else slice(None) for a in shape)
        return Mesh(self.global_mesh.devices[index], self.global_mesh.axis_names)

    def register_task(self, matcher: str, **rule: Any) -> registrations.Registration:
        """Register a task, as `register_task` does, for as long as the mesh is entered."""
        return register_task(matcher, owner=self, **rule)

    def __enter__(self) -> MultiMesh:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contexts.context(autoshard=True))
            entrance = _Entrance(re.compile("(?!)"), mesh=self.global_mesh, owner=self)
            stack.enter_context(registrations.add(entrance))
            for registration in self.registered:
                registrations.add(registration)
            self.entered.append(stack.pop_all())
        return self

    def __exit__(self, *exc: Any) -> None:
        self.entered.pop().close()
        for registration in self.registered:
            registration.remove()


def register_task(
    regex: str, *, name: str | None = None, callback: Any = None, task: Any = None, owner: Any = None, **where: Any
) -> registrations.Registration:
    """Call `multimesh.register_task` with the original's arguments. A pattern without a group counts as one group.

    It is in force until its ``remove()``, `clear_tasks`, or the end of a ``with`` over it or its owner, by default the
    `MultiMesh` around. Devices may be ids. The callback may take the name only, and return a `Task`, as ``task`` is.
    """
    label, answer = f"register_task({regex!r})", callback
    if (callback is not None) + (task is not None) + (name is not None) > 1:
        raise UsageError(f"{label}: callback= or task= says it all; give one of them, and drop name=")
    if task is not None:
        answer = lambda label, backprop: task  # noqa: E731
    elif callback is not None and checks.misfit(callback, "", False) and not checks.misfit(callback, ""):
        answer = lambda label, backprop: callback(label)  # noqa: E731
    if answer is None and where.get("devices") is not None:
        where["devices"] = _device_grid(label, where["devices"], where.pop("dims", None))
    pattern = f"({regex})" if answer is not None and isinstance(regex, str) and "(" not in regex else regex
    registration = registrations.register_task(pattern, callback=answer, **where)
    if name is not None and registration.task is not None:
        registration.remove()
        fixed = dataclasses.replace(registration.task, name=checks.string(f"{label}: name=", name))
        registration = registrations.add(dataclasses.replace(registration, task=fixed))
    if (owner := owner or _innermost()) is not None:
        owner.registered.append(registration)
        if not owner.entered:
            registration.remove()
    return registration


def clear_tasks() -> None:
    """End every registration. Tasks of a `MultiMesh` in force end until it is entered again."""
    for registration in registrations.in_force():
        if not isinstance(registration, _Entrance):
            registration.remove()


@contextlib.contextmanager
def tasks(configurable: Callable[[], Callable[[], Any]] | None = None) -> Iterator[None]:
    """Clear all tasks and call ``configurable()()``, which registers others. At the end clear these."""
    with contextlib.ExitStack() as ended:
        if configurable is not None:
            clear_tasks()
            ended.callback(clear_tasks)
            configurable()()
        yield


def task(fun: Any = None, name: str | None = None, *, task: Task | None = None, **where: Any) -> Any:
    """Mark a task as `multimesh.task` does. ``mesh`` may also be a `TaskMesh`; without a place it takes all devices.

    ``task`` is a `Task`, instead of the submesh; ``where`` may be fields of one: ``mesh_slice``, ``extra_axes``.
    """
    core = {"mesh", "devices", "device_axes", "logical_axes"}
    if task is None and (isinstance(where.get("mesh"), TaskMesh) or not where.keys() <= core):
        if unknown := where.keys() - Task.__dataclass_fields__:
            raise UsageError(f"task: {min(unknown)} has no meaning; fields are {', '.join(Task.__dataclass_fields__)}")
        task, where = Task(**where), {}
    if task is not None:
        if where:
            raise UsageError(f"task: task= says where it runs; drop {min(where)}=")
        placement = task.place_task(name or str(getattr(fun, "__name__", "task")), jax.devices())
        name, where = placement.name, {"mesh": placement.mesh, "logical_axes": placement.logical_axes}
    elif fun is not None and where.get("mesh") is where.get("devices") is None:
        where["devices"] = np.asarray(jax.devices(), dtype=object)
    return _marks.task(fun, name, **where)


def microbatch(
    fun: Callable[..., Any],
    dim: int = 0,
    size: int | None = None,
    argnum: int = 0,
    interleave: int | None = None,
    num_stages: int | None = None,
    schedule: Any = None,
    unrolling: int | None = None,
    arg_shardings: Any = None,
    custom_schedule: Any = None,
    **options: Any,
) -> Callable[..., Any]:
    """Call `multimesh.microbatch` with the original's order of arguments; None stands for a default.

    The tasks say how many stages there are, whatever ``interleave`` and ``num_stages`` are. ``arg_shardings`` is the
    logical layout of each microbatch of argument ``argnum``, as in `with_sharding_constraint`.
    """
    if size is None:
        raise UsageError("microbatch: give size=, the rows of a microbatch")
    if unrolling is not None:
        raise UsageError("microbatch: unrolling= is not supported; drop it, or give the order as custom_schedule=")
    if custom_schedule is not None:
        schedule = custom_schedule if isinstance(custom_schedule, Schedule) else custom(custom_schedule)
    order = {None: "1f1b", "zero-bubble-h2": "zb-h2"}.get(schedule, schedule)

    @functools.wraps(fun)
    def constrained(*args: Any, **kwargs: Any) -> Any:
        full = list(args)
        full[argnum] = with_sharding_constraint(full[argnum], arg_shardings)
        return fun(*full, **kwargs)

    looped = fun if arg_shardings is None else constrained
    return microbatching.microbatch(looped, dim=dim, size=size, argnum=argnum, schedule=order, **options)


def mjit(
    f: Any, *, mesh: Any = None, devices: Any = None, in_shardings: Any = None, out_shardings: Any = None, **more: Any
) -> _jitted.Jitted[..., Any]:
    """Call `multimesh.jit` with logical layouts, for tasks on the devices of ``mesh`` or on ``devices``.

    The spec of each ``NamedSharding`` in a pytree prefix of arguments or result is a constraint; other leaves are none.
    """
    if mesh is not None and devices is not None:
        raise UsageError("mjit: give either mesh= or devices=, not both")

    @functools.wraps(f)
    def annotated(*args: Any, **kwargs: Any) -> Any:
        result = f(*_constrain("mjit", in_shardings, args, NamedSharding), **kwargs)
        return _constrain("mjit", out_shardings, result, NamedSharding)

    among = devices if mesh is None else mesh.devices
    return _jitted.jit(f if in_shardings is out_shardings is None else annotated, devices=among, **more)


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Constrain a layout as `multimesh.with_sharding_constraint`, also by a tuple of names or a ``NamedSharding``."""
    return _constrain("with_sharding_constraint", axis_resources, x, object)


def _constrain(caller: str, layouts: Any, values: Any, kind: type) -> Any:
    """Constrain values by the layouts of a kind. All but tuples, lists and dicts are leaves of the pytree prefix."""

    is_names = lambda x: isinstance(x, tuple) and any(isinstance(name, str) for name in x)  # noqa: E731

    def place(layout: Any, part: Any) -> Any:
        spec = layout.spec if isinstance(layout, NamedSharding) else layout
        spec = PartitionSpec(*spec) if is_names(spec) else spec
        return _marks.with_sharding_constraint(part, spec) if isinstance(layout, kind) else part

    try:
        return jax.tree.map(place, layouts, values, is_leaf=lambda x: is_names(x) or not isinstance(x, _CONTAINERS))
    except ValueError as error:
        raise UsageError(f"{caller}: shardings are no pytree prefix of the values: {error}") from None


def shutdown() -> None:
    """Do nothing: there is no runtime to stop."""


def _option(name: str, default: bool | None) -> Callable[..., contexts.Manager]:
    """Return a context that is opened by a call without arguments if there is a default."""
    return lambda enable=default, **others: contexts.context(**({name: enable} | others))


def _refuse(absent: str, /, *_: Any, **__: Any) -> Any:
    raise UsageError(f"multimesh.jax.{absent} has no meaning on stock JAX; {_ABSENT[absent]}")


_ABSENT = {
    "Context": "use register_task in a with statement, or MultiMesh",
    "MeshWrapper": "give tasks a jax.sharding.Mesh",
    "compile_hlo_module": "use jax.jit(f).lower(...).compile().memory_analysis()",
    "custom_partitioning": "call jax.experimental.custom_partitioning inside a task",
    "no_op_custom_call": "it reached into the compiler of the original; drop the call",
    "recompute_from_arguments_if_cost_less_than": "see enable_recomputation and jax.checkpoint",
    "register_custom_call_target": "use jax.ffi.register_ffi_target",
    "replicate_parameters_smaller_than_num_elements": "give in_shardings=, or constrain it to PartitionSpec()",
    "set_startup_config": "JAX has jax_num_cpu_devices, and XLA_PYTHON_CLIENT_MEM_FRACTION for GPU memory",
    "shard_map": "call jax.shard_map with the task's mesh inside the task",
    "slice_global_mesh": "use the slice method of MultiMesh",
}
_CONTEXTS = tuple(field.name for field in dataclasses.fields(contexts.Options) if isinstance(field.default, bool))
globals().update({name: functools.partial(_refuse, name) for name in _ABSENT})
globals().update({name: _option(name, name in ("autoshard", "ignore_transforms") or None) for name in _CONTEXTS})
_ONLY = ("MultiMesh", "Task", "TaskMesh", "clear_tasks", "mjit", "shutdown", "tasks", *_CONTEXTS, *_ABSENT)
__all__ = sorted({*_names_here, *_ONLY})
