"""Recompute cheap values in the fragment that reads them, where that keeps fewer bytes between kernels."""

from __future__ import annotations

from dataclasses import replace

from multimesh import ir
from multimesh.core.grouping import group
from multimesh.ir import graph
from multimesh.passes.cutting.parts import Fragment, Pipeline, with_interfaces
from multimesh.passes.trimming.recompute_values import Localiser, Maker, firm_values


def recompute_residuals(pipeline: Pipeline) -> Pipeline:
    """Repeat operations of a submesh in its fragments that use their results, where that keeps fewer bytes between."""
    fragments = pipeline.fragments
    maker: Maker = {o: ((part.level, i), op) for part in fragments for i, op in enumerate(part.ops) for o in op.outs}
    inputs = group((part.mesh, v) for part in fragments for v in part.ins if v not in maker)  # that it reads anyway
    parts = [_localize(part, maker, set(inputs[part.mesh])) for part in fragments]
    return replace(pipeline, fragments=with_interfaces(parts, set(pipeline.results)))


def _localize(part: Fragment, maker: Maker, own_inputs: set[ir.Value]) -> Fragment:
    firm = firm_values(part.ops, maker)
    local = Localiser(maker, own_inputs, set(part.ins), firm, lambda op: op.mesh == part.mesh)
    rename = local.run(v for v in part.ins if v in maker)
    if not rename:
        return part
    return replace(part, ops=(*(op for _, op in local.copies), *(graph.rename_op(op, rename) for op in part.ops)))
