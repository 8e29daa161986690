"""What programs cost, from shapes alone: what ``auto`` chooses by where nothing was measured, and forecasts show.

A matrix product of ``[m, k]`` and ``[k, n]`` counts ``2 m k n`` operations, any other operation one for each element of
its results. An estimate says how unequal stages are, not how long they take; transfers take no time in it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from multimesh import ir
from multimesh.core import _compat
from multimesh.passes.cutting.fragment import Fragment
from multimesh.passes.cutting.stages import Pipeline
from multimesh.passes.cutting.weights import split_weights
from multimesh.schedules.costs import PHASES, Costs, StageCosts

if TYPE_CHECKING:
    from multimesh.plan.plan import Plan

NOTE = "estimated: operations on each device, from shapes; transfers take no time"


def estimate(pipeline: Pipeline, results: set[ir.Value]) -> StageCosts:
    """Operations of F, B and W of every stage on each of its devices, and the bytes that a microbatch keeps there.

    Until the end of B these are what F made or got and B or W reads; from then on what W reads.
    """
    number = len(pipeline.submeshes) * pipeline.chunks
    parts = split_weights(pipeline.fragments, range(number), results)
    made = {v for part in parts for v in part.made}
    by: dict[tuple[int, str], list[Fragment]] = collections.defaultdict(list)
    for part in parts:
        by[part.stage or 0, part.phase or ""].append(part)
    times, kept, after = [], [], []
    for stage in range(number):
        of = {phase: by[stage, phase] for phase in PHASES}
        times.append((_total(of["F"]), _total(of["B"]), _total(of["W"])))
        there = {v for part in of["F"] for v in (*part.made, *part.ins)} & made
        read = {v for phase in "BW" for part in of[phase] for v in part.ins}
        kept.append(float(sum(v.nbytes for v in there & read)))
        late = {v for part in of["W"] for v in part.ins} & made
        after.append(float(sum(v.nbytes for v in late)))
    return StageCosts(tuple(times), (), tuple(kept), "", "bytes", NOTE, tuple(after))


def of_plan(plan: Plan) -> Costs:
    """Operations of every program of a plan on each of its devices."""
    return Costs(tuple(_of_ops(k.ops) / plan.submeshes[k.submesh].size for k in plan.kernels), note=f"costs {NOTE}")


def _total(parts: Sequence[Fragment]) -> float:
    return sum(_of_ops(part.ops) / part.mesh.size for part in parts)


def _of_ops(ops: Sequence[ir.Op]) -> float:
    return sum(operations(op.prim.name, op.params, op.ins, op.outs) for op in ops)


def of_program(jaxpr: Any) -> float:
    """Operations of all equations of a jaxpr."""
    return sum(operations(e.primitive.name, e.params, e.invars, e.outvars) for e in jaxpr.eqns)


def operations(name: str, params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> float:
    """Operations of a primitive on atoms with an ``aval``."""
    size = float(sum(math.prod(ir.shape(o)) for o in outs))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * size * math.prod(ir.shape(ins[0])[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel = ir.shape(ins[1])
        return 2 * size * math.prod(kernel) / max(1, kernel[params["dimension_numbers"].rhs_spec[0]])
    inner = [of_program(jaxpr) for jaxpr in _compat.subjaxprs(params)]
    if not inner:
        return size
    return max(inner) if name == "cond" else sum(inner) * (params["length"] if name == "scan" else 1)
