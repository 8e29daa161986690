"""The compiled pipeline as data: kernels, slots and one global order of instructions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.core.submesh import carry_over
from multimesh.schedules import Choice
from multimesh.schedules.costs import covered


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
        Of a pipeline's kernels (phase ``F``, ``B``, ``W``, or ``L`` for what is late); None elsewhere.
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
    """What is compiled for a submesh: compiled once, and run for every microbatch.

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
class PlanData:
    """Fields of a `Plan`, which says what they are, and what is counted from them."""

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
    derived: Mapping[tuple[int, int], PartitionSpec] = field(default_factory=dict)
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
        """For each (stage, phase) with a kernel: the phases that it covers, such as ``FBW`` of a joined last stage."""
        return covered((s.stage, s.phase) for s in self.instructions if s.stage is not None and s.phase is not None)

    def shown(self, step: Instruction) -> str:
        """Phases of a RUN as pictures show them: F, B, W, FB for forward and backward in one kernel, or nothing."""
        joined = step.phase == "B" and self.covers[step.stage or 0, "B"].startswith("F")
        return "FB" if joined else step.phase or ""
