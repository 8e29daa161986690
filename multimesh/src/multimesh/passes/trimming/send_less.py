"""Recompute cheap values on the submesh that reads them, where that sends fewer bytes."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace

from multimesh import ir
from multimesh.ir import graph
from multimesh.passes.trimming.recompute import Localiser, Maker, firm_values


def send_less(program: ir.Program) -> ir.Program:
    """Repeat forward operations of loops on a submesh that uses their results, where that sends fewer bytes.

    For the backward pass, all that the forward pass does not send anyway; for the forward pass only operations outside
    of tasks, as a task runs where it was placed. Forward values that the forward pass sends are at hand on both sides.
    """
    return program.each_loop(
        lambda loop: replace(loop, ops=_send_less(_send_less(loop.ops, backward=False), backward=True))
    )


def _send_less(ops: Sequence[ir.Op], *, backward: bool) -> tuple[ir.Op, ...]:
    maker: Maker = {o: ((i,), op) for i, op in enumerate(ops) for o in op.outs}
    copies: dict[int, list[ir.Op]] = collections.defaultdict(list)
    done = list(ops)

    def allowed(op: ir.Op) -> bool:
        return not op.backward and (backward or op.task is None)

    for mesh in dict.fromkeys(op.mesh for op in ops):
        mine = [i for i, op in enumerate(ops) if op.mesh == mesh]
        readers = [i for i in mine if ops[i].backward == backward]
        forward = {v for i in mine if not ops[i].backward for v in ops[i].reads}
        made = {o for i in mine for o in ops[i].outs}
        at_hand = made | forward if backward else made
        crossing = dict.fromkeys(
            v for i in readers for v in ops[i].reads if v in maker and v not in at_hand and allowed(maker[v][1])
        )
        if not crossing:
            continue
        own_inputs = {v for i in mine for v in ops[i].reads if v not in maker}
        firm = firm_values([ops[i] for i in readers], maker)
        local = Localiser(maker, own_inputs, {*crossing, *made, *forward}, firm, allowed)
        rename = local.run(crossing)
        for (position, *_), copy in local.copies:
            copies[position].append(replace(copy, mesh=mesh, backward=backward))
        for i in readers if backward else mine:
            done[i] = graph.rename_op(done[i], rename)
    return tuple(op for i, given in enumerate(done) for op in (given, *copies[i]))
