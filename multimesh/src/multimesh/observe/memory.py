"""Forecasts of a plan's memory on the devices of each submesh, from shapes and layouts alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from multimesh import ir
from multimesh.core.text import amount
from multimesh.ir.axes import Array
from multimesh.observe.kernel_buffers import Body, peak_bytes
from multimesh.passes.planning.fix_layouts import Inner, ValueAxes, kernel_axes
from multimesh.plan.instructions import Run
from multimesh.plan.plan import Plan


@dataclass(frozen=True, repr=False)
class MemoryEstimate:
    """Bytes on each device of a submesh.

    Attributes
    ----------
    arguments
        Held all the time: arguments of the call and captured arrays, with their copies for other submeshes.
    sums, values, workspace
        At the peak of the call: sums over microbatches, such as gradients; other arrays that are kept or sent between
        kernels; arrays within the running kernel.
    """

    arguments: int
    sums: int
    values: int
    workspace: int

    @property
    def total(self) -> int:
        """Bytes at the peak of the call."""
        return sum(astuple(self))

    def __repr__(self) -> str:
        parts = {**vars(self), "total": self.total}
        return f"MemoryEstimate({', '.join(name + '=' + amount(value, 'bytes') for name, value in parts.items())})"


@dataclass(frozen=True)
class KernelMemory:
    """Bytes of a kernel on each device, by XLA's buffer assignment.

    ``aliases`` are those of results that take the buffers of donated arguments. ``code`` is 0 where XLA does not say.
    """

    arguments: int
    results: int
    aliases: int
    temporaries: int
    code: int


def estimate_memory(plan: Plan, platform: str | None = None) -> tuple[MemoryEstimate, ...]:
    """Return the bytes on each device of each submesh, as the compiler of a platform would need them."""
    platform = platform or plan.submeshes[0].devices.flat[0].platform
    kernels, slots, inner = kernel_axes(plan)
    cpu = platform == "cpu"
    work = {n: _workspace(plan, plan.first_runs[n], axes, slots, inner, cpu) for n, axes in kernels.items()}
    return _forecasts(plan, _sizes(plan), work)


def take_workspace(plan: Plan, kernels: Sequence[KernelMemory | None]) -> tuple[MemoryEstimate, ...]:
    """Return the bytes on each device of each submesh, with the workspace of each kernel by XLA's buffer assignment.

    The workspace has temporaries, and results that the plan writes into donated arrays and XLA does not. Results that
    XLA writes into donated arrays, where the plan does not, are taken off. ``kernels`` are in the order of
    ``plan.kernels``; one of another process has no workspace.
    """
    sizes = _sizes(plan)
    work = {}
    for number, run in plan.first_runs.items():
        if (memory := kernels[number]) is not None:
            in_place = _find_takeovers(plan, run).union(run.ins)
            new = sum(sizes[slot] for slot in run.outs if slot not in in_place)
            work[number] = memory.temporaries + memory.results - memory.aliases - new
    return _forecasts(plan, sizes, work)


def _sizes(plan: Plan) -> list[int]:
    """Return the bytes of each slot on a device; none for an array that waits on the host."""
    return [
        slot.nbytes * math.prod(layout.shard_shape(slot.shape)) // max(1, math.prod(slot.shape))
        if slot.memory is None
        else 0
        for slot, layout in zip(plan.slots, plan.layouts, strict=True)
    ]


def _forecasts(plan: Plan, sizes: Sequence[int], work: Mapping[int, int]) -> tuple[MemoryEstimate, ...]:
    nbytes = [0] * len(plan.submeshes)
    for slot in plan.initial_slots:
        nbytes[plan.slots[slot].submesh] += sizes[slot]
    return tuple(
        MemoryEstimate(arguments, sums, values + min(0, running), max(0, running))
        for arguments, (sums, values, running) in zip(nbytes, _peaks(plan, sizes, work), strict=True)
    )


def _peaks(plan: Plan, sizes: Sequence[int], work: Mapping[int, int]) -> Iterable[tuple[int, int, int]]:
    """Return sums, values and workspace on each submesh when the three together are largest."""
    sums = {slot for run in plan.runs for slot in run.ins[: len(plan.kernels[run.kernel].sums)]}
    turning = {n for n, kernel in enumerate(plan.kernels) if {op.prim.name for op in kernel.ops} == {"transpose"}}
    sums.update(slot for run in plan.runs if run.kernel in turning and sums.issuperset(run.ins) for slot in run.outs)
    nbytes: dict[int, int] = {}
    total = [[0, 0] for _ in plan.submeshes]  # of others, of sums
    peak = [(0, 0, 0)] * len(plan.submeshes)
    for instruction, filled, emptied in plan.liveness():
        at, running = instruction.submesh, 0
        nbytes |= {slot: sizes[slot] for slot in filled}
        if isinstance(instruction, Run):
            nbytes |= dict.fromkeys(filled & _find_takeovers(plan, instruction), 0)
            running = work.get(instruction.kernel, 0)
        for slot in filled:
            total[at][slot in sums] += nbytes[slot]
        for slot in emptied:
            total[at][slot in sums] -= nbytes[slot]
        peak[at] = max(peak[at], (total[at][True], total[at][False], running), key=sum)
    return peak


def _find_takeovers(plan: Plan, run: Run) -> set[int]:
    """Return the results that take over the buffer of a donated argument."""
    replacing = [slot for slot in run.outs if slot in plan.like]
    donated_slots = set(plan.donated_by(run)) if replacing else set()
    donated = {(arg,) for arg, slot in plan.inputs if slot in donated_slots}
    return {slot for slot in replacing if plan.like[slot] in donated}


def _workspace(
    plan: Plan,
    run: Run,
    axes: ValueAxes,
    slots: Mapping[int, Array],
    inner: Mapping[ir.Op, Inner],
    cpu: bool,
) -> int:
    """Return the most bytes of arrays within a kernel that are alive at once."""
    kernel = plan.kernels[run.kernel]
    takeovers = _find_takeovers(plan, run)
    pairs = zip(kernel.sums, run.ins, strict=False)
    results = zip(kernel.outs, run.outs[len(kernel.sums) :], strict=True)
    body = Body(
        kernel.ops,
        kernel.outs,
        axes,
        plan.submeshes[kernel.submesh],
        inner,
        cpu,
        outside=frozenset((*kernel.ins, *kernel.rows, *kernel.outs)),
        sums={v: slots[slot].divided for v, slot in pairs if isinstance(v, ir.Value)},
        aliases=frozenset(value for value, slot in results if slot in takeovers),
    )
    return peak_bytes(body)
