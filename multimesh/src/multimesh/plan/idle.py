"""Axes of submeshes that shard nothing: the devices along them all do the same work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from multimesh.core import _compat
from multimesh.core.specs import axis_names
from multimesh.plan.instructions import PlanData

_WORK = ("dot_general", "conv_general_dilated", "ragged_dot_general", "pallas_call")
_ALL = ("shard_map", "custom_partitioning")  # operations that use axes in ways of their own


def idle_axes(plan: PlanData) -> Iterator[tuple[int, str, Any]]:
    """Yield (submesh, axis, operation) for each axis of several devices along which a submesh shards nothing.

    The operation is the first matrix product or convolution of the submesh; without one it has no work to share.
    """
    used: list[set[str]] = [set() for _ in plan.submeshes]
    for slot, layout in zip(plan.slots, plan.layouts, strict=True):
        used[slot.submesh].update(axis_names(layout.spec))
    first: dict[int, Any] = {}
    for kernel in plan.kernels:
        for op in kernel.ops:
            used[kernel.submesh].update(_axes(op.prim, op.params, plan.submeshes[kernel.submesh].axis_names))
            if kernel.submesh not in first and _works(op.prim, op.params):
                first[kernel.submesh] = op
    for submesh, op in first.items():
        for axis, size in plan.submeshes[submesh].shape.items():
            if size > 1 and axis not in used[submesh]:
                yield submesh, axis, op


def _works(prim: Any, params: dict[str, Any]) -> bool:
    inner = (eqn for jaxpr in _compat.subjaxprs(params) for eqn in jaxpr.eqns)
    return prim.name in _WORK or any(_works(eqn.primitive, eqn.params) for eqn in inner)


def _axes(prim: Any, params: dict[str, Any], all_axes: Iterable[str]) -> Iterator[str]:
    """Yield the axes that an operation names, or one inside of it."""
    if prim.name in _ALL:
        yield from all_axes
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, NamedSharding):
                yield from axis_names(each.spec)
            elif isinstance(each, PartitionSpec):
                yield from axis_names(each)
    for jaxpr in _compat.subjaxprs(params):
        for eqn in jaxpr.eqns:
            yield from _axes(eqn.primitive, eqn.params, all_axes)
