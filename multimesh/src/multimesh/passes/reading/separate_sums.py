"""Split the sums of a loop: each gets one leaf, which is one addend of a cotangent, and no initial value.

Initial values other than zero are added last. A sum of cotangents becomes several sums, if its dtype allows that
(`primitives.reorders`). Then sums get enough bits: what one adds to a large sum is lost in bfloat16.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import primitives

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir import graph
from multimesh.ir.primitives import is_zero, reorders
from multimesh.marking.result_reductions import accumulator
from multimesh.passes.reading.find_recomputation import live_with_originals


def separate_sums(program: ir.Program) -> ir.Program:
    """Give every sum one leaf: drop dead code, link loops row by row, split sums of several submeshes.

    A gradient of a tied weight is a sum of leaves that different submeshes make; each submesh accumulates its own, and
    additions after the loop join them. Initial values other than zero are added after the loop too.
    """
    program = replace(program, items=tuple(_prune(program)))
    bodies: dict[ir.Value, ir.Atom] = {}
    producer = graph.makers(i for i in program.items if isinstance(i, ir.Op))
    items: list[ir.Item] = []
    for item in program.items:
        if isinstance(item, ir.Op):
            items.append(item)
            continue
        inits, item = _with_inits(item)
        literals = {k: v for k, v in item.consts.items() if not isinstance(v, ir.Value)}  # move to what uses them
        consts = {k: v for k, v in item.consts.items() if k not in literals}
        item = replace(graph.rename_body(item, literals), consts=consts)
        linked = {inner: bodies[outer] for inner, outer in item.slices.items() if outer in bodies}  # not by their stack
        slices = {inner: outer for inner, outer in item.slices.items() if inner not in linked}
        loop, joins = _separate_leaves(replace(item, linked=linked, slices=slices), producer)
        bodies.update({o: i for o, i in loop.stacks.items() if isinstance(i, ir.Value)})
        items += [*inits, loop, *joins]
    return replace(program, items=tuple(_prune(replace(program, items=tuple(items)))))


def _with_inits(loop: ir.Loop) -> tuple[list[ir.Op], ir.Loop]:
    """Return copies of initial states that are literals, and the loop that reads them."""
    literals = {k for k, c in loop.carries.items() if c.init is not None and not isinstance(c.init, ir.Value)}
    copies = {k: ir.Value(c.out.aval) for k, c in loop.carries.items() if k in literals}
    ops = [ir.Op(_compat.copy_p, {}, (loop.carries[k].init,), (v,), source=loop.source) for k, v in copies.items()]
    carries = {k: replace(c, init=copies.get(k, c.init)) for k, c in loop.carries.items()}
    return ops, replace(loop, carries=carries)


def _separate_leaves(loop: ir.Loop, producer: dict[ir.Value, ir.Op]) -> tuple[ir.Loop, list[ir.Op]]:
    uses = collections.Counter(v for op in loop.ops for v in op.reads)
    uses.update(ir.values(loop.leaves))
    inner = graph.makers(loop.ops)
    dropped: set[int] = set()
    sums: list[ir.Sum] = []
    joins: list[ir.Op] = []
    for s in loop.sums:
        leaves = _split_leaf(s.leaf, inner, uses, dropped)
        parts = [ir.Sum(ir.Value((leaf if isinstance(leaf, ir.Value) else s.out).aval), None, leaf) for leaf in leaves]
        addends: list[ir.Atom] = [part.out for part in parts]
        if s.init is not None and not is_zero(s.init, producer):
            addends.append(s.init)
        if len(addends) == 1:
            sums.append(replace(parts[0], out=s.out))
            continue
        sums += parts
        add = ir.Op(_compat.add_p, {}, (), (), backward=loop.backward, source=loop.source)
        joins += graph.chain(add, addends, s.out)
    ops = [op for op in loop.ops if id(op) not in dropped]
    loop = replace(loop, sums=tuple(sums))
    leaves = [
        _ensure_op(leaf, out, out in loop.stacks, inner, ops) for leaf, out in zip(loop.leaves, loop.outs, strict=True)
    ]
    return replace(graph.with_leaves(loop, leaves), ops=tuple(ops)), joins


def _ensure_op(atom: ir.Atom, out: ir.Value, stacked: bool, inner: dict[ir.Value, ir.Op], ops: list[ir.Op]) -> ir.Value:
    """Return a body value that an operation computes: results that are literals or inputs of the body get a copy."""
    if isinstance(atom, ir.Value) and atom in inner:
        return atom
    row = out.aval.update(shape=out.aval.shape[1:]) if stacked else out.aval
    result = ir.Value(atom.aval if isinstance(atom, ir.Value) else row)
    ops.append(ir.Op(_compat.copy_p, {}, (atom,), (result,)))
    return result


def _split_leaf(
    leaf: ir.Atom, inner: dict[ir.Value, ir.Op], uses: collections.Counter[ir.Value], dropped: set[int]
) -> list[ir.Atom]:
    """Return the addends of a leaf that is itself a sum (of cotangents) that nothing else uses."""
    leaves: list[ir.Atom] = []
    stack = [leaf]
    while stack:
        atom = stack.pop()
        op = inner.get(atom) if isinstance(atom, ir.Value) else None
        splittable = isinstance(atom, ir.Value) and uses[atom] == 1 and reorders(atom.aval.dtype)
        addends = _addends_of_cotangent(op, inner) if op is not None and splittable else ()
        if op is not None and addends:
            dropped.add(id(op))  # what it read is now a leaf, and as often read as before
            stack += reversed(addends)
        else:
            leaves.append(atom)
    return leaves


def _addends_of_cotangent(op: ir.Op, inner: dict[ir.Value, ir.Op]) -> Sequence[ir.Atom]:
    """Return an operation's addends if it adds for autodiff, or to zeros outside of tasks; else nothing."""
    if op.prim is _compat.PRIMITIVES["add_any"]:
        return op.ins
    if op.prim is _compat.add_p and op.task is None:
        return [i for i, other in zip(op.ins, reversed(op.ins), strict=True) if is_zero(other, inner)][:1]
    return ()


def _prune(program: ir.Program) -> list[ir.Item]:
    """Return the live items. Loops lose the sums, stacks, operations and inputs that nobody needs."""
    needed = set(ir.values(program.outputs))
    live: list[ir.Item] = []
    for item in reversed(program.items):
        if isinstance(item, ir.Loop):
            sums = tuple(s for s in item.sums if s.out in needed)
            stacks = {o: i for o, i in item.stacks.items() if o in needed}
            read_later = [o for op in item.ops for o in op.outs if o in needed]  # rows that a later loop is linked to
            carries = {k: c for k, c in item.carries.items() if c.out in needed}
            while True:  # a state that a result reads needs the operations that update it
                leaves = [*(s.leaf for s in sums), *stacks.values(), *(c.leaf for c in carries.values())]
                ops = live_with_originals(program, item, [*leaves, *read_later])
                used = {v for op in ops for v in op.reads} | set(ir.values(leaves))
                more = {k: c for k, c in item.carries.items() if k in used and k not in carries}
                if not more:
                    break
                carries |= more
            if not ops and not leaves:
                continue
            item = replace(
                item,
                ops=ops,
                sums=sums,
                stacks=stacks,
                carries={k: c if k in used else replace(c, init=None) for k, c in item.carries.items() if k in carries},
                consts={k: v for k, v in item.consts.items() if k in used},
                slices={k: v for k, v in item.slices.items() if k in used},
                linked={k: v for k, v in item.linked.items() if k in used},
            )
            needed.update(item.linked.values())
        elif not (item.effects or any(o in needed for o in item.outs)):
            continue
        needed.update(item.reads)
        live.append(item)
    live.reverse()
    return live


def widen_sums(program: ir.Program) -> ir.Program:
    """Accumulate the sums of each loop in the dtype that it asks for, and cast them back after the loop.

    Of results that ``fn`` of the loop returns, the loop does so itself. Here are the others: sums of cotangents, where
    the gradient is taken outside of the loop.
    """
    items: list[ir.Item] = []
    for item in program.items:
        items += _widen(item) if isinstance(item, ir.Loop) else [item]
    return replace(program, items=tuple(items))


def _widen(loop: ir.Loop) -> list[ir.Item]:
    before: list[ir.Op] = []
    sums: list[ir.Sum] = []
    after: list[ir.Op] = []
    for s in loop.sums:
        dtype = accumulator(s.out.aval, loop.mark.accumulate)
        if dtype == s.out.aval.dtype or s.init is not None:
            sums.append(s)
            continue
        leaf, total = ir.Value(s.leaf.aval.update(dtype=dtype)), ir.Value(s.out.aval.update(dtype=dtype))
        before.append(_cast(s.leaf, leaf, loop))
        sums.append(replace(s, out=total, leaf=leaf))
        after.append(_cast(total, s.out, loop))
    return [replace(loop, ops=(*loop.ops, *before), sums=tuple(sums)), *after]


def _cast(source: ir.Atom, target: ir.Value, loop: ir.Loop) -> ir.Op:
    params = {"new_dtype": target.aval.dtype, "weak_type": False, "sharding": None}
    prim = primitives.convert_element_type_p
    return ir.Op(prim, params, (source,), (target,), backward=loop.backward, source=loop.source)
