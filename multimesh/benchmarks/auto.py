"""The schedule ``auto`` against every published one, on random costs: unequal stages, slow links, heavy heads.

    python multimesh/benchmarks/auto.py [--sets 50] [--memory 1]

Each set has 2, 4 or 8 stages, one a submesh, and one, two or four times as many microbatches; all is simulated.
Memory is in what 1F1B takes on the submesh where it takes most.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from multimesh.schedules import Auto, Choice, StageCosts, get, names

KINDS = ("unequal", "slow", "head", "all")
NAMES = [n for n in names() if get(n).name == n and get(n).chunks in (None, 1) and n != "interleaved"]


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


def chosen(found: Case, memory: float = 1.0, evaluations: int | None = None) -> Choice:
    """What ``auto`` takes, in ``memory`` times what 1F1B takes where it takes most."""
    most = min(found.stages, found.microbatches)
    auto = Auto(found.costs, memory=memory * most, evaluations=evaluations)
    return auto.choose(found.stages, 1, found.microbatches)


def main() -> None:
    import report

    parser = report.parser(__doc__)
    parser.add_argument("--sets", type=int, default=50, help="how many sets of costs (default 50)")
    parser.add_argument("--memory", type=float, default=1.0, help="in what 1F1B takes (default 1)")
    args = parser.parse_args()
    rows, shares = [], []
    for seed in range(args.sets):
        found = case(seed)
        choice = chosen(found, args.memory)
        spans = {c.name: c.makespan for c in choice.candidates}
        best = min((c for c in choice.candidates if c.fits and c.name != "found"), key=lambda c: c.makespan)
        auto = choice.taken.makespan
        shares.append((found.kind, auto / spans["1f1b"], auto / best.makespan, choice.bound / auto))
        longer = {n: f"{100 * (spans[n] / auto - 1):.1f}" if n in spans else "" for n in NAMES}
        rows.append(
            {"costs": found.kind, "p": found.stages, "m": found.microbatches, "auto": auto}
            | {f"{n} %": more for n, more in longer.items()}
            | {"best that fits": best.name, "bound": choice.bound, "taken": choice.taken.name}
        )
    kinds = [*dict.fromkeys(kind for kind, *_ in shares), "in all"]
    means = []
    for kind in kinds:
        mine = [s for s in shares if kind in (s[0], "in all")]
        one, best, bound = ([s[i] for s in mine] for i in (1, 2, 3))
        means.append(
            {
                "costs": kind,
                "sets": len(mine),
                "shorter than 1f1b %": 100 * (1 - statistics.mean(one)),
                "than the best that fits %": 100 * (1 - statistics.mean(best)),
                "at most %": 100 * (1 - min(best)),
                "proved shortest": sum(b > 1 - 1e-9 for b in bound),
                "above the bound %": 100 * (statistics.mean(1 / b for b in bound) - 1),
            }
        )
    title = f"Makespan of auto, and by how many % the published ones are longer; memory {args.memory:g} x 1f1b"
    report.show({title: rows, "Means": means}, args.json)


if __name__ == "__main__":
    main()
