"""From fragments of a loop to the stages of a pipeline: at most one forward and one backward fragment each.

Stage ``s`` of ``p * v`` is on submesh ``s % p``. A forward fragment gets the first stage of its submesh that is not
before the stages it reads from, a backward fragment likewise from the last stage down. Fragments of one stage and phase
become one program. What a stage reads then always comes from an earlier stage (later, in the backward), which is what
the tables of schedules assume; so any valid table can be run, whatever the loop looks like. A stage that a loop does
not have, as the forward of a linear last stage, has no fragment.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from multimesh import ir
from multimesh.passes.fragment import Fragment, with_interfaces


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages of a loop: ``chunks`` on each of ``submeshes``; their fragments in the order of the data."""

    submeshes: tuple[Mesh, ...]
    chunks: int
    fragments: tuple[Fragment, ...]

    @property
    def stages(self) -> int:
        """Number of stages that have a fragment."""
        return len({part.stage for part in self.fragments})


def stages(fragments: Sequence[Fragment], results: set[ir.Value]) -> Pipeline:
    """Number the stages of a loop and make one fragment of each stage and phase."""
    forward = [f for f in fragments if f.phase == "F"]
    backward = [f for f in fragments if f.phase == "B"]
    submeshes = tuple(dict.fromkeys(f.mesh for f in (*forward, *reversed(backward))))
    count = len(submeshes)
    rank = {mesh: r for r, mesh in enumerate(submeshes)}
    ahead = _positions(forward, lambda f: rank[f.mesh], count)
    behind = _positions(backward, lambda f: count - 1 - rank[f.mesh], count)
    chunks = max([0, *ahead.values(), *behind.values()]) // count + 1
    groups: dict[tuple[str, int], list[Fragment]] = collections.defaultdict(list)
    for f in forward:
        groups["F", ahead[id(f)]].append(f)
    for f in backward:
        groups["B", count * chunks - 1 - behind[id(f)]].append(f)

    def level(phase: str, stage: int) -> int:
        return stage if phase == "F" else 2 * count * chunks - 1 - stage

    ordered = sorted(groups.items(), key=lambda item: level(*item[0]))
    made = [
        replace(parts[0], level=level(phase, stage), stage=stage, ops=tuple(op for part in parts for op in part.ops))
        for (phase, stage), parts in ordered
    ]
    return Pipeline(submeshes, chunks, with_interfaces(made, results))


def _positions(parts: Sequence[Fragment], rank: Callable[[Fragment], int], count: int) -> dict[int, int]:
    """For each fragment (by id) the first position of its submesh, in steps of ``count``, not before what it reads."""
    maker = {o: part for part in parts for o in part.made}
    found: dict[int, int] = {}
    for part in parts:
        before = {id(maker[v]) for v in (*part.ins, *part.after) if v in maker} - {id(part)}
        first = max((found[b] for b in before), default=0)
        found[id(part)] = first + (rank(part) - first) % count
    return found
