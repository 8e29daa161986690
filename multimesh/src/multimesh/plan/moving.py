"""The same plan on other devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from multimesh import ir
from multimesh.core import _compat
from multimesh.errors import UsageError
from multimesh.plan.plan import Plan


def move_plan(plan: Plan, devices: Sequence[jax.Device]) -> Plan:
    """Return the plan on other devices, in the order of their ids. Raises ``UsageError`` if there are too few."""
    old = plan.devices
    if len(devices) < len(old):
        raise UsageError(f"on: the plan has {len(old)} devices, and got only {len(devices)}")
    place = dict(zip(old, devices, strict=False))

    @functools.cache
    def mesh(of: Mesh) -> Mesh:
        moved = np.array([place.get(device, device) for device in of.devices.flat]).reshape(of.devices.shape)
        return Mesh(moved, of.axis_names, axis_types=of.axis_types)

    @functools.cache
    def op(of: ir.Op) -> ir.Op:
        return replace(of, mesh=of.mesh and mesh(of.mesh), params=_compat.replace_meshes(of.params, mesh))

    return replace(
        plan,
        kernels=tuple(replace(kernel, ops=tuple(map(op, kernel.ops))) for kernel in plan.kernels),
        submeshes=tuple(map(mesh, plan.submeshes)),
        layouts=tuple(NamedSharding(mesh(x.mesh), x.spec, memory_kind=x.memory_kind) for x in plan.layouts),
    )
