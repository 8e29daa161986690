"""The split of a backward fragment in two: B feeds other fragments, W has the rest, which is weight gradients.

A scan over layers makes both. Its body is split likewise, into a scan that carries the cotangents and one, in W, that
makes the weight gradients from what the first stacks. W computes again what needs no cotangent, as the forward that
`jax.checkpoint` repeats. B also has gradients that are small sums over what it computes, as of the scale of a norm: for
them W would need, or compute again, all that is summed. Every operation reads the values that it read before.

Where another process waits for a backward, its result leaves before W, which fills the time of the transfer. Such a W
follows its B at once, also in schedules without W: no submesh holds more microbatches than without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import jax

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir import graph
from multimesh.ir.flops import count_flops, product_sizes
from multimesh.ir.primitives import lookup
from multimesh.passes.cutting.parts import Fragment, Pipeline, with_interfaces
from multimesh.schedules import Cell

Values = set[ir.Value]
Halves = tuple[tuple[ir.Op, ...], tuple[ir.Op, ...]]

_MOST_WORK = 1.02
"""Split only if B and W have at most so many times the operations of one kernel for both."""


def split_weight_gradients(pipeline: Pipeline, owner: Callable[[jax.Device], int]) -> Pipeline:
    """Split backward fragments where the table has B and W apart, or where cotangents are sent before W.

    A first stage that always runs them back to back is not split; where others wait for B, its result leaves before W.
    ``owner`` gives the process of a device.
    """
    stages = {c.stage for c in itertools.chain(*pipeline.table) if c.phase == "W"}
    stages -= find_adjacent(pipeline.table, "B", "W") & {0}
    ahead = set[int]() if stages else _send_ahead(pipeline, owner)
    backward = (c for c in itertools.chain(*pipeline.table) if c.phase == "B" and c.stage in ahead)
    both = {c: (c, Cell("W", c.stage, c.microbatch)) for c in backward}
    table = tuple(tuple(part for cell in row for part in both.get(cell, (cell,))) for row in pipeline.table)
    fragments = split_weights(pipeline.fragments, stages | ahead, set(pipeline.results))
    return replace(pipeline, table=table, fragments=fragments)


def _send_ahead(pipeline: Pipeline, owner: Callable[[jax.Device], int]) -> set[int]:
    """Return the stages whose cotangents leave before their weight gradients: other processes wait for them.

    A stage whose W would compute a product again that B has computed, as under `jax.checkpoint`, sends as it did.
    """
    mark = pipeline.loop.mark
    if not mark.schedule.sends_ahead or pipeline.loop.carries:
        return set()
    processes = {mesh: set(map(owner, mesh.devices.flat)) for mesh in pipeline.submeshes}
    backward = [part for part in pipeline.fragments if part.phase == "B"]
    waited = [
        part
        for part in backward
        if any(processes[part.mesh].isdisjoint(processes[f.mesh]) and part.values & {*f.needs} for f in backward)
    ]
    stages = {part.stage for part in waited if part.stage is not None}
    halves = split_weights(pipeline.fragments, stages, set(pipeline.results)) if stages else ()
    ahead: set[int] = set()
    for part in waited:
        both = [half for half in halves if half.stage == part.stage and half.phase in ("B", "W")]
        work = sum(count_flops(half.ops) for half in both)
        if part.stage is not None and len(both) == 2 and work <= _MOST_WORK * count_flops(part.ops):
            ahead.add(part.stage)
    return ahead


def find_adjacent(table: Sequence[Sequence[Cell]], first: str, second: str) -> set[int]:
    """Return the stages whose ``second`` phase always follows ``first`` at once."""
    pairs = {pair for row in table for pair in itertools.pairwise(row)}
    cells = [c for c in itertools.chain(*table) if c.phase == first]
    separate = {c.stage for c in cells if (c, Cell(second, c.stage, c.microbatch)) not in pairs}
    return {c.stage for c in cells} - separate


def split_weights(fragments: Sequence[Fragment], stages: Collection[int], results: Values) -> tuple[Fragment, ...]:
    """Split the backward fragments of ``stages``. If nothing waits for a fragment, as for the first, it is all W."""
    last = max((part.level for part in fragments if part.phase != "L"), default=0)
    split: list[Fragment] = []
    for part in fragments:
        if part.phase != "B" or part.stage not in stages:
            split.append(part)
            continue
        others = [f for f in fragments if f is not part and f.phase != "L"]  # what is late can wait for W
        elsewhere = {v for f in others for v in f.needs}
        received = {v for f in others if f.phase == "B" for v in f.outs}
        cotangents = {v for v in part.ins if v in received or v.aval.size == 1}
        tied = _find_repeats(part.ops, cotangents)
        here, later = _split(part.ops, elsewhere & part.values, cotangents, tied, set())
        if here:
            split.append(replace(part, ops=here))
        if later:
            split.append(replace(part, ops=later, phase="W", level=last + 1 + part.level))
    return with_interfaces(sorted(split, key=lambda part: part.level), results)


def _taint(ops: Sequence[ir.Op], sources: Iterable[ir.Value]) -> Values:
    """Return the values that depend on any of ``sources``. A barrier only orders, and carries no dependence."""
    taints = set(sources)
    for op in ops:
        if op.prim is _compat.optimization_barrier_p:
            taints.update(o for i, o in zip(op.ins, op.outs, strict=True) if isinstance(i, ir.Value) and i in taints)
        elif any(v in taints for v in op.reads):
            taints.update(op.outs)
    return taints


def _find_repeats(ops: Sequence[ir.Op], cotangents: Values) -> Values:
    """Return values that `jax.checkpoint` recomputes: a barrier ties their inputs to a cotangent."""
    tainted = _taint(ops, cotangents)
    local = {o for op in ops for o in op.outs}
    repeats: Values = set()
    for op in ops:
        if op.prim is _compat.optimization_barrier_p:
            free = [isinstance(i, ir.Value) and i not in tainted and (i in repeats or i not in local) for i in op.ins]
            if not all(free):
                repeats.update(o for o, f in zip(op.outs, free, strict=True) if f)
        elif any(v in repeats for v in op.reads) and all(v in repeats or v not in local for v in op.reads):
            repeats.update(o for o in op.outs if o not in tainted)
    return repeats


def _split(ops: Sequence[ir.Op], needed: Values, cotangents: Values, repeatable: Values, absent: Values) -> Halves:
    """Split operations: those that make ``needed`` values or small sums, the others with copies of ``repeatable``."""
    tainted = _taint(ops, cotangents)
    here, later = _divide(ops, needed, tainted)
    if here and (sums := _find_small_sums(later, absent)):
        here, later = _divide(ops, needed | sums, tainted)
    return tuple(here), _with_copies(here, later, repeatable)


def _divide(ops: Sequence[ir.Op], needed: Values, tainted: Values) -> tuple[list[ir.Op], list[ir.Op]]:
    """Divide operations into those that make ``needed`` values, and the others."""
    needed = set(needed)
    here, later = list[ir.Op](), list[ir.Op]()
    for op in reversed(ops):
        if not op.effects and not any(o in needed for o in op.outs):
            later.append(op)
            continue
        parts = None
        if op.prim.name == "scan" and not op.effects:
            from multimesh.passes.cutting.split_scan import split_scan  # loaded by scans alone

            parts = split_scan(op, needed, tainted, _split_body)
        if parts is not None:
            op = parts[0]
            later.append(parts[1])
        here.append(op)
        needed.update(op.needs)
    return here[::-1], later[::-1]


def _find_small_sums(later: Sequence[ir.Op], absent: Values) -> Values:
    """Return sums in ``later``, at most half as large as what is summed, without a matrix product.

    None reads what is ``absent`` from B, as the sums that only W carries from row to row of a scan.
    """
    late, sums = absent.copy(), Values()
    for op in later:
        if not late.isdisjoint(op.reads) or not _is_light(op):
            late.update(op.outs)
        else:
            most = max((v.aval.size // (1 if v in sums else 2) for v in op.reads), default=0)
            sums.update(o for o in op.outs if o.aval.size <= most)
    return sums


def _is_light(op: ir.Op) -> bool:
    """Whether an operation takes no longer than its operands take to be read."""
    if op.prim.name == "dot_general":
        _, rows, _, columns = product_sizes(op.params, op.ins)
        return min(rows, columns) == 1
    return not op.effects and (lookup(op).cheap or op.prim.name.startswith("reduce_"))


def _split_body(ops: Sequence[ir.Op], needed: Values, cotangents: Values, absent: Values) -> Halves:
    """Split the body of a scan: ``needed`` values, then the rest, which may repeat what depends on no cotangent."""
    return _split(ops, needed, cotangents, {o for op in ops for o in op.outs} - _taint(ops, cotangents), absent)


def _with_copies(here: Sequence[ir.Op], later: Sequence[ir.Op], repeatable: Values) -> tuple[ir.Op, ...]:
    """Prepend to ``later`` copies of the ``repeatable`` operations of ``here`` whose values it reads."""
    needed = {v for op in later for v in op.reads if v in repeatable}
    copied: list[ir.Op] = []
    for op in reversed(here):
        if any(o in needed for o in op.outs):
            copied.append(op)
            needed.update(v for v in op.reads if v in repeatable)
    rename: dict[ir.Value, ir.Atom] = {}
    copies: list[ir.Op] = []
    for op in reversed(copied):
        if op.prim is _compat.optimization_barrier_p:  # a kernel of its own needs no tie to its cotangents
            rename.update((o, i) for o, i in zip(op.outs, op.ins, strict=True) if o in repeatable)
        else:
            copies.append(graph.repeat_op(op, rename))
    return (*copies, *(graph.rename_op(op, rename) for op in later))
