"""Cuts conditionals over several submeshes: ``optax.MultiSteps`` updates every parameter inside one ``lax.cond``."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from jax.extend.core import primitives

from multimesh import ir
from multimesh.core import _compat
from multimesh.passes.reading.inline import flattened

Home = TypeVar("Home")


def split(op: ir.Op, home: Callable[[Iterable[ir.Value], ir.Value], Home]) -> list[tuple[ir.Op, Home]]:
    """Cut an unmarked ``cond`` into one per submesh of its results, each with the part of the branches that it needs.

    ``home`` gives the submesh of a result, from the operands that it depends on and the result.
    """
    branches = op.params["branches"]
    groups: dict[Home, list[int]] = collections.defaultdict(list)
    for i in range(len(op.outs)):
        _, reads = _compat.dce(branches, [j == i for j in range(len(op.outs))])
        given = ir.values((*itertools.compress(op.ins[1:], reads), op.ins[0]))
        groups[home(given, op.outs[i])].append(i)
    if len(groups) == 1:
        return [(op, next(iter(groups)))]
    parts = []
    for where, results in groups.items():
        cut, reads = _compat.dce(branches, [j in results for j in range(len(op.outs))])
        ins = (op.ins[0], *itertools.compress(op.ins[1:], reads))
        outs = tuple(op.outs[j] for j in results)
        parts.append((replace(op, params={**op.params, "branches": cut}, ins=ins, outs=outs), where))
    return parts


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
