"""The copies that XLA makes of operands of ragged products on GPUs: an expert's rows in each, and zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from multimesh import ir
from multimesh.core.grouping import group


class GroupCopy(NamedTuple):
    """A copy of an array, alive from the operation of number ``first`` to that of number ``last``."""

    array: ir.Value
    nbytes: int
    first: int
    last: int


def list_group_copies(
    ops: Sequence[ir.Op], origins: Mapping[ir.Value, ir.Value], size: Callable[[ir.Value], int], *, late: bool
) -> Iterator[GroupCopy]:
    """Yield the copies of operands of the ragged products of a kernel, each of as many times the bytes as groups.

    A product that sums over the rows of groups, as for the gradients of weights, reads copies of both operands; any
    other reads a transposed copy of its rows, which XLA makes from the first one where there is one. ``late``: such
    sums run at the end, since results are added to what the kernel takes; then copies of arrays that wait for the same
    number of products are made at once, by one kernel of XLA. ``origins`` has the arrays of values that only name them
    anew, and ``size`` returns the bytes of an array on a device.
    """
    waits: dict[ir.Value, int] = {}  # the most products that a value waits for
    sums: dict[tuple[ir.Value, int], list[int]] = {}  # numbers of such products, by the array and the number of groups
    others: dict[tuple[ir.Value, int], list[int]] = {}
    for n, op in enumerate(ops):
        if not origins.keys().isdisjoint(op.outs):
            pairs = zip(op.ins, op.outs, strict=True)
            waits |= {out: waits.get(v, 0) for v, out in pairs if isinstance(v, ir.Value)}
            continue
        after = max((waits.get(v, 0) for v in op.reads), default=0)
        if op.prim.name == "ragged_dot_general":
            after += 1
            dimensions, (lhs, rhs, sizes) = op.params["ragged_dot_dimension_numbers"], op.ins
            ((contracted, _), _), ragged = dimensions.dot_dimension_numbers, dimensions.lhs_ragged_dimensions
            is_sum = not {*ragged}.isdisjoint(contracted)
            for v in ir.values((lhs, rhs) if is_sum else (lhs,)):
                key = origins.get(v, v), int(ir.shape(sizes)[-1])
                (sums if is_sum else others).setdefault(key, []).append(n)
        waits |= dict.fromkeys(op.outs, after)
    levels = group((waits.get(key[0], 0), key) for key in {**sums, **others})
    first = 0
    for _, keys in sorted(levels.items()):
        first = max(first, min(n for key in keys for n in (*sums.get(key, ()), *others.get(key, ()))))
        for key in keys:
            (array, groups), readers, rows = key, sums.get(key, []), others.get(key, [])
            nbytes = groups * size(array)
            begin = first if late else min(readers + rows)
            if readers:
                yield GroupCopy(array, nbytes, begin, len(ops) - 1 if late else max(readers + rows[:1]))
            if rows:
                yield GroupCopy(array, nbytes, first if late else rows[0], max(first, rows[-1]))
        first = 1 + max((others[key][-1] for key in keys if key in others), default=first) if late else 0
