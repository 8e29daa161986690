"""The compiled pipeline as data: kernels, slots and one global order of instructions."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.core.submesh import carry_over
from multimesh.plan import fingerprint
from multimesh.schedules.costs import UNIT_COSTS, Costs, covered

if TYPE_CHECKING:
    from multimesh.schedules import Choice
    from multimesh.timelines.timeline import Timeline


@dataclass(frozen=True)
class Transfer:
    """Arrays on their way from one submesh to another: ``ins`` there become ``outs`` here, one for one.

    Its ``id`` is its index in ``Plan.transfers``, the same in every process.
    """

    id: int
    source: int
    target: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """One step of a plan.

    Attributes
    ----------
    kind
        ``RUN`` a kernel, ``SEND`` and ``RECV`` the arrays of a transfer, ``FREE`` slots of the submesh after their last
        use. A transfer reads its slots at its SEND and fills others by its RECV.
    submesh
        Index into ``Plan.submeshes``: where it happens.
    task
        Names of the tasks in the kernel, joined by ``+``; for transfers that of the kernel that made the value.
    microbatch, phase, stage
        Of a pipeline's kernels (phase ``F``, ``B`` or ``W``); None elsewhere.
    kernel
        Index into ``Plan.kernels`` of a RUN.
    ins, outs
        Slots read and written; of a FREE, the slots it empties.
    peer
        The other submesh of a transfer.
    transfer
        Index into ``Plan.transfers`` of a SEND or RECV.
    """

    kind: str
    submesh: int
    task: str = ""
    microbatch: int | None = None
    phase: str | None = None
    stage: int | None = None
    kernel: int | None = None
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    peer: int | None = None
    transfer: int | None = None

    def __str__(self) -> str:
        label = f"{self.phase or ''}{'' if self.stage is None else self.stage}"
        cell = "" if self.microbatch is None else f" microbatch {self.microbatch}"
        peer = {"SEND": f" to {self.peer}", "RECV": f" from {self.peer}"}.get(self.kind, "")
        slots = f"{_slots(self.ins)}{' -> ' + _slots(self.outs) if self.outs else ''}"
        return f"{self.submesh}: {self.kind:4}{' ' + label if label else ''}{cell}{peer} {self.task} {slots}".rstrip()


def _slots(slots: tuple[int, ...]) -> str:
    return " ".join(f"s{s}" for s in slots[:6]) + (f" +{len(slots) - 6}" if len(slots) > 6 else "")


@dataclass(frozen=True, eq=False)
class Kernel:
    """One program of a submesh, compiled once and run for every microbatch.

    Arguments in order: ``sums`` accumulators (donated), the microbatch number if there are ``rows``, ``rows`` stacked
    arrays of which it takes that row, ``ins``. Results: accumulators, then ``outs``.
    """

    name: str
    submesh: int
    ops: tuple[ir.Op, ...] = ()
    sums: tuple[ir.Value, ...] = ()
    rows: tuple[ir.Value, ...] = ()
    ins: tuple[ir.Value, ...] = ()
    outs: tuple[ir.Value, ...] = ()
    make: str = "ops"  # "zeros" makes outs of zeros, "stack" stacks its inputs


@dataclass(frozen=True)
class Slot:
    """A place for an array on a submesh; ``nbytes`` is the size of the whole array."""

    submesh: int
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int


@dataclass(frozen=True, eq=False)
class Plan:
    """What a function does on which submesh, in which order. ``str(plan)`` fits the terminal.

    Attributes
    ----------
    submeshes
        Meshes, in the order of the pipeline.
    kernels
        Programs to compile.
    slots
        Where arrays live while the plan runs.
    instructions
        The global order. Every process runs its own part of it.
    transfers
        What SEND and RECV name.
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
        parameter. Of several candidates the layout is taken only when they agree; of none it is replicated.
    over
        Accumulator slot to the axes of its submesh along which its first dimension lies: a term for each device.
    schedules
        Names of the schedules of its microbatch loops.
    choices
        Of each loop with the schedule ``auto``: the tables that it chose from, and why; ``str`` of one is a table.
    settings
        What it was made under besides the function: options, and the specs of arguments and results.
    layouts
        For each slot; programs are compiled for them, whatever the order.
    """

    submeshes: tuple[Mesh, ...]
    kernels: tuple[Kernel, ...]
    slots: tuple[Slot, ...]
    instructions: tuple[Instruction, ...]
    transfers: tuple[Transfer, ...]
    inputs: tuple[tuple[int, int], ...]
    constants: tuple[tuple[Any, int], ...]
    outputs: tuple[tuple[str, Any], ...]
    donations: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    like: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    over: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    schedules: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    layouts: tuple[NamedSharding, ...] = ()

    def layout(self, slot: int, spec: PartitionSpec) -> NamedSharding:
        """Layout of a slot that takes a partition spec; an accumulator of terms has them in front."""
        where = self.slots[slot]
        mesh = self.submeshes[where.submesh]
        over = self.over.get(slot)
        if over is None:
            return carry_over(spec, where.shape, mesh)
        return NamedSharding(mesh, PartitionSpec(over, *carry_over(spec, where.shape[1:], mesh).spec))

    def peak_bytes(self) -> tuple[int, ...]:
        """Most bytes of intermediate values alive at once, per submesh: whole arrays, without arguments."""
        given = {slot for _, slot in (*self.inputs, *self.constants)}
        live = [0] * len(self.submeshes)
        peak = [0] * len(self.submeshes)
        alive: set[int] = set()
        for step in self.instructions:
            if step.kind == "FREE":
                live[step.submesh] -= sum(self.slots[slot].nbytes for slot in alive.intersection(step.ins))
                alive -= set(step.ins)
                continue
            made = set(step.outs) - alive - given
            alive |= made
            live[step.submesh] += sum(self.slots[slot].nbytes for slot in made)
            peak[step.submesh] = max(peak[step.submesh], live[step.submesh])
        return tuple(peak)

    def traffic(self) -> tuple[int, int]:
        """Number of arrays sent between submeshes in one run, and their bytes."""
        return sum(len(t.ins) for t in self.transfers), sum(map(self.bytes_of, self.transfers))

    def bytes_of(self, transfer: Transfer) -> int:
        """Bytes of the whole arrays of a transfer."""
        return sum(self.slots[slot].nbytes for slot in transfer.ins)

    @functools.cached_property
    def covers(self) -> Mapping[tuple[int, str], str]:
        """For each (stage, phase) with a program: the phases that it covers, such as ``FBW`` of a joined last stage."""
        return covered((s.stage, s.phase) for s in self.instructions if s.stage is not None and s.phase is not None)

    def shown(self, step: Instruction) -> str:
        """Phases of a RUN as pictures show them: F, B, W, FB for forward and backward in one program, or nothing."""
        joined = step.phase == "B" and self.covers[step.stage or 0, "B"].startswith("F")
        return "FB" if joined else step.phase or ""

    def estimate(self) -> Costs:
        """Estimate the costs of the programs: operations on each device, from shapes alone; for `forecast`.

        A matrix product of ``[m, k]`` and ``[k, n]`` counts ``2 m k n`` operations, any other operation one for each
        element of its results. ``schedule="auto"`` estimates stages the same way.
        """
        from multimesh.passes.cutting import estimate

        return estimate.of_plan(self)

    def forecast(self, costs: Costs | Mapping[Any, float] = UNIT_COSTS) -> Timeline:
        """Simulate the plan: when each program runs, what is idle, and what is alive.

        Submeshes run at the same time and transfers beside programs, as on accelerators; see `multimesh.plan.forecast`.

        Parameters
        ----------
        costs
            The ``costs`` of a profile, those of `estimate`, or a mapping in a unit of your choice: of phases ``F``,
            ``B``, ``W``, of tasks, of (stage, phase), of (task, phase), and of ``transfer``. See
            `multimesh.plan.costs.costs_of`.

        Returns
        -------
        Timeline
            Has ``makespan``, and for each submesh ``busy``, ``idle``, ``bubbles`` (idle shares) and ``peaks`` (bytes
            of whole arrays that are alive at once, without arguments). Prints as a table.

        Raises
        ------
        UsageError
            For costs that do not fit the plan.
        """
        from multimesh.plan import forecast

        return forecast.forecast(self, costs)

    def to_svg(self, path: str | Path, costs: Costs | Mapping[Any, float] = UNIT_COSTS) -> None:
        """Write a picture of `forecast`. ``profile.measured.to_svg`` draws a measured run."""
        self.forecast(costs).to_svg(path)

    def to_html(self, path: str | Path, costs: Costs | Mapping[Any, float] = UNIT_COSTS) -> None:
        """Write `forecast` as one HTML file: the picture of `to_svg`, which explains each box and line you point at.

        For each program: its task and microbatch, when it ran, how long its submesh waited for what, and the bytes that
        it received and sent. ``profile.measured.to_html`` writes a measured run.
        """
        self.forecast(costs).to_html(path)

    def to_perfetto(self, path: str | Path, costs: Costs | Mapping[Any, float] = UNIT_COSTS) -> None:
        """Write `forecast` as Chrome-trace JSON, which ``ui.perfetto.dev`` and ``chrome://tracing`` open."""
        self.forecast(costs).to_perfetto(path)

    def __str__(self) -> str:
        from multimesh.plan import listing

        return listing.text(self)

    def fingerprint(self) -> str:
        """SHA-256 of all that decides what the plan does, in hexadecimal: the same in every process that made the same.

        Of instructions, programs, slots, constants, specs, options, and the versions of JAX and MultiMesh. Hash seeds,
        addresses, names of files and what else a process traced do not count.
        """
        return fingerprint.digest(self)

    def to_json(self) -> str:
        """The plan as JSON: submeshes, kernels, slots, instructions."""
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
                    {k: v for k, v in vars(step).items() if v not in (None, (), "")} for step in self.instructions
                ],
                "transfers": [vars(transfer) for transfer in self.transfers],
                "inputs": self.inputs,
                "choices": [choice.to_json() for choice in self.choices],
                "outputs": [[kind, value if kind != "literal" else None] for kind, value in self.outputs],
            }
        )
