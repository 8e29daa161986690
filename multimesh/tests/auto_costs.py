"""Random costs of pipelines: unequal stages, slow links, heavy heads."""

from __future__ import annotations

import random
from dataclasses import dataclass

from multimesh.schedules import Auto, Choice, StageCosts

KINDS = ("unequal", "slow", "head", "all")


@dataclass(frozen=True)
class Case:
    """Costs of a pipeline, and its size."""

    kind: str
    stages: int
    microbatches: int
    costs: StageCosts


def case(seed: int) -> Case:
    """A random set; those of four seeds in a row are of the four kinds."""
    rng, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    p = rng.choice((2, 4, 8))
    m = p * rng.choice((1, 2, 4))
    spread = 0.5 if kind in ("unequal", "all") else 0.05
    times = [tuple(rng.uniform(1 - spread, 1 + spread) for _ in "FBW") for _ in range(p)]
    if kind in ("head", "all"):  # of the vocabulary
        times[-1] = tuple(t * rng.uniform(1.2, 2.5) for t in times[-1])
    hop = rng.uniform(0.2, 1.5) if kind in ("slow", "all") else 0.0
    transfers = tuple(hop * rng.uniform(0.8, 1.2) for _ in range(p - 1))
    return Case(kind, p, m, StageCosts(tuple(times), transfers))


def chosen(case: Case, memory: float = 1.0) -> Choice:
    """What ``auto`` takes, in ``memory`` times what 1F1B takes where it takes most."""
    most = min(case.stages, case.microbatches)
    return Auto(case.costs, memory=memory * most).choose(case.stages, 1, case.microbatches)
