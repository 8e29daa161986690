"""Estimates the costs of stages from shapes alone: how unequal they are, not how long they take (see `ir.flops`)."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from multimesh.ir.flops import of_ops
from multimesh.passes.cutting.fragment import Fragment
from multimesh.passes.cutting.parts import Pipeline
from multimesh.passes.cutting.weights import split_weights
from multimesh.plan.kernel_costs import NOTE
from multimesh.schedules.costs import PHASES, StageCosts


def estimate(pipeline: Pipeline) -> StageCosts:
    """Operations of F, B and W of every stage on each of its devices, and the bytes that a microbatch keeps there.

    Until the end of B these are what F made or got and B or W reads; from then on what W reads.
    """
    number = len(pipeline.submeshes) * pipeline.chunks
    parts = split_weights(pipeline.fragments, range(number), set(pipeline.results))
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


def _total(parts: Sequence[Fragment]) -> float:
    return sum(of_ops(part.ops) / part.mesh.size for part in parts)
