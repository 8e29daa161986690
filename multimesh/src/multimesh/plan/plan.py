"""A plan: its data, how to simulate, draw, print and compare it, and the same plan on other devices."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from multimesh import ir
from multimesh.core import _compat
from multimesh.errors import UsageError
from multimesh.plan.instructions import PlanData, record
from multimesh.schedules.costs import UNIT_COSTS

if TYPE_CHECKING:
    from multimesh_planner import Device

    from multimesh.observe.timelines.timeline import Timeline
    from multimesh.plan.timing import Costs


@dataclass(frozen=True, eq=False)
class Plan(PlanData):
    """The kernels of a function, and the order in which submeshes run them. ``str(plan)`` fits the terminal.

    Attributes
    ----------
    submeshes
        Meshes, in the order of the pipeline.
    kernels
        Operations to compile, each for one submesh.
    slots
        Where arrays live while the plan runs.
    instructions
        The global order. Every process runs its own part of it.
    transfers
        Arrays that go from one submesh to another; SEND and RECV name them.
    inputs
        (argument leaf, slot): an argument that several submeshes read has a slot on each.
    constants
        (array, slot): captured arrays and microbatch numbers, placed once.
    outputs
        For each result: a slot of its own, an argument leaf that no operation reads, or a literal.
    donations
        Kernel to the positions of its arguments whose buffers it may reuse.
    like
        Slot to the argument leaves whose layout it takes: a new parameter that of the old one, a gradient that of its
        parameter. Where several leaves disagree, the layout follows from the data; without leaves it is replicated.
    over
        Accumulator slot to the axes of its submesh along which its first dimension lies: a term for each device.
    schedules
        Names of the schedules of its microbatch loops.
    choices
        The choice of each loop with the schedule ``auto``, with its reasons; ``str`` of one is a table.
    settings
        Options, and the specs of arguments and results, under which the plan was made.
    derived
        (argument leaf, submesh) to the spec that constraints give it there, until the pass ``layouts`` has used it.
    layouts
        Layout of each slot. Kernels are compiled for these, so that none waits for another.
    stacks
        Arguments and results that are one array over several submeshes. In ``inputs``, ``outputs``, ``like`` and
        ``derived`` each of their blocks counts as a leaf.
    """

    def estimate(self) -> Costs:
        """Estimate the costs of the kernels for `simulate`: operations on each device, from shapes alone.

        A matrix product of ``[m, k]`` and ``[k, n]`` counts ``2 m k n`` operations, any other operation one for each
        element of its results. ``schedule="auto"`` estimates stages the same way.
        """
        from multimesh.plan.timing import estimate

        return estimate(self)

    def simulate(self, costs: str | Device | Costs | Mapping[Any, float] = UNIT_COSTS) -> Timeline:
        """Simulate the plan: when each kernel runs, when submeshes are idle, and how many bytes are alive.

        Submeshes run at the same time and transfers beside kernels, as on accelerators; see `multimesh.plan.timing`.

        Parameters
        ----------
        costs
            A device such as ``"h100"``, for seconds from the shapes of every kernel; the ``costs`` of a profile; those
            of `estimate`; or a mapping in a unit of your choice: of phases ``F``, ``B``, ``W``, of tasks, of (stage,
            phase), of (task, phase), and of ``transfer``. See `multimesh.plan.timing.costs_of`.

        Returns
        -------
        Timeline
            Has ``makespan``, and for each submesh ``busy``, ``idle``, ``bubbles`` (idle shares) and ``peaks`` (most
            bytes of whole arrays alive at once, without arguments). Prints as a table.

        Raises
        ------
        UsageError
            For costs that do not fit the plan.
        """
        from multimesh.plan import timing

        return timing.simulate(self, costs)

    def to_svg(self, path: str | Path, costs: str | Device | Costs | Mapping[Any, float] = UNIT_COSTS) -> None:
        """Write a picture of `simulate`. ``profile.measured.to_svg`` draws a measured run."""
        self.simulate(costs).to_svg(path)

    def to_html(self, path: str | Path, costs: str | Device | Costs | Mapping[Any, float] = UNIT_COSTS) -> None:
        """Write `simulate` as one HTML file: the picture of `to_svg`, which names each box and line you point at.

        ``profile.measured.to_html`` writes a measured run.
        """
        self.simulate(costs).to_html(path)

    def to_perfetto(self, path: str | Path, costs: str | Device | Costs | Mapping[Any, float] = UNIT_COSTS) -> None:
        """Write `simulate` as Chrome-trace JSON, which ``ui.perfetto.dev`` and ``chrome://tracing`` open."""
        self.simulate(costs).to_perfetto(path)

    def __str__(self) -> str:
        from multimesh.plan import listing

        return listing.text(self)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the plan, in hexadecimal: the same in every process that made the same plan.

        It covers instructions, kernels, slots, constants, specs, options, and the versions of JAX and MultiMesh. Hash
        seeds, addresses, names of files and other traces of the process do not count.
        """
        from multimesh.plan.fingerprint import digest

        return digest(self)

    def to_json(self) -> str:
        """Return the plan as JSON: submeshes, kernels, slots, instructions."""
        return json.dumps(
            {
                "submeshes": [
                    {"axes": dict(m.shape), "devices": [d.id for d in m.devices.flat]} for m in self.submeshes
                ],
                "kernels": [{"name": k.name, "submesh": k.submesh, "operations": len(k.ops)} for k in self.kernels],
                "slots": [
                    {"submesh": s.submesh, "shape": s.shape, "dtype": str(s.dtype), "bytes": s.nbytes}
                    for s in self.slots
                ],
                "instructions": [
                    {k: v for k, v in record(instruction).items() if v not in (None, (), "")}
                    for instruction in self.instructions
                ],
                "transfers": [vars(transfer) for transfer in self.transfers],
                "inputs": self.inputs,
                "choices": [choice.to_json() for choice in self.choices],
                "outputs": [[kind, value if kind != "literal" else None] for kind, value in self.outputs],
            }
        )


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
