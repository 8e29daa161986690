"""Conditionals over values of several submeshes: one per submesh, each with the part of the branches that it needs.

``optax.MultiSteps`` for one updates every parameter inside a single ``lax.cond``.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from jax.extend.core import primitives

from multimesh import ir
from multimesh.core import _compat
from multimesh.passes.reading.inline import flattened

Home = TypeVar("Home")


def split(op: ir.Op, home: Callable[[Iterable[ir.Value], ir.Value], Home]) -> list[tuple[ir.Op, Home]]:
    """Cut an unmarked ``cond`` into one per submesh of its results.

    Parameters
    ----------
    op
        The conditional.
    home
        Submesh of a result, given the operands that it depends on, and the result.

    Returns
    -------
    list
        Conditionals with their submesh; one where all results go together.
    """
    branches = op.params["branches"]
    groups: dict[Home, list[int]] = collections.defaultdict(list)
    for i in range(len(op.outs)):
        _, reads = _compat.dce(branches, [j == i for j in range(len(op.outs))])
        groups[home(_operands(op, reads), op.outs[i])].append(i)
    if len(groups) == 1:
        return [(op, next(iter(groups)))]
    parts = []
    for where, results in groups.items():
        cut, reads = _compat.dce(branches, [j in results for j in range(len(op.outs))])
        operands = tuple(i for i, read in zip(op.ins[1:], reads, strict=True) if read)
        outs = tuple(op.outs[j] for j in results)
        parts.append((replace(op, params={**op.params, "branches": cut}, ins=(op.ins[0], *operands), outs=outs), where))
    return parts


def _operands(op: ir.Op, reads: Iterable[bool]) -> list[ir.Value]:
    kept = (i for i, read in zip(op.ins[1:], reads, strict=True) if read)
    return [v for v in (*kept, op.ins[0]) if isinstance(v, ir.Value)]


def selected(op: ir.Op) -> tuple[ir.Op, ...] | None:
    """An unmarked ``cond`` as the operations of all branches and a choice between their results.

    None where a branch captures arrays. It computes more, and each result depends only on what it is made from.
    """
    ops: list[ir.Op] = []
    cases: list[list[ir.Atom]] = []
    for branch in op.params["branches"]:
        flat = flattened(op, branch, op.ins[1:])
        if flat is None:
            return None
        ops += flat[0]
        cases.append(flat[1])
    for out, *given in zip(op.outs, *cases, strict=True):
        same = all(atom is given[0] for atom in given)
        prim, ins = (_compat.copy_p, given[:1]) if same else (primitives.select_n_p, [op.ins[0], *given])
        ops.append(replace(op, prim=prim, params={}, ins=tuple(ins), outs=(out,), ctx=None))
    return tuple(ops)
