"""Makes loops of microbatch scans: sums of independent iterations, and one loop of a forward and its transpose.

A carry that an iteration returns as ``c + x`` becomes a sum, which adds every ``x`` in the order of the microbatches,
in the carry's dtype, as the scan does. Three things are reordered: addends of one iteration, ``(c + x) + y``, are added
to each other first; initial values other than zero are added last; a sum of cotangents becomes several sums, if its
dtype allows that (`primitives.reorders`). A sum starts at +0.0, so it is never -0.0 as that of the scan may be.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from multimesh import ir
from multimesh.core import _compat
from multimesh.errors import MultiMeshError
from multimesh.ir import graph
from multimesh.ir.primitives import is_zero, lookup, reorders
from multimesh.ir.program import LoopMark
from multimesh.passes.reading.twins import live_with_originals


def from_scan(
    eqn: Any,
    mark: LoopMark,
    uid: str,
    args: Sequence[ir.Value],
    ops: Sequence[ir.Op],
    results: Sequence[ir.Atom],
    ins: Sequence[ir.Atom],
    outs: Sequence[ir.Value],
) -> ir.Loop:
    """Loop of a scan: carries are passed through or summed, or the state that `microbatch` was asked to carry.

    ``args`` and ``results`` are inputs and results of the body, ``ins`` and ``outs`` those of the scan.
    """
    num_consts, num_carry = _compat.scan_counts(eqn.params)
    consts: dict[ir.Value, ir.Atom] = dict(zip(args[:num_consts], ins[:num_consts], strict=True))
    slices: dict[ir.Value, Any] = dict(zip(args[num_consts + num_carry :], ins[num_consts + num_carry :], strict=True))
    producer = graph.makers(ops)
    inner = args[num_consts : num_consts + num_carry]
    sums: list[ir.Sum] = []
    joins: list[ir.Op] = []
    carries: dict[ir.Value, ir.Carry] = {}
    spent: set[int] = set()
    readers = graph.readers(ops)
    returned = collections.Counter(ir.values(results))
    for carry_in, carry_out, init, out in zip(inner, results, ins[num_consts:], outs, strict=False):
        if carry_out is carry_in:
            consts[carry_in] = init
            sums.append(ir.Sum(out, init, None))
            continue
        found = _addends(carry_in, carry_out, producer, readers, returned)
        if found is not None:
            leaves, chain = found
            spent |= chain
            total = leaves[0] if len(leaves) == 1 else ir.Value(out.aval)
            joins += graph.chain(ir.Op(_compat.PRIMITIVES["add_any"], {}, (), ()), leaves, total)
            sums.append(ir.Sum(out, init, total))
        elif mark.carries and not eqn.params["reverse"]:
            carries[carry_in] = ir.Carry(out, init, carry_out)
        else:
            raise MultiMeshError(f"{mark.where or _compat.user_line(eqn.source_info)}: {_not_a_sum(mark)}")
    stacks = dict(zip(outs[num_carry:], results[num_carry:], strict=True))
    kept = tuple(op for op in ops if id(op) not in spent)
    return ir.Loop(mark, uid, (*kept, *joins), consts, slices, tuple(sums), stacks, carries=carries)


def _not_a_sum(mark: LoopMark) -> str:
    if mark.carries:
        return (
            "the gradient goes through the state that microbatches carry (carry=), against the order of the loop; take "
            "it inside of the loop, or stop it at the state: jax.lax.stop_gradient"
        )
    return (
        "a microbatch loop carries a value that is not a plain sum over microbatches; iterations of "
        "multimesh.microbatch must be independent, but for the state in carry="
    )


def _addends(
    carry: ir.Value,
    total: ir.Atom,
    producer: Mapping[ir.Value, ir.Op],
    readers: Mapping[ir.Value, Sequence[ir.Op]],
    returned: Mapping[ir.Value, int],
) -> tuple[list[ir.Atom], set[int]] | None:
    """Addends of ``total = carry + a + b ...`` and the additions of the carry (by id), or None when it is no such sum.

    The carry serves nothing else: neither other operations nor other results of the body. ``readers`` are the
    operations that read a value, and ``returned`` says how many results of the body it is.
    """
    carried = {carry}
    waiting = [carry]
    while waiting:
        for op in readers.get(waiting.pop(), ()):
            waiting += (v for v in op.outs if v not in carried)
            carried.update(op.outs)
    if any(returned.get(v, 0) > (v is total) for v in carried):
        return None
    leaves: list[ir.Atom] = []
    chain: set[int] = set()
    reached = False
    stack: list[ir.Atom] = [total]
    while stack:
        atom = stack.pop()
        if atom is carry:
            if reached:
                return None
            reached = True
        elif not isinstance(atom, ir.Value) or atom not in carried:
            leaves.append(atom)
        else:
            adds = producer.get(atom)
            if adds is None or not lookup(adds).adds:
                return None
            chain.add(id(adds))
            stack += reversed(adds.ins)
    elsewhere = any(id(op) not in chain for v in carried for op in readers.get(v, ()))
    return (leaves, chain) if reached and not elsewhere else None


def fuse(program: ir.Program) -> ir.Program:
    """Join the forward loop of each ``microbatch`` with its transpose, where the backward needs no forward sum."""
    program = _without_passed(program)
    items = list(program.items)
    for second in [i for i in items if isinstance(i, ir.Loop)]:
        before = items[: items.index(second)] if second in items else []
        firsts = [i for i in before if isinstance(i, ir.Loop) and i.uid == second.uid and _can_fuse(i, second, items)]
        if firsts:
            first = next((i for i in firsts if _reads_rows(second, i)), firsts[0])
            items[items.index(second)] = _fused(first, second)
            items.remove(first)
            items = _topological(items)
    return replace(program, items=tuple(ir.live(items, program.outputs)))


def _without_passed(program: ir.Program) -> ir.Program:
    """Read the initial value of a carry that every iteration passes through, and drop the carry."""
    loops = program.loops
    rename: dict[ir.Value, ir.Atom] = {s.out: s.init for loop in loops for s in loop.sums if s.leaf is None}
    items = [
        replace(item, sums=tuple(s for s in item.sums if s.leaf is not None)) if isinstance(item, ir.Loop) else item
        for item in (graph.rename_item(item, rename) for item in program.items)
    ]
    outputs = tuple(graph.resolve(o, rename) for o in program.outputs)
    return replace(program, items=tuple(_topological(items)), outputs=outputs)


def _can_fuse(first: ir.Loop, second: ir.Loop, items: Sequence[ir.Item]) -> bool:
    """Whether ``second`` depends on ``first`` only row by row; ``items`` are in topological order.

    Under `jax.checkpoint` it may read no row that ``first`` made, but those that both are given.
    """
    again = second.backward and not first.backward and not set(first.slices.values()).isdisjoint(second.slices.values())
    if not again and not _reads_rows(second, first):
        return False
    tainted = set(first.outs)
    for item in items[items.index(first) + 1 : items.index(second)]:
        if any(v in tainted for v in item.reads):
            tainted.update(item.outs)
    others = {inner: outer for inner, outer in second.slices.items() if outer not in first.stacks}
    return tainted.isdisjoint(replace(second, slices=others).reads)


def _reads_rows(second: ir.Loop, first: ir.Loop) -> bool:
    return any(outer in first.stacks for outer in second.slices.values())


def _fused(first: ir.Loop, second: ir.Loop) -> ir.Loop:
    rename: dict[ir.Value, ir.Atom] = {
        inner: first.stacks[outer] for inner, outer in second.slices.items() if outer in first.stacks
    }
    second = graph.rename_body(second, rename)
    return replace(
        first,
        ops=first.ops + tuple(replace(op, backward=True) for op in second.ops),
        consts=first.consts | second.consts,
        slices=first.slices | {k: v for k, v in second.slices.items() if k not in rename},
        sums=first.sums + second.sums,
        stacks=first.stacks | second.stacks,
        carries=second.carries | first.carries,
    )


def separate(program: ir.Program) -> ir.Program:
    """Give every sum one leaf: drop what nobody reads, link loops row by row, split sums of several submeshes.

    A gradient of a tied weight is a sum of leaves that different submeshes make; each submesh accumulates its own, and
    additions after the loop join them. Initial values other than zero are added after the loop too.
    """
    program = replace(program, items=tuple(_pruned(program)))
    bodies: dict[ir.Value, ir.Atom] = {}
    producer = graph.makers(i for i in program.items if isinstance(i, ir.Op))
    items: list[ir.Item] = []
    for item in program.items:
        if isinstance(item, ir.Op):
            items.append(item)
            continue
        inits, item = _with_inits(item)
        item = _without_literals(item)
        linked = {inner: bodies[outer] for inner, outer in item.slices.items() if outer in bodies}  # not by their stack
        slices = {inner: outer for inner, outer in item.slices.items() if inner not in linked}
        loop, joins = _one_leaf_each(replace(item, linked=linked, slices=slices), producer)
        bodies.update({o: i for o, i in loop.stacks.items() if isinstance(i, ir.Value)})
        items += [*inits, loop, *joins]
    return replace(program, items=tuple(_pruned(replace(program, items=tuple(items)))))


def _with_inits(loop: ir.Loop) -> tuple[list[ir.Op], ir.Loop]:
    """Copies of initial states that are literals, and the loop that reads them."""
    literals = {k for k, c in loop.carries.items() if c.init is not None and not isinstance(c.init, ir.Value)}
    made = {k: ir.Value(c.out.aval) for k, c in loop.carries.items() if k in literals}
    ops = [ir.Op(_compat.copy_p, {}, (loop.carries[k].init,), (v,), source=loop.source) for k, v in made.items()]
    carries = {k: replace(c, init=made.get(k, c.init)) for k, c in loop.carries.items()}
    return ops, replace(loop, carries=carries)


def _one_leaf_each(loop: ir.Loop, producer: dict[ir.Value, ir.Op]) -> tuple[ir.Loop, list[ir.Op]]:
    uses = collections.Counter(v for op in loop.ops for v in op.reads)
    uses.update(ir.values(loop.leaves))
    inner = graph.makers(loop.ops)
    dropped: set[int] = set()
    sums: list[ir.Sum] = []
    joins: list[ir.Op] = []
    for s in loop.sums:
        leaves = _split_leaf(s.leaf, inner, uses, dropped)
        made = [ir.Sum(ir.Value((leaf if isinstance(leaf, ir.Value) else s.out).aval), None, leaf) for leaf in leaves]
        addends: list[ir.Atom] = [part.out for part in made]
        if s.init is not None and not is_zero(s.init, producer):
            addends.append(s.init)
        if len(addends) == 1:
            sums.append(replace(made[0], out=s.out))
            continue
        sums += made
        add = ir.Op(_compat.add_p, {}, (), (), backward=loop.backward, source=loop.source)
        joins += graph.chain(add, addends, s.out)
    ops = [op for op in loop.ops if id(op) not in dropped]
    loop = replace(loop, sums=tuple(sums))
    leaves = [
        _made(leaf, out, out in loop.stacks, inner, ops) for leaf, out in zip(loop.leaves, loop.outs, strict=True)
    ]
    return replace(graph.with_leaves(loop, leaves), ops=tuple(ops)), joins


def _made(atom: ir.Atom, out: ir.Value, stacked: bool, inner: dict[ir.Value, ir.Op], ops: list[ir.Op]) -> ir.Value:
    """A body value that an operation makes: results that are literals or inputs of the body get a copy."""
    if isinstance(atom, ir.Value) and atom in inner:
        return atom
    row = out.aval.update(shape=out.aval.shape[1:]) if stacked else out.aval
    result = ir.Value(atom.aval if isinstance(atom, ir.Value) else row)
    ops.append(ir.Op(_compat.copy_p, {}, (atom,), (result,)))
    return result


def _without_literals(loop: ir.Loop) -> ir.Loop:
    """Constants that are literals go into the operations that read them."""
    rename = {k: v for k, v in loop.consts.items() if not isinstance(v, ir.Value)}
    return replace(graph.rename_body(loop, rename), consts={k: v for k, v in loop.consts.items() if k not in rename})


def _split_leaf(
    leaf: ir.Atom, inner: dict[ir.Value, ir.Op], uses: collections.Counter[ir.Value], dropped: set[int]
) -> list[ir.Atom]:
    """Addends of a leaf that is itself a sum (of cotangents) which nothing else reads.

    ``uses`` counts reads by operations, sums and stacks.
    """
    leaves: list[ir.Atom] = []
    stack = [leaf]
    while stack:
        atom = stack.pop()
        op = inner.get(atom) if isinstance(atom, ir.Value) else None
        alone = isinstance(atom, ir.Value) and uses[atom] == 1 and reorders(atom.aval.dtype)
        addends = _addends_of_cotangent(op, inner) if op is not None and alone else ()
        if op is not None and addends:
            dropped.add(id(op))  # what it read is now a leaf, and as often read as before
            stack += reversed(addends)
        else:
            leaves.append(atom)
    return leaves


def _addends_of_cotangent(op: ir.Op, inner: dict[ir.Value, ir.Op]) -> Sequence[ir.Atom]:
    """What an operation adds for autodiff, or to zeros outside of tasks; nothing where it adds otherwise."""
    if op.prim is _compat.PRIMITIVES["add_any"]:
        return op.ins
    if op.prim is _compat.add_p and op.task is None:
        return [i for i, other in zip(op.ins, reversed(op.ins), strict=True) if is_zero(other, inner)][:1]
    return ()


def _pruned(program: ir.Program) -> list[ir.Item]:
    """Live items; loops lose the sums, stacks, operations and inputs that nobody needs."""
    needed = set(ir.values(program.outputs))
    kept: list[ir.Item] = []
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
        kept.append(item)
    kept.reverse()
    return kept


def _topological(items: Iterable[ir.Item]) -> list[ir.Item]:
    """Items after what they read; the given order otherwise."""
    items = list(items)
    producer = {o: i for i, item in enumerate(items) for o in item.outs}
    ordered: list[ir.Item] = []
    done: set[int] = set()
    for start in range(len(items)):
        stack = [start]
        while stack:
            i = stack[-1]
            pending = [producer[v] for v in items[i].reads if v in producer and producer[v] not in done]
            if i in done:
                stack.pop()
            elif pending:
                stack += pending
            else:
                done.add(i)
                ordered.append(items[i])
                stack.pop()
    return ordered
