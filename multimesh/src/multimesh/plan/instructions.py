"""The data of a plan: kernels, slots, transfers, and instructions in one global order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import axes_of, carry_over, entry
from multimesh.schedules.costs import map_covers
from multimesh.schedules.table import Cell
from multimesh.stacked.row_blocks import Stacks
from multimesh.stages.stage_cuts import Cuts

if TYPE_CHECKING:
    from multimesh.schedules.choose import Choice


@dataclass(frozen=True)
class Transfer:
    """Arrays on their way from one submesh to another: slots ``ins`` there become slots ``outs`` here, one for one.

    Its ``id`` is its index in ``Plan.transfers``, the same in every process.
    """

    id: int
    source: int
    target: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]


class Instruction:
    """An entry of a plan: a `Run`, `Send`, `Recv` or `Free`.

    Attributes that only other kinds have are None, such as the ``kernel`` of a SEND.

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
        Of a pipeline's kernels (phase ``F``, ``B``, ``W``, or ``L`` for what is late) and the microbatch of their
        transfers; None elsewhere.
    kernel
        Index into ``Plan.kernels`` of a RUN.
    ins, outs
        Slots read and written; of a FREE, the slots it empties.
    peer
        The other submesh of a transfer.
    transfer
        Index into ``Plan.transfers`` of a SEND or RECV.
    """

    kind: ClassVar[str]
    submesh: int
    task: str = ""
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()

    if not TYPE_CHECKING:  # the library asks for the type first; a user may filter by an attribute
        kernel = peer = transfer = cell = None
        microbatch = property(lambda self: getattr(self.cell, "microbatch", None))
        phase = property(lambda self: getattr(self.cell, "phase", None))
        stage = property(lambda self: getattr(self.cell, "stage", None))

    def __str__(self) -> str:
        about = ""
        match self:
            case Run(cell=Cell(phase, stage, microbatch)):
                about = f" {phase}{stage} microbatch {microbatch}"
            case Send() | Recv():
                about = "" if self.microbatch is None else f" microbatch {self.microbatch}"
                about += f" {'to' if isinstance(self, Send) else 'from'} {self.peer}"
        slots = f"{_slots(self.ins)}{' -> ' + _slots(self.outs) if self.outs else ''}"
        return f"{self.submesh}: {self.kind:4}{about} {self.task} {slots}".rstrip()


@dataclass(frozen=True)
class Run(Instruction):
    """Run a kernel; ``cell`` is its place in the table of a pipeline."""

    kind = "RUN"
    submesh: int
    kernel: int
    task: str = ""
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    cell: Cell | None = None


@dataclass(frozen=True)
class Send(Instruction):
    """Send the arrays of a transfer to the submesh ``peer``."""

    kind = "SEND"
    submesh: int
    peer: int
    transfer: int
    ins: tuple[int, ...]
    task: str = ""
    microbatch: int | None = None


@dataclass(frozen=True)
class Recv(Instruction):
    """Receive the arrays of a transfer from the submesh ``peer``."""

    kind = "RECV"
    submesh: int
    peer: int
    transfer: int
    outs: tuple[int, ...]
    task: str = ""
    microbatch: int | None = None


@dataclass(frozen=True)
class Free(Instruction):
    """Empty slots."""

    kind = "FREE"
    submesh: int
    ins: tuple[int, ...]


_NAMES = ("kind", "submesh", "task", "microbatch", "phase", "stage", "kernel", "ins", "outs", "peer", "transfer")


def record(instruction: Instruction) -> dict[str, Any]:
    """Return all attributes of an instruction by name, None or empty where its kind has none."""
    return {name: getattr(instruction, name) for name in _NAMES}


def _slots(slots: tuple[int, ...]) -> str:
    return " ".join(f"s{s}" for s in slots[:6]) + (f" +{len(slots) - 6}" if len(slots) > 6 else "")


@dataclass(frozen=True, eq=False)
class Kernel:
    """Operations of a submesh, compiled once and run for every microbatch.

    It takes the accumulators of ``sums`` (donated), then the microbatch number and the stacked arrays of ``rows``, if
    any, then ``ins``. It reads the row of its microbatch. It returns the accumulators, then ``outs``.
    """

    name: str
    submesh: int
    ops: tuple[ir.Op, ...] = ()
    sums: tuple[ir.Value, ...] = ()
    rows: tuple[ir.Value, ...] = ()
    ins: tuple[ir.Value, ...] = ()
    outs: tuple[ir.Value, ...] = ()
    make: str = "ops"  # or "zeros": outs of zeros, or "stack": its inputs stacked


@dataclass(frozen=True)
class Slot:
    """A place for an array on a submesh; ``nbytes`` is the size of the whole array.

    ``memory`` is the kind of memory, or None for that of the device.
    """

    submesh: int
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    memory: str | None = None


@dataclass(frozen=True, eq=False)
class PlanData:
    """The fields of a `Plan`, which explains them, and figures that follow from them."""

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
    stacks: Stacks = field(default_factory=Stacks)

    def layout(self, slot: int, spec: PartitionSpec) -> NamedSharding:
        """Return the layout of a slot with a partition spec. The terms of an accumulator are its first dimension.

        Their axes cannot lay out another one: where the spec has them, each device holds a whole term.
        """
        where = self.slots[slot]
        mesh = self.submeshes[where.submesh]
        over = self.over.get(slot)
        # An array of a slot has no open dimension.
        spec = PartitionSpec(*(entry(axes_of(names)) for names in _compat.partitions(spec)))
        if over is None:
            return carry_over(spec, where.shape, mesh)
        entries = (entry(tuple(axis for axis in axes_of(names) if axis not in over)) for names in spec)
        return NamedSharding(
            mesh, PartitionSpec(over, *carry_over(PartitionSpec(*entries), where.shape[1:], mesh).spec)
        )

    def bytes_on(self, submesh: int, slots: Iterable[int]) -> int:
        """Return the bytes of the slots among some that are in the memory of a submesh's devices."""
        chosen = (self.slots[slot] for slot in slots)
        return sum(slot.nbytes for slot in chosen if slot.submesh == submesh and slot.memory is None)

    @property
    def devices(self) -> list[jax.Device]:
        """Its devices, in the order of their ids."""
        return sorted({device for mesh in self.submeshes for device in mesh.devices.flat}, key=lambda d: d.id)

    @functools.cached_property
    def cuts(self) -> tuple[Cuts, ...]:
        """The stages of each function that `multimesh.pipeline` has cut."""
        tasks = dict.fromkeys(op.task for kernel in self.kernels for op in kernel.ops if op.task is not None)
        return tuple(dict.fromkeys(task.cuts for task in tasks if isinstance(task.cuts, Cuts)))

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """Every RUN, in order."""
        return tuple(i for i in self.instructions if isinstance(i, Run))

    @functools.cached_property
    def first_runs(self) -> Mapping[int, Run]:
        """The first RUN of each kernel, in order."""
        runs: dict[int, Run] = {}
        for run in self.runs:
            runs.setdefault(run.kernel, run)
        return runs

    @functools.cached_property
    def initial_slots(self) -> frozenset[int]:
        """The slots that are full before the first instruction: arguments and constants."""
        return frozenset(slot for _, slot in (*self.inputs, *self.constants))

    def donated_by(self, run: Run) -> list[int]:
        """Return the slots whose buffers a RUN may reuse."""
        return [run.ins[i] for i in self.donations.get(run.kernel, ())]

    def liveness(self) -> Iterator[tuple[Instruction, set[int], set[int]]]:
        """Yield each instruction with the slots that it fills and those that it empties.

        A kernel that adds to an accumulator fills nothing. Arguments and constants are never filled or emptied.
        """
        full: set[int] = set()
        for instruction in self.instructions:
            filled = set(instruction.outs) - full - self.initial_slots
            emptied = full.intersection(instruction.ins) if isinstance(instruction, Free) else set[int]()
            full |= filled
            full -= emptied
            yield instruction, filled, emptied

    def peak_bytes(self) -> tuple[int, ...]:
        """Return the most bytes of intermediate values alive at once, per submesh: whole arrays, without arguments."""
        live, peak = [0] * len(self.submeshes), [0] * len(self.submeshes)
        for instruction, filled, emptied in self.liveness():
            at = instruction.submesh
            live[at] += sum(self.slots[slot].nbytes for slot in filled)
            live[at] -= sum(self.slots[slot].nbytes for slot in emptied)
            peak[at] = max(peak[at], live[at])
        return tuple(peak)

    def traffic(self) -> tuple[int, int]:
        """Return the number of arrays sent between submeshes in one run, and their bytes."""
        return sum(len(t.ins) for t in self.transfers), sum(map(self.bytes_of, self.transfers))

    def bytes_of(self, transfer: Transfer) -> int:
        """Return the bytes of the whole arrays of a transfer."""
        return sum(self.slots[slot].nbytes for slot in transfer.ins)

    @functools.cached_property
    def covers(self) -> Mapping[tuple[int, str], str]:
        """The phases that the kernel of each (stage, phase) covers, such as ``FBW`` of a joined last stage."""
        return map_covers((run.cell.stage, run.cell.phase) for run in self.runs if run.cell)

    def shown(self, cell: Cell | None) -> str:
        """Return the phases of a cell in pictures: F, B, W, or FB of a kernel that runs both; "" outside of loops."""
        if cell is None:
            return ""
        return "FB" if cell.phase == "B" and self.covers[cell.stage, "B"].startswith("F") else cell.phase

    def name(self, run: Run) -> str:
        """Return the tasks of a RUN, or else the name of its kernel."""
        return run.task or self.kernels[run.kernel].name
