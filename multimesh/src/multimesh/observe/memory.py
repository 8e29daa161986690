"""Forecasts of a plan's memory on the devices of each submesh, from shapes and layouts alone."""

from __future__ import annotations

import collections
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.core.text import amount
from multimesh.ir.primitives import lookup as facts
from multimesh.observe.group_copies import list_group_copies
from multimesh.passes.planning.fix_layouts import Inner, ValueAxes, kernel_axes, ways
from multimesh.passes.planning.share_gathers import find_exchanges
from multimesh.plan.instructions import Run
from multimesh.plan.plan import Plan

_THRESHOLD = "xla_gpu_all_reduce_combine_threshold_bytes", 32 << 20
"""XLA's flag for the bytes up to which it joins sums over devices, and its default."""


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
    kernels, bodies = kernel_axes(plan)
    beside, args = platform == "cpu", {slot: arg for arg, slot in plan.inputs}
    work = {n: _workspace(plan, plan.first_runs[n], axes, bodies, args, beside) for n, axes in kernels.items()}
    return _forecasts(plan, _sizes(plan), work)


def take_workspace(plan: Plan, kernels: Sequence[KernelMemory | None]) -> tuple[MemoryEstimate, ...]:
    """Return the bytes on each device of each submesh, with the workspace of each kernel by XLA's buffer assignment.

    The workspace has temporaries, and results that the plan writes into donated arrays and XLA does not. Results that
    XLA writes into donated arrays, where the plan does not, are taken off. ``kernels`` are in the order of
    ``plan.kernels``; one of another process has no workspace.
    """
    sizes = _sizes(plan)
    args = {slot: arg for arg, slot in plan.inputs}
    work = {}
    for number, run in plan.first_runs.items():
        if (memory := kernels[number]) is not None:
            in_place = _find_takeovers(plan, run, args).union(run.ins)
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
    args = {slot: arg for arg, slot in plan.inputs}
    nbytes: dict[int, int] = {}
    total = [[0, 0] for _ in plan.submeshes]  # of others, of sums
    peak = [(0, 0, 0)] * len(plan.submeshes)
    for instruction, filled, emptied in plan.liveness():
        at, running = instruction.submesh, 0
        nbytes |= {slot: sizes[slot] for slot in filled}
        if isinstance(instruction, Run):
            nbytes |= dict.fromkeys(filled & _find_takeovers(plan, instruction, args), 0)
            running = work.get(instruction.kernel, 0)
        for slot in filled:
            total[at][slot in sums] += nbytes[slot]
        for slot in emptied:
            total[at][slot in sums] -= nbytes[slot]
        peak[at] = max(peak[at], (total[at][True], total[at][False], running), key=sum)
    return peak


def _find_takeovers(plan: Plan, run: Run, args: Mapping[int, int]) -> set[int]:
    """Return the results that take over the buffer of a donated argument."""
    donated = {(args[slot],) for slot in plan.donated_by(run) if slot in args}
    return {slot for slot in run.outs if plan.like.get(slot) in donated}


def _workspace(
    plan: Plan, run: Run, axes: ValueAxes, bodies: Mapping[ir.Op, Inner], args: Mapping[int, int], beside: bool
) -> int:
    """Return the most bytes of arrays within a kernel that are alive at once.

    GPUs compute a product into the sum that it is added to, unless devices sum it first. CPUs have it beside the sum.
    """
    kernel = plan.kernels[run.kernel]
    mesh = plan.submeshes[kernel.submesh]
    outside = {*kernel.ins, *kernel.rows, *kernel.outs}
    sums, takeovers = frozenset(ir.values(kernel.sums)), _find_takeovers(plan, run, args)
    outs = zip(kernel.outs, run.outs[len(kernel.sums) :], strict=True)
    aliases = frozenset(out for out, slot in outs if slot in takeovers)
    return _peak(kernel.ops, axes, bodies, outside, kernel.outs, mesh, sums, aliases, beside)


def _peak(
    ops: Sequence[ir.Op],
    axes: ValueAxes,
    bodies: Mapping[ir.Op, Inner],
    outside: set[ir.Value],
    results: Iterable[ir.Atom],
    mesh: Mesh,
    sums: frozenset[ir.Value] = frozenset(),
    aliases: frozenset[ir.Value] = frozenset(),
    beside: bool = False,
) -> int:
    """Return the most bytes of results alive at once. ``aliases``: results in the buffers of donated arguments."""
    ops = list(_inline(ops, bodies))
    exchanges = [find_exchanges(op, axes, mesh) for op in ops]
    origins = _find_origins(ops, axes)
    copies = tuple(list_group_copies(ops, origins, lambda v: _size(v, axes, mesh), late=bool(sums)))
    copied = {copy.array: copy.first for copy in copies}
    starts, last, makers = _live_ranges(ops, axes, bodies, mesh, outside, results, sums, beside, origins, copied)
    device_sums, joined, added = (set(), set(), set()) if beside else _find_device_sums(ops, axes, mesh)
    summed_at = max((n for n, op in enumerate(ops) if not device_sums.isdisjoint(op.outs)), default=-1)
    copied_out = {v for v in joined if last.get(v, 0) > summed_at + 1}  # of the buffer in which XLA joins them
    last = {**last, **{v: max(last.get(v, 0), summed_at + 1) for v in device_sums}}  # all are on their way at once
    ranges = {v: (n, last[v]) for n, values in enumerate(starts) for v in values if last.get(v, -1) > n}
    lenders = {v: n for v, n in makers.items() if v not in aliases}
    lent = set[ir.Value]() if beside else added | _lend(ranges, lenders, lambda v: _size(v, axes, mesh))
    ending: dict[int, int] = collections.defaultdict(int)  # bytes that the operation of this number reads last
    beginning: dict[int, int] = collections.defaultdict(int)  # bytes of operands that it gathers first
    uses = group((copy, n) for n, exchange in enumerate(exchanges) for copy in exchange.gathered)
    for (gathered, staying), numbers in uses.items():
        size = gathered.nbytes // ways(staying, mesh)
        beginning[numbers[0]] += size
        ending[numbers[-1]] += size
    for copy in copies:
        beginning[copy.first] += copy.nbytes
        ending[copy.last] += copy.nbytes
    alive = peak = 0
    for n, op in enumerate(ops):
        alive += beginning[n]
        for v in (v for v in starts[n] if v in ranges and v not in lent):
            size = _size(v, axes, mesh)
            alive += size
            ending[last[v]] += size
        nested_peak = 0  # of one iteration of a scan, or of a branch
        if (nested := bodies.get(op)) is not None:
            nested_peak = _peak(nested.ops, axes, bodies, {*nested.inputs}, nested.outputs, mesh, beside=beside)
        part = exchanges[n].part  # summed in place, unless it is larger than the result or added to a sum
        if part and op.outs[0] not in sums and part <= _size(op.outs[0], axes, mesh):
            part = 0
        if n == summed_at:
            part += sum(_size(v, axes, mesh) for v in copied_out)
        peak = max(peak, alive + nested_peak + part)
        alive -= ending[n]
    return peak


def _find_device_sums(
    ops: Sequence[ir.Op], axes: ValueAxes, mesh: Mesh
) -> tuple[set[ir.Value], set[ir.Value], set[ir.Value]]:
    """Return the sums over devices on GPUs, those that XLA joins, and those that it adds to another one before."""
    sums = {
        op.outs[0]: _size(op.outs[0], axes, mesh)
        for op in ops
        if op.prim.name == "reduce_sum" and op.ins[0] in axes and any(axes[op.ins[0]][d] for d in op.params["axes"])
    }
    pairs = [[*op.reads] for op in ops if op.prim.name in ("add", "add_any")]
    added = {pair[1] for pair in pairs if len(pair) == 2 and sums.keys() >= {*pair}}
    flag = re.search(rf"--{_THRESHOLD[0]}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    most, total, joined = int(flag[1]) if flag else _THRESHOLD[1], 0, set[ir.Value]()
    for v, size in sums.items():
        if v not in added and total + size <= most:
            total += size
            joined.add(v)
    return sums.keys() - added, joined if len(joined) > 1 else set(), added


def _lend(
    ranges: Mapping[ir.Value, tuple[int, int]], makers: Mapping[ir.Value, int], size: Callable[[ir.Value], int]
) -> set[ir.Value]:
    """Return the arrays that lie in the buffers of results until these are made, the largest first, as in XLA.

    ``ranges`` has the first and the last operation that each array is alive in, ``makers`` the one that makes a result.
    """
    loans: dict[ir.Value, list[tuple[int, int]]] = {result: [] for result in sorted(makers, key=makers.__getitem__)}
    lent = set[ir.Value]()
    for v in sorted(ranges, key=size, reverse=True):
        begin, end = ranges[v]
        for result, others in loans.items():
            disjoint = all(end < first or begin > last for first, last in others)
            if end < makers[result] and size(result) >= size(v) and disjoint:
                others.append((begin, end))
                lent.add(v)
                break
    return lent


def _inline(ops: Iterable[ir.Op], bodies: Mapping[ir.Op, Inner]) -> Iterator[ir.Op]:
    """Yield operations with those of nested functions in their place, as XLA sees them; loops and branches stay.

    Barriers give the arguments and results of such a function both their names.
    """
    for op in ops:
        nested = bodies.get(op)
        if nested is None or facts(op).control:
            yield op
            continue
        yield ir.Op(_compat.PRIMITIVES["optimization_barrier"], {}, op.ins, nested.inputs)
        yield from _inline(nested.ops, bodies)
        yield ir.Op(_compat.PRIMITIVES["optimization_barrier"], {}, nested.outputs, op.outs)


def _live_ranges(
    ops: Sequence[ir.Op],
    axes: ValueAxes,
    bodies: Mapping[ir.Op, Inner],
    mesh: Mesh,
    outside: set[ir.Value],
    results: Iterable[ir.Atom],
    sums: frozenset[ir.Value],
    beside: bool,
    origins: Mapping[ir.Value, ir.Value],
    copied: Mapping[ir.Value, int],
) -> tuple[Sequence[Sequence[ir.Value]], Mapping[ir.Value, int], Mapping[ir.Value, int]]:
    """Return the arrays that each operation begins, the last one that reads each, and the one that makes each result.

    A result that is fused away keeps its operands alive. CPUs keep an element-wise result that several operations read.
    GPUs compute it again in each, unless a product or the like reads it: it is then made right before the first one.
    There results of the kernel and reductions are computed as soon as their operands are known; what is converted and
    then added to a sum waits for the end.
    """
    readers = (op for op in ops if not origins.keys() & set(op.outs))
    users = collections.Counter(origins.get(v, v) for op in readers for v in set(op.reads))
    outside = outside | {origins.get(v, v) for v in outside}
    first_readers: dict[ir.Value, int] = {}  # what is read as an array to the number of its first reader, on GPUs
    for n, op in enumerate(() if beside else ops):
        if _buffer(op, axes, bodies) == "own" and not facts(op).absorbs:
            first_readers = dict.fromkeys(_split_reads(op, origins, copied)[0], n) | first_readers
    made_of: dict[ir.Value, tuple[ir.Value, ...]] = {}

    def arrays(atoms: Iterable[ir.Atom]) -> Iterator[ir.Value]:
        for v in ir.values(atoms):
            origin = origins.get(v, v)
            yield from made_of.get(origin, (origin,))

    last: dict[ir.Value, int] = {}
    begin: dict[ir.Value, int] = {}
    makers: dict[ir.Value, int] = {}
    starts: list[list[ir.Value]] = [[] for _ in ops]
    for n, op in enumerate(ops):
        reads, copies = _split_reads(op, origins, copied)
        for v in copies:
            last |= {array: max(copied[v] - 1, last.get(array, 0)) for array in arrays((v,))}
        through = tuple(dict.fromkeys(arrays(reads)))
        buffer = _buffer(op, axes, bodies)
        soon = _shrinks(op, axes, mesh) if buffer == "own" else outside.intersection(op.outs)
        now = max((min(begin.get(v, -1) + 1, n) for v in through), default=0) if soon and not beside else n
        summed = buffer != "own" and not beside and sums.intersection(op.outs)
        if beside or soon or summed or buffer == "own":
            until = len(ops) if summed else now
            last |= {v: max(until, last.get(v, until)) for v in through}
        for v in op.outs:
            at = now
            if v in outside:
                makers |= {v: at} if v not in sums and v not in origins else {}
            elif buffer == "own":
                starts[at].append(v)
            elif v in first_readers and buffer != "operand":
                at = first_readers[v]
                starts[at].append(v)
                last |= {operand: max(at, last.get(operand, at)) for operand in through}
            elif users[v] > 1 and buffer == "fused" and (beside or _joins(v, through, axes, mesh)):
                starts[n].append(v)
            else:
                made_of[v] = through
                continue
            made_of[v], begin[v] = (v,), at
            if beside and v in sums:
                last[v] = at + 1
    last |= dict.fromkeys(arrays(results), len(ops))
    return starts, last, makers


def _joins(value: ir.Value, arrays: Iterable[ir.Value], axes: ValueAxes, mesh: Mesh) -> bool:
    """Return whether a result is made of several arrays of its size: computed once more, it reads them all again."""
    size = _size(value, axes, mesh)
    return sum(_size(array, axes, mesh) >= size for array in arrays) > 1


def _find_origins(ops: Iterable[ir.Op], axes: ValueAxes) -> Mapping[ir.Value, ir.Value]:
    """Return the arrays of the values that only name them anew."""
    origins: dict[ir.Value, ir.Value] = {}
    for op in ops:
        if facts(op).buffer == "operand" and not _moves(op, axes):
            origins |= {o: origins.get(i, i) for i, o in zip(op.ins, op.outs, strict=True) if isinstance(i, ir.Value)}
    return origins


def _split_reads(
    op: ir.Op, origins: Mapping[ir.Value, ir.Value], copied: Mapping[ir.Value, int]
) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
    """Return the arrays that an operation reads, and those of which it reads copies for groups."""
    reads = list(dict.fromkeys(origins.get(v, v) for v in ir.values(op.ins)))
    copies = [v for v in reads if v in copied] if op.prim.name == "ragged_dot_general" else []
    return [v for v in reads if v not in copies], copies


def _shrinks(op: ir.Op, axes: ValueAxes, mesh: Mesh) -> bool:
    """Return whether an operation reduces what it reads on a device, and what it reads is computed within it."""
    largest = max((_size(v, axes, mesh) for v in op.reads), default=0)
    return facts(op).absorbs and sum(_size(v, axes, mesh) for v in op.outs) < largest


def _buffer(op: ir.Op, axes: ValueAxes, bodies: Mapping[ir.Op, Inner]) -> str:
    """Return where the results of an operation are, as `Primitive.buffer`. A function is fused if all within it is."""
    inner = bodies.get(op)
    within = inner is not None and any(_buffer(nested, axes, bodies) == "own" for nested in inner.ops)
    return "own" if within or _moves(op, axes) else facts(op).buffer


def _moves(op: ir.Op, axes: ValueAxes) -> bool:
    """Return whether a sharding constraint gives its operand another layout, and so a buffer of its own."""
    if op.prim is not _compat.sharding_constraint_p or not isinstance(op.ins[0], ir.Value):
        return False
    return axes.get(op.ins[0]) != axes.get(op.outs[0])


def _size(value: ir.Value, axes: ValueAxes, mesh: Mesh) -> int:
    return value.nbytes // ways(axes.get(value, ()), mesh)
