"""Which dimensions of operands and results are the same dimension: what a layout of one says about the other.

A link says no more than that: layouts never change a result, so an operation that is not known here links nothing that
it need not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from multimesh import ir
from multimesh.passes.recompute import ELEMENTWISE

Dim = tuple[ir.Value, int]
Group = tuple[Dim, ...]  # dimensions that go together


def links(op: ir.Op) -> Iterator[Group]:
    """Groups of dimensions that an operation keeps together."""
    rule = _RULES.get(op.prim.name, _same_shape if op.prim.name in ELEMENTWISE | _ROWWISE else None)
    if rule is None:
        return
    for group in rule(op):
        kept = tuple((atom, dim) for atom, dim in group if isinstance(atom, ir.Value))
        if len(kept) > 1:
            yield kept


_Groups = Iterator[Sequence[tuple[ir.Atom, int]]]
_ROWWISE = frozenset(  # more operations whose result has the shape of an operand
    (
        *("optimization_barrier", "reduce_precision", "clamp", "rem", "round", "floor", "ceil", "atan2", "tan"),
        *("erf_inv", "sinh", "cosh", "cumsum", "cumlogsumexp", "cummax", "cumprod"),
    )
)


def _shape(atom: ir.Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _same_shape(op: ir.Op) -> _Groups:
    """Elementwise; several results (a barrier) each go with their own operand."""
    if len(op.outs) > 1:
        for given, out in zip(op.ins, op.outs, strict=False):
            yield from ([(given, d), (out, d)] for d in range(len(_shape(out))))
        return
    (out,) = op.outs
    alike = [i for i in op.ins if len(_shape(i)) == len(_shape(out))]
    for d, size in enumerate(_shape(out)):
        yield [(out, d), *((i, d) for i in alike if _shape(i)[d] == size)]


def _broadcast(op: ir.Op) -> _Groups:
    x, out = op.ins[0], op.outs[0]
    for d, at in enumerate(op.params["broadcast_dimensions"]):
        if _shape(x)[d] == _shape(out)[at]:
            yield [(x, d), (out, at)]


def _transpose(op: ir.Op) -> _Groups:
    yield from ([(op.ins[0], d), (op.outs[0], at)] for at, d in enumerate(op.params["permutation"]))


def _reshape(op: ir.Op) -> _Groups:
    """Dimensions that stay; of those that are split or merged the outermost, along which shards stay contiguous."""
    x, out = op.ins[0], op.outs[0]
    old, new = _shape(x), _shape(out)
    i = j = 0
    while i < len(old) and j < len(new):
        i_end, j_end, left, right = i + 1, j + 1, old[i], new[j]
        while left != right and (i_end < len(old) or j_end < len(new)):
            if left < right and i_end < len(old):
                left, i_end = left * old[i_end], i_end + 1
            elif j_end < len(new):
                right, j_end = right * new[j_end], j_end + 1
            else:
                return
        yield [(x, next((d for d in range(i, i_end) if old[d] > 1), i)), (out, _outermost(new, j, j_end))]
        i, j = i_end, j_end


def _outermost(shape: Sequence[int], start: int, end: int) -> int:
    return next((d for d in range(start, end) if shape[d] > 1), start)


def _squeeze(op: ir.Op) -> _Groups:
    x, gone = op.ins[0], {d % len(_shape(op.ins[0])) for d in op.params["dimensions"]}
    kept = (d for d in range(len(_shape(x))) if d not in gone)
    yield from ([(x, d), (op.outs[0], at)] for at, d in enumerate(kept))


def _reduce(op: ir.Op) -> _Groups:
    gone = set(op.params["axes"])
    for x in op.ins:
        kept = (d for d in range(len(_shape(x))) if d not in gone)
        yield from ([(x, d), (op.outs[0], at)] for at, d in enumerate(kept))


def _dot(op: ir.Op) -> _Groups:
    """Batch dimensions, those that are summed over, and those of one operand."""
    (left_sum, right_sum), (left_batch, right_batch) = op.params["dimension_numbers"]
    left, right, out = op.ins[0], op.ins[1], op.outs[0]
    yield from ([(left, a), (right, b)] for a, b in zip(left_sum, right_sum, strict=True))
    at = 0
    for a, b in zip(left_batch, right_batch, strict=True):
        yield [(left, a), (right, b), (out, at)]
        at += 1
    for x, used in ((left, {*left_sum, *left_batch}), (right, {*right_sum, *right_batch})):
        for d in range(len(_shape(x))):
            if d not in used:
                yield [(x, d), (out, at)]
                at += 1


def _gather(op: ir.Op) -> _Groups:
    """Dimensions that are taken whole (the width of an embedding), and those of the indices (its tokens)."""
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    x, indices, out = op.ins[0], op.ins[1], op.outs[0]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = [d for d in range(len(_shape(x))) if d not in gone]
    for d, at in zip(whole, numbers.offset_dims, strict=True):
        if sizes[d] == _shape(x)[d]:
            yield [(x, d), (out, at)]
    for d, at in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        yield [(x, d), (indices, at)]
    rest = [at for at in range(len(_shape(out))) if at not in numbers.offset_dims]
    yield from ([(indices, d), (out, at)] for d, at in enumerate(rest))


def _same_index(op: ir.Op) -> _Groups:
    """Slices, padding, concatenation: dimensions of one size at one place."""
    for x in op.ins:
        for out in op.outs:
            if len(_shape(x)) == len(_shape(out)):
                yield from ([(x, d), (out, d)] for d, n in enumerate(_shape(out)) if _shape(x)[d] == n)


_RULES: dict[str, Callable[[ir.Op], Any]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot,
    "gather": _gather,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin"), _reduce),
    **dict.fromkeys(("slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "split"), _same_index),
}
