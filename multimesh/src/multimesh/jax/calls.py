"""Tasks, registrations, microbatches, ``mjit`` and logical layouts with the arguments of the original."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh.calling.jitted import Jitted, jit
from multimesh.core import checks
from multimesh.core.submesh import make_task
from multimesh.errors import UsageError
from multimesh.jax.meshes import Entered, MultiMesh, Task, TaskMesh, innermost, registration
from multimesh.marking import microbatching, registrations
from multimesh.marking import tasks as here


def task(
    fun: Callable[..., Any] | None = None,
    name: str | None = None,
    *,
    task: Task | None = None,
    mesh: Mesh | TaskMesh | None = None,
    devices: Any = None,
    device_axes: Sequence[str] | None = None,
    logical_axes: Any = None,
    **fields: Any,
) -> Any:
    """Mark a task as `multimesh.task` does. ``mesh`` may also be a `TaskMesh`; without a place it takes all devices.

    ``task`` is a `Task`, instead of the submesh; ``fields`` are further fields of one: ``mesh_slice``, ``extra_axes``.
    """
    if task is None and (fields or isinstance(mesh, TaskMesh)):
        unknown = set(fields) - set(Task.__dataclass_fields__)
        if unknown or devices is not None or device_axes is not None:
            wrong = min(unknown) if unknown else "devices= and device_axes= beside a field of Task"
            raise UsageError(f"task: {wrong} has no meaning; fields are {', '.join(Task.__dataclass_fields__)}")
        task = Task(mesh=mesh, logical_axes=logical_axes, **fields)
    elif task is not None and not (mesh is devices is device_axes is logical_axes is None and not fields):
        raise UsageError("task: task= says where it runs; drop the other arguments")
    if task is not None:
        placed = task.placed(name or str(getattr(fun, "__name__", "task")), jax.devices())
        return here.task(fun, placed.name, mesh=placed.mesh, logical_axes=dict(placed.logical_axes))
    if mesh is None and devices is None and fun is not None:
        devices = np.asarray(jax.devices(), dtype=object)
    return here.task(fun, name, mesh=mesh, devices=devices, device_axes=device_axes, logical_axes=logical_axes)


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
    *,
    stack: Any = None,
) -> Callable[..., Any]:
    """Call `multimesh.microbatch` with the original's order of arguments; None stands for a default.

    Parameters
    ----------
    unrolling
        None only: the plan holds every microbatch, in the order of the schedule.
    arg_shardings
        Logical layout of each microbatch of argument ``argnum``: a ``PartitionSpec``, a ``NamedSharding``, or a pytree
        prefix of them.

    Raises
    ------
    UsageError
        Without ``size``, and with ``unrolling``.
    """
    if size is None:
        raise UsageError("microbatch: give size=, the rows of a microbatch")
    if unrolling is not None:
        raise UsageError("microbatch: unrolling= is not supported; drop it, or give the order as custom_schedule=")
    if schedule is None:
        schedule = "1f1b" if custom_schedule is None else "custom"
    if schedule == "zero-bubble-h2":
        schedule = "zb-h2"
    return microbatching.microbatch(
        fun if arg_shardings is None else _constrain_argument(fun, argnum, arg_shardings),
        dim=dim,
        size=size,
        argnum=argnum,
        schedule=schedule,
        interleave=1 if interleave is None else interleave,
        num_stages=num_stages,
        custom_schedule=custom_schedule,
        stack=stack,
    )


def _constrain_argument(fun: Callable[..., Any], argnum: int, shardings: Any) -> Callable[..., Any]:
    @functools.wraps(fun)
    def constrained(*args: Any, **kwargs: Any) -> Any:
        full = list(args)
        full[argnum] = with_sharding_constraint(full[argnum], shardings)
        return fun(*full, **kwargs)

    return constrained


def register_task(
    regex: str,
    *,
    name: str | None = None,
    mesh: Mesh | None = None,
    dims: Sequence[int] | None = None,
    callback: Callable[..., Any] | None = None,
    devices: Any = None,
    device_axes: Sequence[str] | None = None,
    logical_axes: Any = None,
    task: Task | None = None,
) -> registrations.Registration:
    """Call `multimesh.register_task` with the original's arguments. A pattern without a group counts as one group.

    It is in force until its ``remove()``, `clear_tasks`, or the end of a ``with`` over it or the `MultiMesh` around.

    Parameters
    ----------
    name
        Name of the task in plans; by default the pattern.
    devices, dims
        Devices or their ids, in the shape ``dims``.
    callback
        It may also take the name only, and return a `Task`.
    task
        A `Task`, instead of all others.

    Raises
    ------
    UsageError
        If arguments do not fit together, or ``mesh`` or ``dims`` is a part of ``devices``: a task has one submesh.
    """
    if mesh is not None and devices is not None:
        raise UsageError(
            f"register_task({regex!r}): a mesh= that rotates over devices= is not supported: a task has one submesh; "
            "register one task for each submesh, or give callback="
        )
    if callback is not None or task is not None:
        if name is not None or mesh is not None or devices is not None:
            raise UsageError(f"register_task({regex!r}): callback= or task= says it all; drop name=, mesh=, devices=")
        if logical_axes and not device_axes:
            raise UsageError(f"register_task({regex!r}): logical_axes= needs device_axes=")
        answer = (
            (lambda label, _: callback(label))
            if callback is not None and checks.misfit(callback, "", False)
            else callback
        )
        made = registration(
            regex, callback=answer, task=task, dims=dims, device_axes=device_axes, logical_axes=logical_axes
        )
    else:
        grid = _device_grid(regex, devices, dims) if devices is not None else None
        fixed = make_task(name or regex, mesh=mesh, devices=grid, device_axes=device_axes, logical_axes=logical_axes)
        made = registration(regex, fixed=fixed)
    owner = innermost()
    if owner is not None:
        owner.registered.append(made)
    return registrations.add(made)


def _device_grid(regex: str, devices: Any, dims: Sequence[int] | None) -> Any:
    """Return devices, given as such or by their ids, as an array of this shape."""
    grid = np.asarray(devices, dtype=object)
    known: dict[Any, Any] = {device.id: device for device in jax.devices()}
    known |= {device: device for device in grid.flat if isinstance(device, jax.Device)}
    if unknown := [device for device in grid.flat if device not in known]:
        raise UsageError(f"register_task({regex!r}): {unknown[0]!r} is neither a device nor the id of one")
    chosen = np.array([known[device] for device in grid.flat], dtype=object).reshape(grid.shape)
    shape = chosen.shape if dims is None else tuple(dims)
    if int(np.prod(shape)) != chosen.size:
        raise UsageError(
            f"register_task({regex!r}): dims={shape} does not hold the {chosen.size} devices; a submesh that rotates "
            "over devices= is not supported, register one task for each submesh"
        )
    return chosen.reshape(shape)


def clear_tasks() -> None:
    """End every registration. Tasks of a `MultiMesh` in force end until it is entered again."""
    for made in registrations.in_force():
        if not isinstance(made, Entered):
            made.remove()


@contextlib.contextmanager
def tasks(configurable: Callable[[], Callable[[], Any]] | None = None) -> Iterator[None]:
    """Clear all tasks and call ``configurable()()``, which registers others. At the end clear these.

    With None it does nothing.
    """
    if configurable is None:
        yield
        return
    clear_tasks()
    try:
        configurable()()
        yield
    finally:
        clear_tasks()


def mjit(
    f: Callable[..., Any],
    *,
    mesh: Mesh | MultiMesh | None = None,
    devices: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Jitted:
    """Call `multimesh.jit`, with logical layouts.

    Parameters
    ----------
    mesh, devices
        The devices that tasks may use, in any shape; by default all.
    in_shardings, out_shardings
        Pytree prefixes of the arguments and of the result. The spec of a ``NamedSharding`` constrains its part as
        `with_sharding_constraint` does; the layout under anything else is derived.
    """
    if mesh is not None and devices is not None:
        raise UsageError("mjit: give either mesh= or devices=, not both")

    @functools.wraps(f)
    def annotated(*args: Any, **kwargs: Any) -> Any:
        return _constrain_leaves(f(*_constrain_leaves(args, in_shardings), **kwargs), out_shardings)

    among = mesh.devices if mesh is not None else devices
    flat = None if among is None else list(np.asarray(among, dtype=object).flat)
    plain = in_shardings is None and out_shardings is None
    return jit(f if plain else annotated, static_argnums=static_argnums, donate_argnums=donate_argnums, devices=flat)


def _constrain_leaves(values: Any, shardings: Any) -> Any:
    def annotate(sharding: Any, part: Any) -> Any:
        return here.with_sharding_constraint(part, sharding.spec) if isinstance(sharding, NamedSharding) else part

    return _map_prefix("mjit", annotate, shardings, values)


def _map_prefix(what: str, fn: Callable[[Any, Any], Any], prefix: Any, values: Any) -> Any:
    """Call ``fn(leaf, part)`` for a pytree prefix. All but tuples, lists and dicts are leaves of the prefix."""

    def is_leaf(x: Any) -> bool:
        return _is_names(x) or not isinstance(x, tuple | list | dict)

    try:
        return jax.tree.map(fn, prefix, values, is_leaf=is_leaf)
    except ValueError as error:
        raise UsageError(f"{what}: shardings are no pytree prefix of the values: {error}") from None


def _is_names(x: Any) -> bool:
    """Whether it is a spec, written as a tuple of names."""
    return isinstance(x, tuple) and any(isinstance(e, str) for e in x)


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Constrain a layout as `multimesh.with_sharding_constraint` does, also by a ``NamedSharding`` or a tuple of names.

    Of a ``NamedSharding`` only the spec counts.
    """

    def constrain(given: Any, part: Any) -> Any:
        spec = given.spec if isinstance(given, NamedSharding) else PartitionSpec(*given) if _is_names(given) else given
        return here.with_sharding_constraint(part, spec)

    return _map_prefix("with_sharding_constraint", constrain, axis_resources, x)
