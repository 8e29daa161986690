"""Submeshes: the devices of a task, and the axes that its logical axes stand for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from multimesh.core import checks
from multimesh.core.stable import LOCAL
from multimesh.errors import UsageError

AxisMap = Mapping[str, "str | tuple[str, ...] | None"] | Sequence[tuple[str, "str | tuple[str, ...] | None"]]


@dataclass(frozen=True)
class Placement:
    """A named submesh, and the axes of that submesh that logical axes stand for.

    Of a stage that `multimesh.pipeline` made, ``cuts`` has all stages, and ``types`` is the mesh in types of values if
    not ``mesh``. In loops each ``part`` of it has its own kernels, which equal parts of other stages share.
    """

    name: str
    mesh: Mesh
    logical_axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    cuts: Hashable = field(default=None, metadata=LOCAL)
    types: AbstractMesh | None = field(default=None, metadata=LOCAL)
    part: int = 0

    def __repr__(self) -> str:
        return f"Placement({self.name!r}, {describe(self.mesh)})"


def describe(mesh: Mesh) -> str:
    """Return a mesh in a few words: its axes with their sizes, and its device ids."""
    axes = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    ids = [device.id for device in mesh.devices.flat]
    span = (
        f"{ids[0]}..{ids[-1]}" if len(ids) > 2 and ids == list(range(ids[0], ids[-1] + 1)) else ",".join(map(str, ids))
    )
    return f"[{axes} | devices {span}]"


def match_mesh(mesh: Mesh, meshes: Iterable[Mesh]) -> Mesh | None:
    """Return the known mesh of the same devices, the mesh itself if it shares no device with any, or else None."""
    devices = set(mesh.devices.flat)
    shared = [other for other in meshes if not devices.isdisjoint(other.devices.flat)]
    return next((other for other in shared if devices == set(other.devices.flat)), None) if shared else mesh


def make_task(
    name: str,
    *,
    mesh: Mesh | None = None,
    devices: Any = None,
    device_axes: Sequence[str] | None = None,
    logical_axes: AxisMap | None = None,
) -> Placement:
    """Check the arguments of ``task`` or ``register_task``, and return the task that they describe."""
    checks.string(f"task {name!r}: name=", name)
    if (mesh is None) == (devices is None):
        raise UsageError(f"task {name!r}: give either mesh= or devices= (with device_axes=), not both or neither")
    if mesh is None:
        mesh = _mesh_of(name, devices, device_axes)
    elif device_axes is not None:
        raise UsageError(f"task {name!r}: device_axes= names the axes of devices=; a mesh has its own names")
    elif not isinstance(mesh, Mesh):
        raise UsageError(f"task {name!r}: mesh= must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    elif AxisType.Manual in mesh.axis_types:
        manual = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual]
        raise UsageError(
            f"task {name!r}: axis {manual[0]!r} of mesh= is Manual, which axes are only inside jax.shard_map; give a "
            "mesh of Auto or Explicit axes, and call jax.shard_map inside the task"
        )
    return Placement(
        name, mesh, _axis_items(name, mesh, logical_axes, named=device_axes is not None or devices is None)
    )


def _mesh_of(name: str, devices: Any, device_axes: Sequence[str] | None) -> Mesh:
    try:
        grid = np.asarray(devices, dtype=object)
    except ValueError as error:
        raise UsageError(f"task {name!r}: devices= must be an array of jax devices: {error}") from None
    if grid.size == 0 or not all(isinstance(d, jax.Device) for d in grid.flat):
        raise UsageError(f"task {name!r}: devices= must be a non-empty array of jax devices")
    if len(set(grid.flat)) != grid.size:
        raise UsageError(f"task {name!r}: devices= names a device twice")
    if device_axes is None:
        device_axes = [f"axis{i}" for i in range(grid.ndim)]
    device_axes = checks.names(f"task {name!r}: device_axes=", device_axes)
    if len(device_axes) != grid.ndim:
        raise UsageError(
            f"task {name!r}: devices= has {grid.ndim} dimensions but device_axes={tuple(device_axes)} names "
            f"{len(device_axes)}; name each dimension once"
        )
    if len(set(device_axes)) != len(device_axes):
        raise UsageError(f"task {name!r}: device_axes={tuple(device_axes)} names an axis twice")
    return Mesh(grid, tuple(device_axes))


def _axis_items(
    name: str, mesh: Mesh, logical_axes: AxisMap | None, *, named: bool
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    pairs = () if logical_axes is None else checks.pairs(f"task {name!r}: logical_axes=", logical_axes)
    if not pairs:
        return ()
    if not named:
        raise UsageError(f"task {name!r}: logical_axes= needs mesh= or device_axes=, so that there are axes to map to")
    items = []
    label = f"task {name!r}: logical_axes=: a logical axis"
    axes_of = {checks.string(label, logical): axes for logical, axes in pairs}
    if len(axes_of) < len(pairs):
        raise UsageError(f"task {name!r}: logical_axes= names an axis twice; map it to a tuple of axes instead")
    for logical, axes in axes_of.items():
        entries = () if axes is None else (axes,) if isinstance(axes, str) else axes
        physical = checks.names(f"task {name!r}: what logical_axes= maps {logical!r} to", entries)
        unknown = [axis for axis in physical if axis not in mesh.axis_names]
        if unknown:
            raise UsageError(
                f"task {name!r}: logical axis {logical!r} maps to {unknown[0]!r}, but the submesh has axes "
                f"{mesh.axis_names}"
            )
        items.append((logical, physical))
    return tuple(sorted(items))
