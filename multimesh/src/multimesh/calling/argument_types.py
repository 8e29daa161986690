"""Layouts in the types of arguments and results: what a trace on Explicit axes starts from, and what it says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multimesh.core import _compat
from multimesh.core.specs import strip
from multimesh.errors import UsageError
from multimesh.stacked.row_blocks import layout_of_block


@dataclass(frozen=True)
class Types:
    """The mesh in the types of values outside of tasks, and the spec of each argument leaf; None: replicated."""

    mesh: AbstractMesh
    specs: tuple[PartitionSpec | None, ...]

    def structs(self, plain: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """Return the types of argument leaves to trace with."""
        return [_compat.with_layout(x, spec, self.mesh) for x, spec in zip(plain, self.specs, strict=True)]


OF_ARGUMENTS = "of arguments"


def types_of(layouts: Sequence[Any], mesh: AbstractMesh | str | None, more: Iterable[Mesh]) -> Types | None:
    """Return the types of leaves with these shardings or specs (None: neither); None if no axis is Explicit.

    The mesh in them is ``mesh``, or of `OF_ARGUMENTS` the common one of the leaves and of ``more``.
    """
    if isinstance(mesh, str):
        mesh = _compat.common_mesh([*(s.mesh for s in layouts if isinstance(s, NamedSharding)), *more])
    if mesh is None:
        return None
    specs = (s.spec if isinstance(s, NamedSharding) else s if isinstance(s, PartitionSpec) else None for s in layouts)
    return Types(mesh, tuple(None if s is None else s.update(partitions=_compat.partitions(strip(s))) for s in specs))


def widen(types: Types | None, count: int, task_meshes: Iterable[Mesh]) -> Types | None:
    """Return argument types on a mesh that has the axes of all arguments and of ``task_meshes``."""
    argument_meshes = () if types is None else (types.mesh,)
    mesh = _compat.common_mesh([*argument_meshes, *task_meshes])
    if mesh is None or (types is not None and mesh == types.mesh):
        return types
    return Types(mesh, (None,) * count) if types is None else replace(types, mesh=mesh)


def layout_of(leaf: Any) -> Any:
    """Return the sharding of a leaf, or the layout in the type of a traced one; None if it has none.

    Of a stack it is the layout of a block, which the types of a submesh can say.
    """
    sharding = jax.typeof(leaf).sharding if _compat.is_tracer(leaf) else getattr(leaf, "sharding", None)
    return layout_of_block(sharding) if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def result_specs(avals: Sequence[Any]) -> Mapping[int, PartitionSpec]:
    """Return the layouts that types of results say, by number."""
    typed = ((i, getattr(aval, "sharding", None)) for i, aval in enumerate(avals))
    return {i: s.spec for i, s in typed if s is not None and _compat.is_typed(s.mesh)}


def refuse_terms(name: str, layouts: Sequence[Any]) -> None:
    """Refuse an argument whose terms, on several devices, are not summed up."""
    for layout in layouts:
        if isinstance(layout, NamedSharding) and getattr(layout.spec, "unreduced", None):
            raise UsageError(
                f"{name}: an argument is unreduced ({layout.spec}): each device has a term of it; sum it up before the "
                "call: jax.sharding.reshard(x, P(...))"
            )
