"""Recompute cheap values in the fragment that reads them, where that keeps fewer bytes between kernels."""

from __future__ import annotations

from dataclasses import replace

from multimesh.core.grouping import group
from multimesh.ir import graph
from multimesh.passes.cutting.parts import Fragment, Pipeline, with_interfaces
from multimesh.passes.trimming.recompute_values import Localiser, Maker, firm_values


def recompute_residuals(pipeline: Pipeline) -> Pipeline:
    """Repeat operations of a submesh in its fragments that use their results, where that keeps fewer bytes between."""
    fragments = pipeline.fragments
    maker: Maker = {
        o: ((n, i), op) for n, part in enumerate(fragments) for i, op in enumerate(part.ops) for o in op.outs
    }
    inputs = group((part.mesh, v) for part in fragments for v in part.ins if v not in maker)  # that it reads anyway
    parts: list[Fragment] = []
    for part in fragments:
        firm, here = firm_values(part.ops, maker), part.mesh
        local = Localiser(maker, set(inputs[here]), set(part.ins), firm, lambda op, here=here: op.mesh == here)  # type: ignore[misc]
        rename = local.run(v for v in part.ins if v in maker)
        ops = (*(op for _, op in local.copies), *(graph.rename_op(op, rename) for op in part.ops))
        parts.append(replace(part, ops=ops))
    return replace(pipeline, fragments=with_interfaces(parts, set(pipeline.results)))
