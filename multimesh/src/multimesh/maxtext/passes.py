"""What each pass of MultiMesh makes of a step, as text."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from multimesh.jitted import Lowered
from multimesh.passes.inline import inline
from multimesh.passes.loops import fuse, separate
from multimesh.passes.place import place


def passes(lowered: Lowered) -> Iterator[tuple[str, str]]:
    """Yield name and dump of every pass, in order; what follows them is the plan."""
    program = inline(lowered.closed, jax.devices())
    yield "inline", str(program)
    program = fuse(program)
    yield "fuse", str(program)
    program = separate(program)
    yield "separate", str(program)
    yield "place", str(place(program)[0])
    yield "kernels", lowered.as_text()
