"""Join a forward to the backward of its stage, where the table always runs them back to back."""

from __future__ import annotations

from dataclasses import replace

from multimesh.passes.cutting.parts import Pipeline, with_interfaces
from multimesh.passes.cutting.weights import back_to_back


def join_turns(pipeline: Pipeline) -> Pipeline:
    """Merge the forward and the backward fragment of a stage where the table always runs them back to back.

    In 1f1b that is the last stage; its activations then never leave the program. The joined fragment counts as phase B.
    """
    fragments = pipeline.fragments
    present = {(part.phase, part.stage) for part in fragments}
    table = tuple(tuple(c for c in row if (c.phase, c.stage) in present) for row in pipeline.table)
    for number in sorted(back_to_back(table, "F", "B")):
        first, second = (next(f for f in fragments if (f.phase, f.stage) == (phase, number)) for phase in "FB")
        if not set(first.outs).isdisjoint(v for f in fragments if f.stage != number for v in f.needs):
            continue  # another stage reads what the forward makes, and so waits for no more than that
        joined = replace(second, ops=first.ops + second.ops)
        fragments = tuple(joined if f is second else f for f in fragments if f is not first)
        table = tuple(tuple(c for c in row if c.stage != number or c.phase != "F") for row in table)
    return replace(pipeline, fragments=with_interfaces(fragments, set(pipeline.results)), table=table)
