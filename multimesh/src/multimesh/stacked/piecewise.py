"""Piecewise computation of an operation's results whose operands were joined from several submeshes.

``ravel_pytree`` concatenates the gradients of all stages, an optimizer updates the flat vector, and slices of it are
the tree again. No device needs the vector. For ``c = concatenate(a, b)`` these hold:

* elementwise ``f(c, s) = concatenate(f(a, s), f(b, s))`` for scalars ``s``, for operands that are cut as ``c`` is, and
  for those made from scalars (noise), which are sliced;
* ``c[i:j]`` along the dimension of the pieces is slices of ``a`` and ``b``;
* ``sum(c) = sum(a) + sum(b)``, and so other reductions, up to the order of additions (`primitives.reorders`);
* the sum over microbatches of ``c`` is the concatenation of the sums.

Any other reader gets the concatenation. A ``lax.cond`` over several submeshes becomes both branches and a choice
between their results; placement then decides for each operation inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from jax.extend.core import primitives

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.ir import graph
from multimesh.ir.primitives import elementwise, is_small, links, reorders
from multimesh.ir.program import all_ops
from multimesh.passes.reading.inline_calls import flatten
from multimesh.stacked.row_blocks import Blocks

_COMBINES = {
    "reduce_sum": primitives.add_p,
    "reduce_max": primitives.max_p,
    "reduce_min": primitives.min_p,
    "reduce_prod": primitives.mul_p,
    "reduce_and": primitives.and_p,
    "reduce_or": primitives.or_p,
}
_SUMS = frozenset(("reduce_sum", "reduce_prod", "dot_general"))


_ALONG = frozenset(("broadcast_in_dim", "transpose", "reshape", "squeeze", "dot_general", *_COMBINES))
"""Operations that may keep the dimension of the pieces: each piece of the result is made of one of the operand."""


class Pieces(NamedTuple):
    """A value as the concatenation of others along a dimension; those of a ``stack`` are on its submeshes."""

    dim: int
    parts: tuple[ir.Value, ...]
    stack: Blocks | None = None

    @property
    def cuts(self) -> tuple[int, ...]:
        """The start of each part, and the end of the last one."""
        return (0, *itertools.accumulate(part.aval.shape[self.dim] for part in self.parts))


def in_pieces(program: ir.Program, mixed: Collection[ir.Value]) -> tuple[ir.Program, set[ir.Value]]:
    """Rewrite the users of ``mixed`` first results of concatenations and conds. Return also which not to try again."""
    ops = list(all_ops(program))
    readers = graph.readers(ops)
    consts = (pair for loop in program.loops for pair in loop.consts.items())
    alias = group((outer, inner) for inner, outer in consts if isinstance(outer, ir.Value))
    conds = {out for op in ops if op.prim.name == "cond" for out in op.outs[:1]}
    summed = set(ir.values(s.leaf for loop in program.loops for s in loop.sums))
    chosen = {v for v in mixed if v in conds or _gains(v, readers, alias, summed)}
    if not chosen:
        return program, set(mixed)
    cutter = _Cutter(dict.fromkeys(chosen))
    items = list(cutter.items(program))
    outputs = []
    for atom in program.outputs:
        ops, (joined,) = cutter.join([atom])
        items += ops
        outputs.append(joined)
    return replace(program, items=tuple(ir.live(items, outputs)), outputs=tuple(outputs)), {*mixed, *cutter.joined}


def cut_arguments(
    program: ir.Program, arguments: Mapping[ir.Value, Pieces], mixed: Mapping[ir.Value, Blocks]
) -> tuple[list[ir.Item], list[ir.Atom | Pieces], dict[ir.Value, Blocks]]:
    """Rewrite the users of arguments in pieces, and of concatenations like stacks, piece by piece.

    Return the new items, the results, of which some are in pieces, and whole values that were cut like a stack.
    """
    cutter = _Cutter(mixed, arguments)
    items = list(cutter.items(program))
    return items, [cutter.resolve(atom) for atom in program.outputs], cutter.like


def _gains(
    value: ir.Value,
    readers: Mapping[ir.Value, list[ir.Op]],
    alias: Mapping[ir.Value, list[ir.Value]],
    summed: Collection[ir.Value],
) -> bool:
    """Return whether elementwise operations lead from a value to a slice, a reduction, or a sum of it."""
    visited = {value}
    stack = [value]
    while stack:
        v = stack.pop()
        outside = [op for op in readers[v] if op.task is None]
        if v in summed or any(op.prim.name in {"slice", "split", "dot_general", *_COMBINES} for op in outside):
            return True
        followers = [*alias[v], *(o for op in outside if elementwise(op) for o in op.outs)]
        stack += [o for o in followers if o not in visited]
        visited.update(followers)
    return False


class _Cutter:
    """A rewrite of operations in order. It knows which values are in pieces, and their new names."""

    def __init__(
        self, chosen: Mapping[ir.Value, Blocks | None], arguments: Mapping[ir.Value, Pieces] = MappingProxyType({})
    ):
        self.joined: set[ir.Value] = set()
        self.like: dict[ir.Value, Blocks] = {}  # whole values that are cut as a stack is
        self._chosen, self._given = chosen, arguments
        self._of_scalars: set[ir.Value] = set()  # may be made anywhere
        self._pieces: dict[ir.Value, Pieces] = dict(arguments)
        self._rename: dict[ir.Value, ir.Atom] = {}

    def items(self, program: ir.Program) -> Iterator[ir.Item]:
        """Yield the items that replace those of a program."""
        rows = program.linked
        for item in program.items:
            yield from self.loop(item, rows) if isinstance(item, ir.Loop) else self.op(item)

    def resolve(self, atom: ir.Atom) -> ir.Atom | Pieces:
        """Return the pieces of a value, or what it is called now."""
        atom = graph.resolve(atom, self._rename)
        return self._pieces.get(atom, atom) if isinstance(atom, ir.Value) else atom

    def op(self, op: ir.Op) -> Iterator[ir.Op]:
        """Yield the operations that replace an operation."""
        new = graph.rename_op(op, self._rename)
        if new.task is None and all(is_small(v) or v in self._of_scalars for v in new.reads):
            self._of_scalars.update(new.outs)
        if op.prim.name == "cond" and op.outs and (op.outs[0] in self._chosen or self._reads_stack(new)):
            inside = _select_branches(new)
            if inside is None or not self._reads_stack(new):
                joins, ins = self.join(new.ins)
                yield from joins
                new = replace(new, ins=tuple(ins))
                inside = inside and _select_branches(new)
            if inside is None:
                self.joined.add(new.outs[0])
                yield new
            for inner in inside or ():
                yield from self.op(inner)
        elif op.prim.name == "concatenate" and op.outs[0] in self._chosen and len(list(new.reads)) == len(new.ins):
            dim = new.params["dimension"]
            parts = (part for v in new.reads for part in self._parts(v, dim))  # of concatenations, their pieces
            nonempty = tuple(part for part in parts if part.aval.shape[dim])
            self._pieces[new.outs[0]] = Pieces(dim, nonempty, self._chosen[new.outs[0]])
        elif not any(v in self._pieces for v in new.reads):
            yield new
        else:
            rows = bool(self._given) and op.prim.name in ("slice", "split")  # of a stack, which a task cuts itself
            done = self._piecewise(new) if (new.task is None or rows) and not new.effects else None
            if done is None:
                ops, ins = self.join(new.ins)
                yield from ops
                done = [replace(new, ins=tuple(ins))]
            yield from done

    def _reads_stack(self, op: ir.Op) -> bool:
        return op.task is None and any(v in self._pieces and self._pieces[v].stack for v in op.reads)

    def _parts(self, value: ir.Value, dim: int) -> tuple[ir.Value, ...]:
        pieces = self._pieces.get(value)
        return pieces.parts if pieces is not None and pieces.dim == dim else (value,)

    def join(self, atoms: Iterable[ir.Atom]) -> tuple[list[ir.Op], list[ir.Atom]]:
        """Return operations that concatenate values that are in pieces, and the whole values."""
        ops: list[ir.Op] = []
        result: list[ir.Atom] = []
        for atom in atoms:
            atom = graph.resolve(atom, self._rename)
            if isinstance(atom, ir.Value) and atom in self._pieces:
                pieces = self._pieces[atom]
                if atom not in self._given:
                    del self._pieces[atom]
                elif atom in self.joined:
                    result.append(atom)
                    continue
                ops.append(ir.Op(primitives.concatenate_p, {"dimension": pieces.dim}, pieces.parts, (atom,)))
                self.joined.add(atom)
            result.append(atom)
        return ops, result

    def loop(self, loop: ir.Loop, rows: set[ir.Value]) -> Iterator[ir.Item]:
        """Yield the loop rewritten so that it reads pieces and sums pieces, with the operations that this needs."""
        loop = graph.rename_loop(loop, self._rename)
        before, _ = self.join([*loop.slices.values(), *ir.values(c.init for c in loop.carries.values())])
        yield from before
        consts: dict[ir.Value, ir.Atom] = {}
        for inner, outer in loop.consts.items():
            if isinstance(outer, ir.Value) and outer in self._pieces:
                dim, parts, stack = self._pieces[outer]
                inner_parts = tuple(ir.Value(part.aval) for part in parts)
                consts.update(zip(inner_parts, parts, strict=True))
                self._pieces[inner] = Pieces(dim, inner_parts, stack)
            else:
                consts[inner] = outer
        ops = [new for op in loop.ops for new in self.op(op)]
        read_by_row = [o for op in loop.ops for o in op.outs if o in rows]
        queue = [*loop.stacks.values(), *(c.leaf for c in loop.carries.values())]
        joined, wholes = self.join([*queue, *read_by_row])
        ops += joined
        stacks = dict(zip(loop.stacks, wholes, strict=False))
        last = zip(loop.carries.items(), wholes[len(stacks) :], strict=False)
        carries = {inner: replace(c, leaf=leaf) for (inner, c), leaf in last}
        sums: list[ir.Sum] = []
        for s in loop.sums:
            leaf = graph.resolve(s.leaf, self._rename)
            if isinstance(leaf, ir.Value) and leaf in self._pieces:
                dim, parts, stack = self._pieces[leaf]
                totals = tuple(ir.Value(part.aval) for part in parts)
                sums += [ir.Sum(total, None, part) for total, part in zip(totals, parts, strict=True)]
                self._pieces[s.out] = Pieces(dim, totals, stack)
            else:
                sums.append(replace(s, leaf=leaf))
        live = ir.live(ops, [*(s.leaf for s in sums), *wholes])
        linked = {inner: graph.resolve(outer, self._rename) for inner, outer in loop.linked.items()}
        result = replace(loop, ops=tuple(live), consts=consts, sums=tuple(sums), stacks=stacks)
        yield replace(result, carries=carries, linked=linked)

    def _piecewise(self, op: ir.Op) -> list[ir.Op] | None:
        """Return an operation for each piece of the operand, in place of one; None if it needs the whole operand."""
        if elementwise(op):
            return self._pointwise(op)
        along = self._along(op) if op.prim.name in _ALONG else None
        if along is not None:
            return along
        first = op.ins[0]
        pieces = self._pieces.get(first) if isinstance(first, ir.Value) else None
        if pieces is None:
            return None
        if op.prim.name == "slice" and not any(stride != 1 for stride in op.params["strides"] or ()):
            return self._slice(op, pieces, op.params["start_indices"], op.params["limit_indices"], op.outs[0])
        if op.prim.name == "split" and op.params["axis"] == pieces.dim:
            return self._split(op, pieces)
        if op.prim.name in _SUMS and not reorders(op.outs[0].aval.dtype):
            return None
        if op.prim.name in _COMBINES and pieces.dim in op.params["axes"]:
            return self._combined(op, [(part,) for part in pieces.parts], _COMBINES[op.prim.name])
        if op.prim.name == "dot_general":
            (lhs, rhs), _ = op.params["dimension_numbers"]
            other = self._pieces.get(op.ins[1])
            aligned = other is not None and other.cuts == pieces.cuts
            if other is not None and aligned and (pieces.dim, other.dim) in zip(lhs, rhs, strict=True):
                return self._combined(op, list(zip(pieces.parts, other.parts, strict=True)), primitives.add_p)
        return None

    def _pointwise(self, op: ir.Op) -> list[ir.Op] | None:
        cut = {v: self._pieces[v] for v in op.reads if v in self._pieces}
        dim, parts, _ = next(iter(cut.values()))
        cuts = next(iter(cut.values())).cuts
        stack = next((p.stack for p in cut.values() if p.stack is not None), None)
        shape = op.outs[0].aval.shape
        if any((p.dim, p.cuts) != (dim, cuts) for p in cut.values()):
            return None
        others = [v for v in op.reads if v not in cut and v.aval.shape != () and (not stack or v.aval.shape[dim] > 1)]
        if stack is not None:
            self.like.update((v, stack) for v in others if v not in self._of_scalars)
        elif any(v.aval.shape != shape or v not in self._of_scalars for v in others):
            return None
        ops: list[ir.Op] = []
        results = []
        for n, part in enumerate(parts):
            ins = []
            for atom in op.ins:
                if isinstance(atom, ir.Value) and atom in cut:
                    atom = cut[atom].parts[n]
                elif isinstance(atom, ir.Value) and atom in others:
                    atom = graph.take_rows(op, atom, dim, cuts[n], cuts[n + 1], ops)
                ins.append(atom)
            size = (*shape[:dim], part.aval.shape[dim], *shape[dim + 1 :])
            results.append(ir.Value(op.outs[0].aval.update(shape=size)))
            ops.append(replace(op, ins=tuple(ins), outs=(results[-1],)))
        self._pieces[op.outs[0]] = Pieces(dim, tuple(results), stack)
        return ops

    def _along(self, op: ir.Op) -> list[ir.Op] | None:
        """Return the operation once for each piece of a stack; None if its result loses the dimension of pieces."""
        (x, *others), out = op.ins, op.outs[0]
        if not isinstance(x, ir.Value) or x not in self._pieces or any(v in self._pieces for v in ir.values(others)):
            return None
        dim, parts, stack = self._pieces[x]
        linked = next((link for link in links(op) if (x, dim) in link), ())
        at = next((d for v, d in linked if v is out), None)
        if stack is None or at is None or len(linked) != 2:
            return None
        shapes = []
        for part in parts:
            rows, remainder = divmod(part.aval.shape[dim] * out.aval.shape[at], x.aval.shape[dim])
            if remainder:
                return None
            shapes.append((*out.aval.shape[:at], rows, *out.aval.shape[at + 1 :]))
        size = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}.get(op.prim.name)
        results = tuple(ir.Value(out.aval.update(shape=shape)) for shape in shapes)
        self._pieces[out] = Pieces(at, results, replace(stack, dim=at, rows=out.aval.shape[at] // len(stack.meshes)))
        return [
            replace(op, ins=(part, *others), outs=(result,), params=op.params | ({size: shape} if size else {}))
            for part, result, shape in zip(parts, results, shapes, strict=True)
        ]

    def _slice(
        self, op: ir.Op, pieces: Pieces, starts: Sequence[int], limits: Sequence[int], out: ir.Value
    ) -> list[ir.Op] | None:
        """Name a slice after the parts that it takes, and return the operations that cut them. None if it is empty."""
        dim = pieces.dim
        ops: list[ir.Op] = []
        slices: list[ir.Value] = []
        for part, begin, end in zip(pieces.parts, pieces.cuts, pieces.cuts[1:], strict=False):
            low, high = max(starts[dim], begin), min(limits[dim], end)
            if low >= high:
                continue
            lows, highs = list(starts), list(limits)
            lows[dim], highs[dim] = low - begin, high - begin
            slices.append(graph.take_slice(op, part, lows, highs, ops))
        if len(slices) == 1:
            self._rename[out] = slices[0]
        elif slices:
            self._pieces[out] = Pieces(dim, tuple(slices), pieces.stack)
        return ops if slices else None

    def _split(self, op: ir.Op, pieces: Pieces) -> list[ir.Op] | None:
        shape = op.ins[0].aval.shape
        ops: list[ir.Op] = []
        ends = list(itertools.accumulate(op.params["sizes"]))
        if 0 in op.params["sizes"]:
            return None
        for out, size, end in zip(op.outs, op.params["sizes"], ends, strict=True):
            starts, limits = [0] * len(shape), list(shape)
            starts[pieces.dim], limits[pieces.dim] = end - size, end
            ops += self._slice(op, pieces, starts, limits, out) or ()
        return ops

    def _combined(self, op: ir.Op, operands: Sequence[tuple[ir.Value, ...]], combine: object) -> list[ir.Op]:
        """Return the reduction of each part, and the operations that combine these into one result."""
        out = op.outs[0]
        partial = [ir.Value(out.aval) for _ in operands] if len(operands) > 1 else [out]
        ops = [replace(op, ins=ins, outs=(part,)) for ins, part in zip(operands, partial, strict=True)]
        return ops + graph.chain(replace(op, prim=combine, params={}, ctx=None), partial, out)


def _select_branches(op: ir.Op) -> tuple[ir.Op, ...] | None:
    """Replace a ``cond`` by all branches and a select, in which results depend on less; None if it captures arrays."""
    ops: list[ir.Op] = []
    cases: list[list[ir.Atom]] = []
    for branch in op.params["branches"]:
        flat = flatten(op, branch, op.ins[1:])
        if flat is None:
            return None
        ops += flat[0]
        cases.append(flat[1])
    for out, *atoms in zip(op.outs, *cases, strict=True):
        all_equal = all(atom is atoms[0] for atom in atoms)
        prim, ins = (_compat.copy_p, atoms[:1]) if all_equal else (primitives.select_n_p, [op.ins[0], *atoms])
        ops.append(replace(op, prim=prim, params={}, ins=tuple(ins), outs=(out,), ctx=None))
    return tuple(ops)
