"""Check that the order hands each state from one microbatch to the next."""

from __future__ import annotations

from multimesh.errors import UsageError
from multimesh.passes.cutting.parts import Pipeline


def check_states(pipeline: Pipeline) -> Pipeline:
    """Refuse an order in which a cell reads a state before the previous microbatch has left it. Name both cells."""
    loop, fragments = pipeline.loop, pipeline.fragments
    at = {cell: n for n, cell in enumerate(pipeline.cells)}
    for state, carry in loop.carries.items():
        maker = next(i for i, f in enumerate(fragments) if carry.leaf in f.made)
        for reader, part in enumerate(fragments):
            late = [k for k in range(1, loop.mark.count) if at[maker, k - 1] >= at[reader, k]]
            if state in part.ins and late:
                made, read = (f"{f.phase}{f.stage} ({f.task})" for f in (fragments[maker], part))
                raise UsageError(
                    f"{loop.mark.where}: {loop.mark.schedule} runs {read} of microbatch {late[0]}, which reads the "
                    f"state in carry=, before {made} of microbatch {late[0] - 1} has updated it; update the state in "
                    "the stage and phase that first reads it, or choose another schedule"
                )
    return pipeline
