"""Operations of a loop that repeat others, as `jax.checkpoint` makes them."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Mapping, Sequence

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.stable import text


def live_with_originals(program: ir.Program, loop: ir.Loop, values: Sequence[ir.Atom]) -> tuple[ir.Op, ...]:
    """Return the operations of a loop that ``values`` need, and those of the forward pass that they repeat."""
    ops = tuple(ir.live(loop.ops, values))
    if all(op.backward for op in set(loop.ops).difference(ops)):
        return ops
    first = find_recomputation(program, loop)
    originals = [first[o] for op in ops for o in op.outs if o in first]
    return tuple(ir.live(loop.ops, [*values, *originals])) if originals else ops


def find_recomputation(program: ir.Program, loop: ir.Loop) -> dict[ir.Value, ir.Value]:
    """Map values that the backward pass of a loop recomputes, or that JAX moved out of it, to the forward pass's."""
    first: dict[ir.Value, ir.Value] = {}
    if {op.prim for op in loop.ops if op.backward}.isdisjoint(op.prim for op in loop.ops if not op.backward):
        return first
    equals: dict[ir.Value, ir.Value] = {}  # a value to the first that equals it
    fixed = {*program.inputs, *program.consts}  # first values that are the same in every iteration
    operations: dict[Hashable, list[ir.Op]] = collections.defaultdict(list)

    def note(op: ir.Op, *, everywhere: bool) -> ir.Op | None:
        """Return the first operation that equals this one, with at least its results; None if this is the first."""
        names = [equals.get(i, i) if isinstance(i, ir.Value) else (str(i.aval), str(i.val)) for i in op.ins]
        mesh = op.mesh or (op.task and op.task.mesh)
        candidates = operations[op.prim, None if everywhere else mesh, *names]
        twin = next((other for other in candidates if _equal(other, op)), None)
        if twin is None:
            candidates.append(op)
            fixed.update(op.outs if everywhere else ())
        else:
            equals.update((o, equals.get(t, t)) for o, t in zip(op.outs, twin.outs, strict=False))
        return twin

    for item in itertools.takewhile(lambda item: item is not loop, program.items):
        fixed.update(item.outs)
        if isinstance(item, ir.Op) and not item.effects:
            note(item, everywhere=True)
    for inner, outer in loop.consts.items():
        if isinstance(outer, ir.Value):
            equals[inner] = equals.get(outer, outer)
    rows: dict[ir.Value, ir.Value] = {}
    for inner, outer in (*loop.slices.items(), *loop.linked.items()):
        equals[inner] = rows.setdefault(equals.get(outer, outer), inner)
    inside = frozenset(loop.ops)
    for op in loop.ops:
        if op.prim is _compat.optimization_barrier_p:
            tied = ((o, i) for o, i in zip(op.outs, op.ins, strict=True) if isinstance(i, ir.Value))
            equals.update((o, equals.get(i, i)) for o, i in tied)
        elif not op.effects:
            twin = note(op, everywhere=fixed.issuperset(equals.get(v, v) for v in op.reads))
            if twin in inside and op.backward and not twin.backward:
                first.update(zip(op.outs, twin.outs, strict=False))
    return first


def is_same(first: ir.Atom, second: ir.Atom, maker: Mapping[ir.Value, ir.Op]) -> bool:
    """Return whether chains of equal operations, each of one operand, make two values of the same one."""
    while first is not second:
        one, other = (maker.get(v) if isinstance(v, ir.Value) else None for v in (first, second))
        if one is None or other is None or one.prim is not other.prim or one.effects or not _equal(one, other):
            return False
        if len(one.ins) != 1 or len(one.outs) != 1:
            return False
        first, second = one.ins[0], other.ins[0]
    return True


def _equal(first: ir.Op, second: ir.Op) -> bool:
    """Return whether two operations on the same operands have the same results. A second scan may have more."""
    if len(first.outs) == len(second.outs) and text(first.params) == text(second.params):
        return True
    if first.prim.name != "scan" or len(first.outs) > len(second.outs):
        return False
    scans = []
    for op in (first, second):
        used = [n < len(first.outs) for n in range(len(op.outs))]
        (body,), reads = _compat.dce([op.params["jaxpr"]], used)
        scans.append((reads, text(_compat.scan_params(op.params, body, *_compat.scan_counts(op.params)))))
    return scans[0] == scans[1] and all(scans[0][0])
