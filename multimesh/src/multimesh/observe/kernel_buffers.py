"""The buffers of the arrays within a kernel, as XLA's compilers for CPUs and GPUs assign them."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.core.specs import Axes
from multimesh.ir.primitives import is_cheap
from multimesh.ir.primitives import lookup as facts
from multimesh.observe.group_copies import list_group_copies
from multimesh.observe.hlo import THRESHOLDS
from multimesh.passes.planning.fix_layouts import Inner, ValueAxes, ways
from multimesh.passes.planning.share_gathers import Exchanges, find_exchanges

_JOINED_BYTES = {"all-gather": 30 << 20, "all-reduce": 32 << 20}
"""XLA's defaults of ``THRESHOLDS``."""

_COSTLY = ("exp", "tanh")
"""Functions that XLA computes no second time where one is made of another one, as after a soft cap."""


@dataclass(frozen=True)
class Body:
    """The operations of a kernel, or of one iteration of a loop, on a CPU or a GPU.

    ``inner`` has the jaxprs that operations run, and ``outside`` the values in buffers of arguments and results. A
    value of ``sums`` is added to a sum over microbatches that these axes divide. ``aliases`` are results in the
    buffers of donated arguments.
    """

    ops: tuple[ir.Op, ...]
    results: tuple[ir.Atom, ...]
    axes: ValueAxes
    mesh: Mesh
    inner: Mapping[ir.Op, Inner]
    cpu: bool
    outside: frozenset[ir.Value]
    sums: Mapping[ir.Value, tuple[Axes, ...]]
    aliases: frozenset[ir.Value]

    def size(self, value: ir.Value) -> int:
        """Return the bytes of a value on a device."""
        return value.nbytes // ways(self.axes.get(value, ()), self.mesh)

    def moves(self, op: ir.Op) -> bool:
        """Return whether a sharding constraint gives its operand another layout, and so a buffer of its own."""
        if op.prim is not _compat.sharding_constraint_p or not isinstance(op.ins[0], ir.Value):
            return False
        return self.axes.get(op.ins[0]) != self.axes.get(op.outs[0])

    def buffer(self, op: ir.Op) -> str:
        """Return where the results of an operation are, as `Primitive.buffer`. A function is fused if all in it is."""
        if _is_transposed_matrix(op):
            return "fused"
        inner = self.inner.get(op)
        within = inner is not None and any(self.buffer(nested) == "own" for nested in inner.ops)
        return "own" if within or self.moves(op) else facts(op).buffer

    @cached_property
    def origins(self) -> Mapping[ir.Value, ir.Value]:
        """The arrays of the values that only name them anew."""
        origins: dict[ir.Value, ir.Value] = {}
        for op in self.ops:
            if facts(op).buffer == "operand" and not self.moves(op):
                pairs = zip(op.ins, op.outs, strict=True)
                origins |= {o: origins.get(i, i) for i, o in pairs if isinstance(i, ir.Value)}
        return origins

    def split_reads(self, op: ir.Op, copied: Mapping[ir.Value, int]) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
        """Return the arrays that an operation reads, and those of which it reads copies for groups."""
        reads = list(dict.fromkeys(self.origins.get(v, v) for v in ir.values(op.ins)))
        copies = [v for v in reads if v in copied] if op.prim.name == "ragged_dot_general" else []
        return [v for v in reads if v not in copies], copies

    def shrinks(self, op: ir.Op) -> bool:
        """Return whether an operation reduces what it reads on a device, and what it reads is computed within it."""
        largest = max(map(self.size, op.reads), default=0)
        return facts(op).absorbs and sum(map(self.size, op.outs)) < largest

    def joins(self, value: ir.Value, arrays: Iterable[ir.Value]) -> bool:
        """Return whether a result is made of several arrays of its size: made again, it reads them all again."""
        return sum(self.size(array) >= self.size(value) for array in arrays) > 1


def peak_bytes(body: Body) -> int:
    """Return the most bytes of arrays alive at once, those of arguments and results left out.

    GPUs compute a product into the sum that it is added to, unless devices sum it first. CPUs have it beside the sum.
    """
    body = replace(body, ops=tuple(_inline(body.ops, body.inner)))
    scattered = {} if body.cpu else _find_scatters(body)
    wide = {v: body.size(v) for v in scattered}  # before devices sum them
    body = replace(body, axes={**body.axes, **scattered})
    exchanges = [find_exchanges(op, body.axes, body.mesh) for op in body.ops]
    copies = tuple(list_group_copies(body.ops, body.origins, body.size, late=bool(body.sums)))
    gather_starts = _find_gather_starts(body, exchanges)
    ranges, makers = _live_ranges(body, {copy.array: copy.first for copy in copies}, gather_starts)
    device_sums, joined, added = (set(), set(), set()) if body.cpu else _find_device_sums(body)
    summed_at = max((n for n, op in enumerate(body.ops) if not device_sums.isdisjoint(op.outs)), default=-1)
    # XLA copies these out of the buffer in which it joins them. All are on their way at once.
    copied_out = {v for v in joined if v in ranges and ranges[v][1] > summed_at + 1}
    ranges |= {v: (ranges[v][0], max(ranges[v][1], summed_at + 1)) for v in device_sums & ranges.keys()}
    lenders = {v: n for v, n in makers.items() if v not in body.aliases}
    spans = [(*ends, body.size(v)) for v, ends in ranges.items() if v not in added]
    spans += _list_gathers(body, exchanges, gather_starts)
    spans = spans if body.cpu else _drop_lent(body, spans, lenders)
    spans += [(copy.first, copy.last, copy.nbytes) for copy in copies]
    change = [0] * (len(body.ops) + 2)
    for begin, end, size in spans:
        change[begin] += size
        change[end + 1] -= size
    alive = peak = 0
    for n, op in enumerate(body.ops):
        alive += change[n]
        nested_peak = 0  # of one iteration of a scan, or of a branch
        if (nested := body.inner.get(op)) is not None:
            within = replace(body, ops=nested.ops, results=nested.outputs, outside=frozenset(nested.inputs))
            nested_peak = peak_bytes(replace(within, sums={}, aliases=frozenset()))
        part = exchanges[n].part + sum(wide.get(v, 0) for v in op.outs)
        if part and op.outs[0] not in body.sums and part <= body.size(op.outs[0]):
            part = 0  # summed in place, unless it is larger than the result or added to a sum
        if n == summed_at:
            part += sum(map(body.size, copied_out))
        peak = max(peak, alive + nested_peak + part)
    return peak


def _find_gather_starts(body: Body, exchanges: Sequence[Exchanges]) -> Mapping[ir.Value, int]:
    """Map arrays whose gathers wait for no other one to the operation before which the gathers begin.

    XLA joins them in their order, on GPUs up to the bytes of a threshold. The gathers of a group begin together: while
    the last operation of the group before runs, or with that group if no result of it is read.
    """
    most = float("inf") if body.cpu else _read_threshold("all-gather")
    starts, derived = dict[ir.Value, int](), set[ir.Value]()
    begin = last = total = 0
    for n, (op, exchange) in enumerate(zip(body.ops, exchanges, strict=True)):
        sizes = {v: v.nbytes // ways(staying, body.mesh) for v, staying in exchange.gathered}
        sizes |= {v: body.size(op.outs[0]) for v in op.reads if body.moves(op)}
        for v in (v for v in sizes if v not in derived and v not in starts):
            total += sizes[v]
            if not starts:
                begin = n
            elif total > most:
                begin, total = begin if derived.isdisjoint(op.reads) else last, sizes[v]
            starts[v], last = begin, n
        if sizes or not derived.isdisjoint(op.reads):
            derived.update(op.outs)
    return starts


def _list_gathers(
    body: Body, exchanges: Sequence[Exchanges], gather_starts: Mapping[ir.Value, int]
) -> Iterator[tuple[int, int, int]]:
    """Yield when gathered operands of products are alive, and their bytes. XLA gathers what is made alike once.

    On GPUs the devices' own parts, where they are computed from arguments, are all there before the first gather.
    """
    roots: dict[ir.Value, ir.Value] = {}
    makers = {v: op for op in body.ops for v in op.outs}
    for op in body.ops:
        if len(reads := set(op.reads)) == 1 and is_cheap(op.prim):
            (read,) = reads
            roots |= dict.fromkeys(op.outs, roots.get(read, read))
    copies = (
        (n, v, v.nbytes // ways(staying, body.mesh)) for n, e in enumerate(exchanges) for v, staying in e.gathered
    )
    for (_, size), uses in group(((roots.get(v, v), size), (n, v)) for n, v, size in copies).items():
        n, v = uses[0]
        begin = gather_starts.get(v, n)
        yield begin, uses[-1][0], size
        maker = makers.get(body.origins.get(v, v))
        if not body.cpu and v in gather_starts and maker is not None and body.buffer(maker) in ("fused", "again"):
            yield min(gather_starts.values()), begin, body.size(v)


def _read_threshold(kind: str) -> int:
    """Return the bytes up to which XLA joins collectives of a kind, by its flag in ``XLA_FLAGS``."""
    match = re.search(rf"--{THRESHOLDS[kind]}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(match[1]) if match else _JOINED_BYTES[kind]


def _find_scatters(body: Body) -> dict[ir.Value, tuple[Axes, ...]]:
    """Return rows scattered on several devices, which sum them and divide them as the sum to which they are added."""
    reached = dict(body.sums)
    scattered: dict[ir.Value, tuple[Axes, ...]] = {}
    for op in reversed(body.ops):
        axes = next((reached[v] for v in op.outs if v in reached), None)
        if axes is None:
            continue
        if op.prim.name == "scatter-add":
            indices = op.ins[1]
            if body.axes.get(op.outs[0]) != axes and isinstance(indices, ir.Value) and any(body.axes.get(indices, ())):
                scattered[op.outs[0]] = axes
        elif op.prim.name in ("add", "add_any", "convert_element_type"):
            reached |= {v: axes for v in op.reads if ir.shape(v) == ir.shape(op.outs[0])}
        elif op.prim.name == "transpose":
            order = op.params["permutation"]
            reached |= {v: tuple(axes[order.index(d)] for d in range(len(order))) for v in op.reads}
    return scattered


def _find_device_sums(body: Body) -> tuple[set[ir.Value], set[ir.Value], set[ir.Value]]:
    """Return the sums over devices on GPUs, those that XLA joins, and those that it adds to another one before."""
    axes = body.axes
    sums = {
        op.outs[0]: body.size(op.outs[0])
        for op in body.ops
        if op.prim.name == "reduce_sum" and op.ins[0] in axes and any(axes[op.ins[0]][d] for d in op.params["axes"])
    }
    pairs = [[*op.reads] for op in body.ops if op.prim.name in ("add", "add_any")]
    added = {pair[1] for pair in pairs if len(pair) == 2 and sums.keys() >= {*pair}}
    most, total, joined = _read_threshold("all-reduce"), 0, set[ir.Value]()
    for v, size in sums.items():
        if v not in added and total + size <= most:
            total += size
            joined.add(v)
    return sums.keys() - added, joined if len(joined) > 1 else set(), added


def _drop_lent(
    body: Body, spans: Iterable[tuple[int, int, int]], makers: Mapping[ir.Value, int]
) -> list[tuple[int, int, int]]:
    """Return the arrays that do not lie in buffers of results until these are made. XLA lends them largest first.

    ``spans`` has the first and the last operation that each array is alive in, and its bytes; ``makers`` the one that
    makes a result.
    """
    loans: dict[ir.Value, list[tuple[int, int]]] = {result: [] for result in sorted(makers, key=makers.__getitem__)}
    others = []
    for begin, end, size in sorted(spans, key=lambda span: span[2], reverse=True):
        for result, lent in loans.items():
            disjoint = all(end < first or begin > last for first, last in lent)
            if end < makers[result] and body.size(result) >= size and disjoint:
                lent.append((begin, end))
                break
        else:
            others.append((begin, end, size))
    return others


def _inline(ops: Iterable[ir.Op], inner: Mapping[ir.Op, Inner]) -> Iterator[ir.Op]:
    """Yield operations with those of nested functions in their place, as XLA sees them; loops and branches stay.

    Barriers give the arguments and results of such a function both their names.
    """
    for op in ops:
        nested = inner.get(op)
        if nested is None or facts(op).control:
            yield op
            continue
        yield ir.Op(_compat.PRIMITIVES["optimization_barrier"], {}, op.ins, nested.inputs)
        yield from _inline(nested.ops, inner)
        yield ir.Op(_compat.PRIMITIVES["optimization_barrier"], {}, nested.outputs, op.outs)


def _live_ranges(
    body: Body, copied: Mapping[ir.Value, int], gather_starts: Mapping[ir.Value, int]
) -> tuple[dict[ir.Value, tuple[int, int]], Mapping[ir.Value, int]]:
    """Return the operations from and up to which each array is alive, and the one that makes each result.

    A result that is fused away keeps its operands alive. CPUs keep an element-wise result that several operations read.
    GPUs compute it again in each, unless that is costly, or a product or the like reads it: it is then made right
    before the first one, in the buffer of an operand. A product itself converts a matrix, unless it sums over its last
    dimension. There results of the kernel and reductions are computed as soon as their operands are known.
    """
    ops, origins, cpu = body.ops, body.origins, body.cpu
    readers = (op for op in ops if not origins.keys() & set(op.outs))
    users = collections.Counter(origins.get(v, v) for op in readers for v in set(op.reads))
    outside = body.outside | {origins.get(v, v) for v in body.outside}
    first_readers: dict[ir.Value, int] = {}  # what is read as an array to the number of its first reader, on GPUs
    for n, op in enumerate(() if cpu else ops):
        if body.buffer(op) == "own" and not facts(op).absorbs:
            first_readers = dict.fromkeys(body.split_reads(op, copied)[0], n) | first_readers
    made_of: dict[ir.Value, tuple[ir.Value, ...]] = {}

    def arrays(atoms: Iterable[ir.Atom]) -> Iterator[ir.Value]:
        for v in ir.values(atoms):
            origin = origins.get(v, v)
            yield from made_of.get(origin, (origin,))

    last: dict[ir.Value, int] = {}
    begin: dict[ir.Value, int] = {}
    makers: dict[ir.Value, int] = {}
    costly: dict[ir.Value, int] = {}  # functions of `_COSTLY` that make a value of arrays, on GPUs
    within = set[ir.Value]()  # arrays of which one operation is the whole life
    for n, op in enumerate(ops):
        reads, copies = body.split_reads(op, copied)
        for v in copies:
            last |= {array: max(copied[v] - 1, last.get(array, 0)) for array in arrays((v,))}
        through = tuple(dict.fromkeys(arrays(reads)))
        buffer = body.buffer(op)
        soon = body.shrinks(op) if buffer == "own" else outside.intersection(op.outs)
        now = max((min(begin.get(v, -1) + 1, n) for v in through), default=0) if soon and not cpu else n
        if cpu or soon or buffer == "own" or not body.sums.keys().isdisjoint(op.outs):
            last |= {v: max(now, last.get(v, now)) for v in through}
        if buffer != "own" and not cpu:
            most = max((costly.get(v, 0) for v in reads), default=0)
            costly |= dict.fromkeys(op.outs, most + (op.prim.name in _COSTLY))
        for v in op.outs:
            if v in outside:
                makers |= {v: now} if v not in body.sums and v not in origins else {}
                begin[v] = now
            elif buffer == "own":
                begin[v] = min(gather_starts.get(read, now) for read in op.reads) if body.moves(op) else now
            elif v in first_readers and buffer != "operand" and not _is_transposed_matrix(op):
                begin[v] = first_readers[v]
                last |= {operand: max(begin[v] - 1, last.get(operand, 0)) for operand in through}
                if _is_array(op, ops[begin[v]], v, origins):
                    within.add(v)
            elif users[v] > 1 and buffer == "fused" and (cpu or costly.get(v, 0) > 1 or body.joins(v, through)):
                begin[v] = n
            else:
                made_of[v] = through
                continue
            made_of[v] = (v,)
            if cpu and v in body.sums:
                last[v] = begin[v] + 1
    last |= dict.fromkeys(arrays(body.results), len(ops))
    inside = {v: n for v, n in begin.items() if v not in outside}
    return {v: (n, last[v]) for v, n in inside.items() if last.get(v, -1) >= n + (v not in within)}, makers


def _is_transposed_matrix(op: ir.Op) -> bool:
    """Return whether a product reads the operand of this one as well as the result."""
    return op.prim.name == "transpose" and len(ir.shape(op.outs[0])) == 2


def _is_array(op: ir.Op, product: ir.Op, value: ir.Value, origins: Mapping[ir.Value, ir.Value]) -> bool:
    """Return whether an operation writes what a product reads; else the product computes it where it reads it."""
    if product.prim.name != "dot_general" or op.prim.name != "convert_element_type":
        return product.prim.name == "dot_general"
    contracted, _ = product.params["dimension_numbers"]
    pairs = zip(ir.values(product.ins), contracted, strict=True)
    return any(origins.get(v, v) is value and len(ir.shape(v)) - 1 in dims for v, dims in pairs)
