"""Make loops of microbatch scans.

A carry that an iteration returns as ``c + x`` becomes a sum, which adds every ``x`` in the order of the microbatches,
in the carry's dtype, as the scan does. Addends of one iteration, ``(c + x) + y``, are added to each other first. A sum
starts at +0.0, so it is never -0.0 as that of the scan may be.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from multimesh import ir
from multimesh.core import _compat
from multimesh.errors import MultiMeshError
from multimesh.ir import graph
from multimesh.ir.primitives import lookup
from multimesh.ir.program import LoopMark


def make_loop(
    eqn: Any,
    mark: LoopMark,
    uid: str,
    args: Sequence[ir.Value],
    ops: Sequence[ir.Op],
    results: Sequence[ir.Atom],
    ins: Sequence[ir.Atom],
    outs: Sequence[ir.Value],
) -> ir.Loop:
    """Return the loop of a scan. A carry is a constant, passed through, a sum, or the state of `microbatch`."""
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
            continue
        addends = _addends(carry_in, carry_out, producer, readers, returned)
        if addends is not None:
            leaves, chain = addends
            spent |= chain
            total = leaves[0] if len(leaves) == 1 else ir.Value(out.aval)
            joins += graph.chain(ir.Op(_compat.PRIMITIVES["add_any"], {}, (), ()), leaves, total)
            sums.append(ir.Sum(out, init, total))
        elif mark.carries and not eqn.params["reverse"]:
            carries[carry_in] = ir.Carry(out, init, carry_out)
        else:
            raise MultiMeshError(f"{mark.where or _compat.user_line(eqn.source_info)}: {_not_a_sum(mark)}")
    stacks = dict(zip(outs[num_carry:], results[num_carry:], strict=True))
    other_ops = tuple(op for op in ops if id(op) not in spent)
    return ir.Loop(mark, uid, (*other_ops, *joins), consts, slices, tuple(sums), stacks, carries=carries)


def _not_a_sum(mark: LoopMark) -> str:
    if mark.carries:
        return (
            "the gradient goes through the state that microbatches carry (carry=, or a reduction that is no sum), "
            "against the order of the loop; take it inside of the loop, or stop it at the state: jax.lax.stop_gradient"
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
    """Return the addends of ``total = carry + a + b ...`` and the ids of the additions; None if it is no such sum."""
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


def sort_items(items: Iterable[ir.Item]) -> list[ir.Item]:
    """Sort items after those whose values they use, in the given order otherwise."""
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
