"""Recompute instead of keeping: elementwise operations are repeated where their inputs are at hand.

A forward fragment hands its backward fragment every intermediate value that the derivative reads. Many follow from
others by arithmetic that costs less than an array that is held (or sent) and handed to a program: what XLA's own
fusion does inside one program, done here between programs.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import Mesh

from multimesh import ir
from multimesh.passes.fragment import Fragment, with_interfaces

ELEMENTWISE = frozenset(
    (
        *("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "abs", "sign", "square", "integer_pow"),
        *("sqrt", "rsqrt", "cbrt", "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "sin", "cos"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "select_n", "is_finite", "pow"),
        *("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota"),
        *("copy", "copy_p", "slice", "split", "rev", "real", "imag"),
    )
)
_DEPTH = 24  # operations between a repeated value and what it is computed from

_Maker = dict[ir.Value, tuple[Fragment, int]]


def recompute(fragments: Sequence[Fragment], results: set[ir.Value]) -> tuple[Fragment, ...]:
    """Repeat elementwise operations in the fragments that read their results, where that takes fewer bytes across."""
    maker: _Maker = {o: (part, i) for part in fragments for i, op in enumerate(part.ops) for o in op.outs}
    inputs: dict[Mesh, set[ir.Value]] = collections.defaultdict(set)  # of the loop, that a submesh reads anyway
    for part in fragments:
        inputs[part.mesh].update(v for v in part.ins if v not in maker)
    return with_interfaces([_Localiser(part, maker, inputs[part.mesh]).run() for part in fragments], results)


class _Localiser:
    """Rewrites one fragment: latest inputs first, so that what they are computed from is still to be decided."""

    def __init__(self, part: Fragment, maker: _Maker, own_inputs: set[ir.Value]):
        self._part, self._maker, self._own_inputs = part, maker, own_inputs
        self._at_hand = set(part.ins)
        self._repeated: dict[tuple[int, int], ir.Op] = {}
        self._made: set[ir.Value] = set()

    def run(self) -> Fragment:
        crossing = [v for v in self._part.ins if v in self._maker]
        for value in sorted(crossing, key=self._position, reverse=True):
            op = self._op(value)
            siblings = [o for o in op.outs if o in self._at_hand]
            if value not in self._at_hand or not self._may_repeat(op):
                continue
            self._at_hand.difference_update(siblings)
            costs: dict[ir.Value, int] = {}
            saved = sum(v.nbytes for v in siblings)
            cost = sum(self._cost(v, costs, _DEPTH) for v in dict.fromkeys(op.reads))
            if cost < saved or (cost == saved and len(siblings) > 1):  # equal bytes: one array rather than several
                self._repeat(op, costs)
            else:
                self._at_hand.update(siblings)
        return self._rewritten() if self._repeated else self._part

    def _op(self, value: ir.Value) -> ir.Op:
        origin, index = self._maker[value]
        return origin.ops[index]

    def _position(self, value: ir.Value) -> tuple[int, int]:
        origin, index = self._maker[value]
        return origin.level, index

    def _may_repeat(self, op: ir.Op) -> bool:
        """Only operations of this submesh: a task runs where it was placed."""
        return op.prim.name in ELEMENTWISE and not op.effects and op.mesh == self._part.mesh

    def _here(self, value: ir.Value) -> bool:
        """Whether a value costs nothing: already read, or an input of the loop that this submesh has anyway."""
        return value in self._at_hand or (value not in self._maker and value in self._own_inputs)

    def _cost(self, value: ir.Value, costs: dict[ir.Value, int], depth: int) -> int:
        """Fewest bytes that must cross so that ``value`` can be had here."""
        if value not in costs:
            if self._here(value):
                costs[value] = 0
            elif value not in self._maker or not depth or not self._may_repeat(self._op(value)):
                costs[value] = value.nbytes
            else:
                inputs = sum(self._cost(v, costs, depth - 1) for v in dict.fromkeys(self._op(value).reads))
                costs[value] = min(inputs, value.nbytes)
        return costs[value]

    def _repeat(self, op: ir.Op, costs: dict[ir.Value, int]) -> None:
        origin, index = self._maker[op.outs[0]]
        self._repeated[id(origin), index] = op
        self._made.update(op.outs)
        for v in op.reads:
            if self._here(v) or v in self._made:
                continue
            if v in self._maker and self._may_repeat(self._op(v)) and self._inputs_cost(v, costs) < v.nbytes:
                self._repeat(self._op(v), costs)
            else:
                self._at_hand.add(v)

    def _inputs_cost(self, value: ir.Value, costs: dict[ir.Value, int]) -> int:
        return sum(costs.get(v, v.nbytes) for v in dict.fromkeys(self._op(value).reads))

    def _rewritten(self) -> Fragment:
        part = self._part
        copies: list[ir.Op] = []
        rename: dict[ir.Value, ir.Value] = {}
        for op in sorted(self._repeated.values(), key=lambda op: self._position(op.outs[0])):
            outs = tuple(ir.Value(o.aval) for o in op.outs)
            copies.append(replace(_renamed(op, rename), outs=outs))
            rename.update(zip(op.outs, outs, strict=True))
        return replace(part, ops=(*copies, *(_renamed(op, rename) for op in part.ops)))


def _renamed(op: ir.Op, rename: dict[ir.Value, ir.Value]) -> ir.Op:
    return replace(op, ins=tuple(rename.get(i, i) if isinstance(i, ir.Value) else i for i in op.ins))
