"""Types with layouts: the mesh that traced values share, and the same values on the mesh of another task.

A mesh with Explicit axes is in the type of each value (`jax.typeof`). Submeshes of one shape share an abstract mesh, so
one trace serves all of them. Where they differ, values outside of tasks lie on `common_mesh`, and a value changes its
type where it enters or leaves a task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from multimesh.core._compat.jaxprs import shape_of
from multimesh.core._compat.traces import AnyMesh, leave_mesh


def is_typed(mesh: AnyMesh | None) -> bool:
    """Return whether layouts on a mesh are in types: it has Explicit axes."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def partitions(spec: PartitionSpec) -> tuple[Any, ...]:
    """Return the entries of a spec. Iteration refuses a spec with ``reduced=`` or ``unreduced=``."""
    return spec.partitions if hasattr(spec, "partitions") else spec._partitions  # jax 0.10


def common_mesh(meshes: Iterable[AnyMesh]) -> AbstractMesh | None:
    """Return the mesh in the types of values that lie on any of these meshes; None if no axis is Explicit.

    It has each name, with the greatest common divisor of its sizes: what divides a dimension on one mesh divides it
    here. An axis is Explicit if it is on any mesh. The common mesh of equal meshes is their own.
    """
    views = list(dict.fromkeys(mesh.abstract_mesh for mesh in meshes if not mesh.empty))
    if not any(map(is_typed, views)):
        return None
    if len(views) == 1:
        return views[0]
    sizes: dict[str, int] = {}
    kinds: dict[str, AxisType] = {}
    for mesh in views:
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
            sizes[name] = math.gcd(sizes.get(name, 0), mesh.shape[name])
            kinds[name] = AxisType.Explicit if AxisType.Explicit in (kind, kinds.get(name)) else AxisType.Auto
    return views[0].update(axis_sizes=tuple(sizes.values()), axis_names=tuple(sizes), axis_types=tuple(kinds.values()))


def carry_spec(spec: PartitionSpec, shape: Sequence[int], mesh: AbstractMesh) -> PartitionSpec:
    """Return the part of a spec that types can say on a mesh: its Explicit axes, where they divide a dimension."""
    explicit = {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}

    def entry(rows: int, value: Any) -> Any:
        axes = value if isinstance(value, tuple) else () if value in (None, PartitionSpec.UNCONSTRAINED) else (value,)
        fits = rows % math.prod(mesh.shape[a] for a in axes if a in explicit) == 0
        fitting = tuple(a for a in axes if a in explicit)
        return None if not fitting or not fits else fitting if isinstance(value, tuple) else fitting[0]

    entries = (*partitions(spec), *(None for _ in shape))[: len(shape)]
    marks = {name: axes for name in ("reduced", "unreduced") if (axes := frozenset(getattr(spec, name, ())) & explicit)}
    return PartitionSpec(*map(entry, shape, entries), **marks)


def with_layout(struct: jax.ShapeDtypeStruct, spec: PartitionSpec | None, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    """Return the type of an argument to trace with, with what its type can say of its layout."""
    kind = None if struct.sharding is None else struct.sharding.memory_kind
    layout = carry_spec(PartitionSpec() if spec is None else spec, struct.shape, mesh)
    return struct.update(sharding=NamedSharding(mesh, layout, memory_kind=kind))


_retype_p = core.Primitive("multimesh_retype")
_retype_p.def_abstract_eval(lambda x, *, layout, old: x.update(sharding=layout))
mlir.register_lowering(_retype_p, lambda ctx, x, *, layout, old: [x])


def _transpose(cotangent: Any, _: Any, *, layout: NamedSharding, old: NamedSharding) -> list[Any]:
    """Transpose the change of a type: the cotangent of a ``reduced`` operand is unreduced, and the reverse."""
    marks = {"reduced": getattr(old.spec, "unreduced", ()), "unreduced": getattr(old.spec, "reduced", ())}
    swapped = {name: frozenset(axes) for name, axes in marks.items() if axes}
    spec = PartitionSpec(*partitions(old.spec), **swapped)
    return [_retype_to(ad.instantiate_zeros(cotangent), NamedSharding(old.mesh, spec))]


def _batch(args: Sequence[Any], dims: Sequence[int], *, layout: NamedSharding, old: NamedSharding) -> tuple[Any, int]:
    (x,), (d,) = args, dims
    rows = carry_spec(jax.typeof(x).sharding.spec, x.shape, layout.mesh)
    entries = list(partitions(layout.spec))
    entries.insert(d, partitions(rows)[d] if not layout.mesh.empty else None)
    return _retype_to(x, NamedSharding(layout.mesh, layout.spec.update(partitions=entries))), d


ad.deflinear2(_retype_p, _transpose)
batching.primitive_batchers[_retype_p] = _batch


def _retype_to(x: Any, layout: NamedSharding) -> Any:
    old = jax.typeof(x).sharding
    return x if old == layout else _retype_p.bind(x, layout=layout, old=old)


def enter_mesh(x: Any, mesh: AnyMesh, *, cut: bool = False) -> Any:
    """Return ``x`` itself, as a value on the mesh of a task: its type keeps what it can say there.

    If the task is a ``cut`` of a function that was traced on this mesh, a value inside of `jax.sharding.auto_axes`
    keeps the Auto axes of its type.
    """
    if not is_typed(mesh):
        return leave_mesh(x)
    if not isinstance(x, jax.Array):
        return x
    old, target = jax.typeof(x).sharding, mesh.abstract_mesh
    if old.mesh == target or (cut and old.mesh.shape == target.shape and not old.mesh.empty):
        return x
    return _retype_to(x, NamedSharding(target, carry_spec(old.spec, x.shape, target)))


def constrain(x: Any, spec: PartitionSpec) -> Any:
    """Constrain the layout of a traced value on the mesh in force: in its type along Explicit axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if not is_typed(mesh):
        return jax.lax.with_sharding_constraint(x, spec)
    entries = (*partitions(spec), *(None for _ in x.shape))[: x.ndim]
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def part(value: Any, kind: AxisType) -> Any:
        if value is None or value is PartitionSpec.UNCONSTRAINED:
            return value
        return tuple(a for a in (value if isinstance(value, tuple) else (value,)) if kinds[a] == kind) or None

    old = partitions(jax.typeof(x).sharding.spec)
    explicit = [
        o if e is PartitionSpec.UNCONSTRAINED else part(e, AxisType.Explicit) for e, o in zip(entries, old, strict=True)
    ]
    x = jax.sharding.reshard(x, PartitionSpec(*explicit))
    if AxisType.Auto not in mesh.axis_types:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(part(e, AxisType.Auto) for e in entries)))


def fit_types(args: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Return arguments with the layouts in the types of abstract values, as far as these have any."""
    return [
        _retype_to(x, aval.sharding) if is_typed(getattr(getattr(aval, "sharding", None), "mesh", None)) else x
        for x, aval in zip(args, avals, strict=True)
    ]


def fit_auto(args: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Return arguments that `leave_auto` took a mesh out of the type of with the types of abstract values again."""
    flags = [
        x.sharding.mesh.empty and not aval.sharding.mesh.empty
        for x, aval in zip(map(jax.typeof, args), avals, strict=True)
    ]
    return [_retype_to(x, aval.sharding) if flag else x for x, aval, flag in zip(args, avals, flags, strict=True)]


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Return an abstract value as an argument to trace with, with the layout in its type."""
    plain = shape_of(aval)
    layout = getattr(aval, "sharding", None)
    return plain if layout is None or not is_typed(layout.mesh) else with_layout(plain, layout.spec, layout.mesh)


def with_rows(one: jax.ShapeDtypeStruct, dim: int, size: int) -> jax.ShapeDtypeStruct:
    """Return the type of ``size`` rows of one type along a dimension, which no axis divides."""
    shape = (*one.shape[:dim], size, *one.shape[dim:])
    if one.sharding is None or one.sharding.mesh.empty:
        return one.update(shape=shape)
    entries = list((*partitions(one.sharding.spec), *(None for _ in one.shape))[: len(one.shape)])
    entries.insert(dim, None)
    return with_layout(one.update(shape=shape, sharding=None), PartitionSpec(*entries), one.sharding.mesh)


def fill(like: Any, value: Any, dtype: Any) -> jax.Array:
    """Return an array of one value with a shape and, on Explicit axes, with a layout in its type.

    Where that says that terms on several devices are not summed up, all of them are the value: it is zero.
    """
    layout = getattr(like, "sharding", None)
    if not isinstance(layout, NamedSharding) or not is_typed(layout.mesh):
        return jnp.full(like.shape, value, dtype)
    divided = NamedSharding(layout.mesh, PartitionSpec(*partitions(layout.spec)))
    array = jax.lax.full(like.shape, value, dtype, sharding=divided)
    return array if divided == layout else jax.sharding.reshard(array, layout)


def divide(x: Any, count: int) -> Any:
    """Return ``x`` divided by a number; for an unreduced ``x``, by one that is ``reduced`` along the same axes."""
    layout = jax.typeof(x).sharding
    terms = getattr(layout.spec, "unreduced", None)
    if not terms:
        return x / count
    number = jax.lax.full((), count, x.dtype)
    return x / jax.sharding.reshard(number, NamedSharding(layout.mesh, PartitionSpec(reduced=terms)))


def row_struct(x: Any) -> jax.ShapeDtypeStruct:
    """Return the type of a row of a stack."""
    layout = jax.typeof(x).sharding
    if not is_typed(layout.mesh):
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    spec = carry_spec(PartitionSpec(*partitions(layout.spec)[1:]), x.shape[1:], layout.mesh)
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=NamedSharding(layout.mesh, spec))
