"""The mesh and the `PartitionSpec` of an array: found, checked and applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multimesh.core import _compat, checks
from multimesh.core.submesh import Placement, describe
from multimesh.errors import UsageError

AnyMesh: TypeAlias = Mesh | AbstractMesh
Axes: TypeAlias = tuple[str, ...]


def as_array(x: Any) -> jax.Array:
    """Return ``x`` itself, or a NumPy array as a JAX array."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def axes_of(entry: Any) -> Axes:
    """Return the mesh axes of one entry of a spec: ``None``, a name, or a tuple of names."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def entry(axes: Axes) -> Any:
    """Return the entry of a spec for these axes; the inverse of `axes_of`."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def axis_names(spec: P) -> Axes:
    """Return the mesh axes that a spec names."""
    return tuple(axis for entry in _compat.partitions(spec) for axis in axes_of(entry))


def decisions(spec: P, rank: int) -> Iterator[tuple[int, Axes]]:
    """Yield the dimensions that a spec decides, with their axes. Those that it leaves out are replicated."""
    entries = (*_compat.partitions(spec), *(None for _ in range(rank)))[:rank]
    return ((d, axes_of(entry)) for d, entry in enumerate(entries) if entry is not P.UNCONSTRAINED)


def size(mesh: AnyMesh, axes: Axes) -> int:
    """Return the number of devices along these axes. Axes that the mesh lacks count as one device."""
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def permute(x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Apply `lax.ppermute` with devices numbered as `lax.axis_index` does for ``axes``, in whichever order they are.

    `lax.ppermute` takes them in the mesh's order only. Before jax 0.12 it numbers by that order, whatever it is given.
    """
    if len(axes) > 1:
        ordered = tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes)
        numbers = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(axis) for axis in ordered])
        numbers = numbers.transpose([ordered.index(axis) for axis in axes]).reshape(-1)
        axes, pairs = ordered, [(int(numbers[source]), int(numbers[target])) for source, target in pairs]
    return lax.ppermute(x, axes, pairs)


def sharding_of(x: Any) -> NamedSharding | None:
    """Return the known sharding of an array, or None.

    A concrete array carries all of it, a traced one only its Explicit axes.
    """
    x = _compat.primal(x)
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return None if isinstance(x, jax.core.Tracer) and not axis_names(sharding.spec) else sharding


def find(label: str, x: Any, mesh: AnyMesh | None, spec: P | None) -> tuple[AnyMesh, tuple[Axes, ...]]:
    """Return the mesh of ``x``, and the mesh axes of each of its dimensions, as given or as the array carries them.

    It is an error if neither is given or carried, or if the given ones do not fit the array.
    """
    if spec is not None and not isinstance(spec, P):
        raise UsageError(f"{label}: spec must be a PartitionSpec, got {spec!r}")
    layout = sharding_of(x)
    if spec is None and layout is not None and (mesh is None or set(mesh.axis_names) >= set(axis_names(layout.spec))):
        spec = layout.spec
    if mesh is None:
        ambient = jax.sharding.get_abstract_mesh()
        mesh = layout.mesh if layout is not None else None if ambient.empty else ambient
    if mesh is None or spec is None or not axis_names(spec):
        raise UsageError(
            f"{label}: found no sharding of the array of shape {x.shape}. Shard it with jax.device_put(x, "
            "NamedSharding(mesh, spec)), or pass mesh= and spec=; under jax.jit an array only carries its Explicit axes"
        )
    if len(spec) > x.ndim:
        raise UsageError(f"{label}: {spec} has {len(spec)} entries, and the array only {x.ndim} dimensions")
    entries = [axes_of(e) for e in spec] + [()] * (x.ndim - len(spec))
    flat = [a for axes in entries for a in axes]
    for a in flat:
        if a not in mesh.axis_names:
            raise UsageError(
                f"{label}: {spec} names the axis {a!r}; the mesh has {', '.join(map(repr, mesh.axis_names))}"
            )
        if flat.count(a) > 1:
            raise UsageError(f"{label}: {spec} names the axis {a!r} twice; an axis can shard one dimension only")
    if isinstance(mesh, Mesh) and isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
        others = x.sharding.device_set - set(mesh.devices.flat)
        if others:
            raise UsageError(
                f"{label}: the array is on {len(others)} devices that the mesh lacks (such as {min(others, key=str)}); "
                "pass the array's own mesh, or move it first: jax.device_put(x, NamedSharding(mesh, spec))"
            )
    return mesh, tuple(entries)


def lay_out(x: Any, mesh: AnyMesh, *axes: Axes) -> Any:
    """Shard the leading dimensions of ``x`` over these axes; its gradient gets the same layout."""
    sharding = NamedSharding(mesh, P(*map(entry, axes)))
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.sharding == sharding:
        return x
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def check_dtype(label: str, x: Any) -> None:
    """Refuse dtypes other than float32, float64, complex64 and complex128."""
    if jnp.dtype(x.dtype) not in (jnp.float32, jnp.float64, jnp.complex64, jnp.complex128):
        raise UsageError(
            f"{label}: works in float32, float64, complex64 or complex128, got {x.dtype}; convert it with .astype"
        )


def check_not_empty(label: str, x: Any) -> None:
    """Refuse a matrix without rows or columns."""
    if 0 in x.shape:
        raise UsageError(f"{label}: the matrix of shape {x.shape} is empty")


def check_devices(label: str, a: Any, b: Any) -> None:
    """Refuse a right-hand side that is committed to other devices than the matrix, or in another order."""
    sets = [
        list(x.sharding.mesh.devices.flat) if isinstance(x.sharding, NamedSharding) else list(x.sharding.device_set)
        for x in (a, b)
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed
    ]
    if len(sets) == 2 and sets[0] != sets[1]:
        raise UsageError(
            f"{label}: the matrix is on {len(sets[0])} devices, and the right-hand side on {len(sets[1])}, not the "
            "same in the same order; move it: jax.device_put(b, NamedSharding(mesh, P()))"
        )


def strip(spec: P) -> P:
    """Return the spec without trailing entries of None."""
    entries = list(_compat.partitions(spec))
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def check_fits(label: str, shape: Sequence[int], spec: P, mesh: Mesh) -> None:
    """Refuse a layout that an array can't have on a submesh, as ``jax.jit`` does; axes of other submeshes do not count.

    A spec has no more entries than the array has dimensions, and its axes divide each of them.
    """
    if len(spec) > len(shape):
        raise UsageError(
            f"{label} has shape {tuple(shape)}, fewer dimensions than {spec} has entries; drop some of them"
        )
    for dim, (rows, axes) in enumerate(zip(shape, map(axes_of, spec), strict=False)):
        ways = size(mesh, axes)
        if rows % ways:
            raise UsageError(
                f"{label} has {rows} rows in dimension {dim}, and {spec} divides them among {ways} devices of "
                f"{describe(mesh)}; give a multiple of {ways} rows, or None for this dimension"
            )


def translate(spec: P, task: Placement) -> P:
    """Replace the logical names in a spec by axes of the task's submesh.

    A name that is no logical axis of the task must be an axis of its submesh.
    """
    table = dict(task.logical_axes)

    def physical(name: str) -> Axes:
        checks.string(f"task {task.name!r}: {spec}: an axis", name)
        if name in table:
            return table[name]
        if name in task.mesh.axis_names:
            return (name,)
        raise UsageError(
            f"task {task.name!r}: {spec} names {name!r}, which is neither one of its logical axes {tuple(table)} nor "
            f"an axis of its submesh {task.mesh.axis_names}; add it to logical_axes="
        )

    free = P.UNCONSTRAINED
    return P(*(e if e is free else entry(tuple(axis for name in axes_of(e) for axis in physical(name))) for e in spec))


def carry_over(spec: P, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Return the sharding on ``mesh`` of an array that has ``spec`` elsewhere.

    A dimension keeps its axes if ``mesh`` has them and they divide it. Otherwise it is replicated, unless it is
    unconstrained.
    """
    fits = [
        mesh.shape.keys() >= set(axes) and rows % size(mesh, axes) == 0
        for rows, axes in zip(shape, map(axes_of, _compat.partitions(spec)), strict=False)
    ]
    entries = (e if fit else None for e, fit in zip(_compat.partitions(spec), fits, strict=False))
    return NamedSharding(mesh, strip(P(*entries)))


def spread(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the entry of a prefix for each leaf of a tree, without building any container of the user.

    Raises ``ValueError`` if the prefix does not fit the tree.
    """
    entries, above = jax.tree.flatten(prefix, is_leaf=is_leaf)
    parts = above.flatten_up_to(tree)
    return [entry for entry, part in zip(entries, parts, strict=True) for _ in jax.tree.leaves(part)]
