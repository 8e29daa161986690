"""``task``: a function, a module or a block of code on a submesh."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from multimesh.core import _compat, checks
from multimesh.core.specs import translate
from multimesh.core.submesh import AxisMap, Placement, make_task
from multimesh.errors import UsageError
from multimesh.marking import contexts, marks
from multimesh.marking.flax_modules import refuse_changes, subclass, with_call
from multimesh.marking.tracing import current_task, in_a_mesh, inside, is_partitioning, is_recording, note_task

F = TypeVar("F", bound=Callable[..., Any])


@overload
def task(
    fn: F,
    name: str | None = None,
    *,
    mesh: Mesh | None = None,
    devices: Any = None,
    device_axes: Sequence[str] | None = None,
    logical_axes: AxisMap | None = None,
) -> F: ...
@overload
def task(fn: None = None, name: str | None = None, **where: Any) -> AbstractContextManager[None]: ...
def task(  # type: ignore[misc]  # the options are those of the first overload
    fn: Callable[..., Any] | None = None,
    name: str | None = None,
    *,
    mesh: Mesh | None = None,
    devices: Any = None,
    device_axes: Sequence[str] | None = None,
    logical_axes: AxisMap | None = None,
) -> Any:
    """Run ``fn`` on a submesh of the enclosing `multimesh.jit`. Elsewhere it computes the same as ``fn``.

    Parameters
    ----------
    fn
        A function, a callable object, a Flax module (linen or NNX), or a class. The ``__call__`` of the instances of a
        class is a task. Without ``fn`` the result is a context manager for a block of traced code:
        ``with mm.task(mesh=m0, name="stage0"): ...``
    name
        Shown in plans and profiles; by default the function's own name.
    mesh
        The submesh. Inside the task its axes are Auto or Explicit, as it says, and a bare ``PartitionSpec`` names them.
        Results lie on the mesh as given.
    devices, device_axes
        An array of devices in the shape of the submesh, and a name for each dimension, instead of ``mesh``.
    logical_axes
        Logical axis name to the submesh's axis, axes or None (a mapping or pairs), for
        `multimesh.with_sharding_constraint`.

    Raises
    ------
    UsageError
        At once, if arguments do not fit together.

    Examples
    --------
    >>> first, last = (Mesh(np.array([device]), ("data",)) for device in jax.devices()[:2])
    >>> square, root = mm.task(jnp.square, mesh=first), mm.task(jnp.sqrt, mesh=last)
    >>> mm.jit(lambda x: root(square(x)))(jnp.float32(3)).devices() == set(last.devices.flat)
    True
    """
    if fn is not None and (isinstance(fn, Mesh) or not callable(fn)):
        raise UsageError(f"task: the first argument must be callable, got {type(fn).__name__}; pass a mesh as mesh=")
    if name is not None:
        checks.string("task: name=", name)
    label = name or getattr(fn, "__name__", None) or (type(fn).__name__ if fn is not None else "task")
    placed = make_task(label, mesh=mesh, devices=devices, device_axes=device_axes, logical_axes=logical_axes)
    if fn is None:
        return scope(placed)
    if isinstance(fn, type):
        if not any("__call__" in vars(cls) for cls in fn.__mro__):
            raise UsageError(f"task {label!r}: instances of {fn.__name__} can't be called; give it a __call__")
        return subclass(fn, scope(placed))
    module = with_call(fn, scope(placed))
    return mark_function(fn, placed) if module is None else module


@contextlib.contextmanager
def scope(placed: Placement) -> Iterator[None]:
    """Mark operations that are traced in it as a part of the task ``placed``."""
    if contexts.ignoring():
        yield
        return
    with jax.named_scope(marks.TASKS.name(placed)), inside(placed):
        yield


def call_under_mark(
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keep: Callable[[Hashable, Callable[[], Any]], Any] | None = None,
) -> Any:
    """Call ``fn`` in an inner jit of this name. Arguments that are no arrays stay Python values.

    ``keep(key, make)`` returns the jit of an earlier call with the same Python values, or else ``make()``.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    where = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | np.generic))
    fixed = [None if i in where else leaf for i, leaf in enumerate(leaves)]

    def body(*arrays: Any) -> Any:
        full = list(fixed)
        for i, array in zip(where, arrays, strict=True):
            full[i] = array
        inner_args, inner_kwargs = jax.tree.unflatten(tree, full)
        return fn(*inner_args, **inner_kwargs)

    make = functools.partial(jax.jit, _compat.set_name(body, name))
    jitted = make() if keep is None else keep((tree, where, *((type(x), x) for x in fixed)), make)
    placed = marks.TASKS.find(name)
    label = "microbatch" if placed is None else f"task {placed.name!r}"
    with _compat.explain_trace(lambda: label), _outside(label):
        return jitted(*(leaves[i] for i in where))


def _outside(label: str) -> AbstractContextManager[None]:
    """Add the remedy to JAX's error if a task or loop outside `multimesh.jit` gets arrays of several submeshes."""

    def meaning(error: Exception, line: str, says: str) -> UsageError | None:
        if is_partitioning() or "incompatible devices" not in str(error):
            return None
        return UsageError(
            f"{line}: {label} outside multimesh.jit has arguments on several submeshes; jit the whole function, as "
            f"multimesh.jit(jax.grad(f)) or jax.grad(multimesh.jit(f)). {says}"
        )

    return _compat.explain(meaning)


def mark_function(fn: Callable[..., Any], placed: Placement) -> Callable[..., Any]:
    """Return ``fn`` as the task ``placed``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with inside(placed), refuse_changes(lambda: f"task {placed.name!r}", (args, kwargs)):
            return fn(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if contexts.ignoring():
            return fn(*args, **kwargs)
        if not is_recording():
            with _outside(f"task {placed.name!r}"), in_a_mesh(f"task {placed.name!r}"):
                return fn(*args, **kwargs)
        mark = marks.TASKS.name(placed)
        if not is_partitioning():
            return note_task(mark, placed.name, call_under_mark(mark, run, args, kwargs))
        outer, types = jax.sharding.get_abstract_mesh(), placed.types or placed.mesh
        enter = functools.partial(_compat.enter_mesh, cut=placed.types is not None)
        args, kwargs = jax.tree.map(lambda x: enter(x, types), (args, kwargs))
        with inside(placed) if _compat.is_typed(types) else contextlib.nullcontext():
            results = note_task(mark, placed.name, call_under_mark(mark, run, args, kwargs))
        return jax.tree.map(lambda x: enter(x, outer), results)

    with contextlib.suppress(AttributeError, TypeError):
        functools.update_wrapper(call, fn)
    return call


def with_sharding_constraint(x: Any, spec: PartitionSpec) -> Any:
    """Constrain the layout of ``x`` by logical axes.

    Inside a task its ``logical_axes`` translate the names to axes of its submesh. Outside of tasks the task that reads
    the value translates them, and for a result the task that makes it. Outside of `multimesh.jit` this is the identity.

    Parameters
    ----------
    x
        An array or a pytree of arrays.
    spec
        Logical axes for each dimension.

    Raises
    ------
    UsageError
        If ``spec`` is no ``PartitionSpec``, has more entries than an array has dimensions, or names an axis that the
        task does not know.
    """
    if not isinstance(spec, PartitionSpec):
        raise UsageError(f"with_sharding_constraint: give a jax.sharding.PartitionSpec, got {type(spec).__name__}")

    def constrain(leaf: Any) -> Any:
        if len(spec) > np.ndim(leaf):
            raise UsageError(
                f"with_sharding_constraint: {spec} has {len(spec)} entries for an array of shape {np.shape(leaf)}"
            )
        task = current_task()
        if task is not None:
            return _compat.constrain(leaf, translate(spec, task))
        return jax.jit(_compat.set_name(lambda a: _compat.copy(a), marks.CONSTRAINTS.name((spec, np.ndim(leaf)))))(leaf)

    return x if contexts.ignoring() or not is_recording() else jax.tree.map(constrain, x)
