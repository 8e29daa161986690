"""Recomputes cheap values where their inputs are, in place of keeping them (`recompute_residuals`) or sending them.

A forward fragment hands its backward fragment every value that the derivative reads. Many follow from others by
arithmetic that costs less than an array that is held or sent. XLA's fusion avoids that inside a kernel; this does so
between kernels and between submeshes (`recompute_transfers`).

The same operation reads the same values once more, so no arithmetic is reordered. Two kernels may round a chain of
operations differently by a last bit, as with `jax.checkpoint`. A bit decides in the gradient of a maximum, which asks
what equals it: comparisons of two computed floats are not repeated, and what they read only by what does not round.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from multimesh import ir
from multimesh.ir import graph
from multimesh.ir.primitives import lookup

_DEPTH = 24  # operations between a repeated value and what it is computed from

Position = tuple[int, ...]
Maker = dict[ir.Value, tuple[Position, ir.Op]]


def recompute_transfers(program: ir.Program) -> ir.Program:
    """Repeat forward operations of loops on a submesh that uses their results, where that sends fewer bytes.

    For the backward pass, all that the forward pass does not send anyway; for the forward pass only operations outside
    of tasks, as a task runs where it was placed. Forward values that the forward pass sends are at hand on both sides.
    """
    return program.each_loop(
        lambda loop: replace(loop, ops=_recompute(_recompute(loop.ops, backward=False), backward=True))
    )


def _recompute(ops: Sequence[ir.Op], *, backward: bool) -> tuple[ir.Op, ...]:
    maker: Maker = {o: ((i,), op) for i, op in enumerate(ops) for o in op.outs}
    copies: dict[int, list[ir.Op]] = collections.defaultdict(list)
    done = list(ops)

    def allowed(op: ir.Op) -> bool:
        return not op.backward and (backward or op.task is None)

    for mesh in dict.fromkeys(op.mesh for op in ops):
        indices = [i for i, op in enumerate(ops) if op.mesh == mesh]
        readers = [i for i in indices if ops[i].backward == backward]
        forward = {v for i in indices if not ops[i].backward for v in ops[i].reads}
        results = {o for i in indices for o in ops[i].outs}
        at_hand = results | forward if backward else results
        crossing = dict.fromkeys(
            v for i in readers for v in ops[i].reads if v in maker and v not in at_hand and allowed(maker[v][1])
        )
        if not crossing:
            continue
        own_inputs = {v for i in indices for v in ops[i].reads if v not in maker}
        firm = firm_values([ops[i] for i in readers], maker)
        local = Localiser(maker, own_inputs, {*crossing, *results, *forward}, firm, allowed)
        rename = local.run(crossing)
        for (position, *_), copy in local.copies:
            copies[position].append(replace(copy, mesh=mesh, backward=backward))
        for i in readers if backward else indices:
            done[i] = graph.rename_op(done[i], rename)
    return tuple(op for i, original in enumerate(done) for op in (original, *copies[i]))


def firm_values(ops: Sequence[ir.Op], maker: Maker) -> set[ir.Value]:
    """Return values that feed a comparison. A rounding difference could flip its result, so they are not recomputed."""
    firm: set[ir.Value] = set()
    for op in reversed(ops):
        if _decides(op, maker) or any(o in firm for o in op.outs):
            firm.update(op.reads)
    stack = list(firm)
    while stack:
        entry = maker.get(stack.pop())
        if entry is not None and not _rounds(entry[1]):
            more = set(entry[1].reads) - firm
            firm |= more
            stack += more
    return firm


def _decides(op: ir.Op, maker: Maker) -> bool:
    """Return whether an operation compares two floats of which neither is a constant."""
    return lookup(op).compares and not any(_is_constant(i, maker) for i in op.ins) and _inexact(op.ins[0])


def _rounds(op: ir.Op) -> bool:
    return not lookup(op).exact and any(map(_inexact, op.outs))


def _inexact(atom: ir.Atom) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _is_constant(atom: ir.Atom, maker: Maker) -> bool:
    while isinstance(atom, ir.Value):
        if atom not in maker or len(maker[atom][1].ins) != 1:
            return False
        (atom,) = maker[atom][1].ins
    return True


@dataclass
class Localiser:
    """The choice of operations to repeat, the latest first: those that they read are still undecided then."""

    maker: Maker
    own_inputs: set[ir.Value]
    at_hand: set[ir.Value]
    firm: set[ir.Value]
    allowed: Callable[[ir.Op], bool]
    copies: list[tuple[Position, ir.Op]] = field(default_factory=list)
    repeated: dict[int, ir.Op] = field(default_factory=dict)
    computed: set[ir.Value] = field(default_factory=set)

    def run(self, crossing: Iterable[ir.Value]) -> dict[ir.Value, ir.Atom]:
        """Return new names of the values that are recomputed here, and fill ``copies`` with their operations."""
        for value in sorted(crossing, key=lambda v: self.maker[v][0], reverse=True):
            op = self._op(value)
            siblings = [o for o in op.outs if o in self.at_hand]
            if value not in self.at_hand or not self._may_repeat(op):
                continue
            self.at_hand.difference_update(siblings)
            costs: dict[ir.Value, int] = {}
            saved = sum(v.nbytes for v in siblings)
            cost = sum(self._cost(v, costs, _DEPTH) for v in dict.fromkeys(op.reads))
            if cost < saved or (cost == saved and len(siblings) > 1):  # equal bytes: one array rather than several
                self._repeat(op, costs)
            else:
                self.at_hand.update(siblings)
        rename: dict[ir.Value, ir.Atom] = {}
        for op in sorted(self.repeated.values(), key=lambda op: self.maker[op.outs[0]][0]):
            self.copies.append((self.maker[op.outs[0]][0], graph.repeat_op(op, rename)))
        return rename

    def _op(self, value: ir.Value) -> ir.Op:
        return self.maker[value][1]

    def _may_repeat(self, op: ir.Op) -> bool:
        if not lookup(op).cheap or op.effects or not self.allowed(op) or _decides(op, self.maker):
            return False
        return self.firm.isdisjoint(op.outs) or not _rounds(op)

    def _here(self, value: ir.Value) -> bool:
        """Return whether a value is free: already used here, or an input of the loop that this submesh has anyway."""
        return value in self.at_hand or (value not in self.maker and value in self.own_inputs)

    def _cost(self, value: ir.Value, costs: dict[ir.Value, int], depth: int) -> int:
        """Return the fewest bytes that must cross to this fragment so that it can have ``value``."""
        if value not in costs:
            if self._here(value):
                costs[value] = 0
            elif value not in self.maker or not depth or not self._may_repeat(self._op(value)):
                costs[value] = value.nbytes
            else:
                inputs = sum(self._cost(v, costs, depth - 1) for v in dict.fromkeys(self._op(value).reads))
                costs[value] = min(inputs, value.nbytes)
        return costs[value]

    def _repeat(self, op: ir.Op, costs: dict[ir.Value, int]) -> None:
        self.repeated[id(op)] = op
        self.computed.update(op.outs)
        for v in op.reads:
            if self._here(v) or v in self.computed:
                continue
            by = self._op(v) if v in self.maker else None
            if by and self._may_repeat(by) and sum(costs.get(i, i.nbytes) for i in dict.fromkeys(by.reads)) < v.nbytes:
                self._repeat(by, costs)
            else:
                self.at_hand.add(v)
