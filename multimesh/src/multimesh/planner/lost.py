"""Why the other families of configurations lost: a sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from multimesh.core.text import amount
from multimesh.planner.best_first import Option, Search, Where
from multimesh.planner.configuration import RECOMPUTE, Configuration

FAMILIES: tuple[tuple[str, Where], ...] = (
    ("without a pipeline", lambda how: how.pp == 1),
    ("without tensor parallelism", lambda how: how.tp == 1),
    ("FSDP alone", lambda how: how.pp == how.tp == how.ep == 1 and how.fsdp > 1),
    ("without FSDP", lambda how: how.fsdp == 1),
    ("a pipeline of one stage a submesh", lambda how: how.pp > 1 and how.interleave == 1),
    ("a pipeline", lambda how: how.pp > 1),
    ("without recomputation", lambda how: how.recompute == "none"),
    ("without expert parallelism", lambda how: how.ep == 1),
)
"""Names of families, and what belongs to them."""

_COMPUTED = ("matrix products", "attention", "memory", "operations")
_CAUSES = {
    "tensor parallelism": "TP traffic",
    "context parallelism": "CP traffic",
    "expert parallelism": "EP traffic",
    "bubble": "the bubble",
    "sharded parameters": "the network (sharded parameters)",
    "gradients": "the network (gradients)",
    "optimizer": "the optimizer",
}


def sentences(search: Search, best: Option) -> Iterator[str]:
    """Return a sentence on each family of configurations that lost; one for all with the same fastest option."""
    same: dict[Configuration, tuple[list[str], str]] = {}
    for name, belongs in FAMILIES:
        if belongs(best.how) or not any(belongs(candidate.how) for candidate in search.candidates):
            continue
        found = search.best(1, belongs, what=name)
        if found:
            same.setdefault(found[0].how, ([], _slower(found[0], best)))[0].append(name)
        elif nearest := search.nearest(belongs):
            how, needed = nearest
            yield (
                f"{name}: memory; the nearest, {describe_how(how)}, needs {amount(needed, 'bytes')}, "
                f"{amount(needed - search.limit, 'bytes')} too many"
            )
    yield from (f"{', '.join(names)}: {sentence}" for names, sentence in same.values())


def _slower(option: Option, best: Option) -> str:
    """Say how much slower an option is than the best, and which part of the step makes most of that."""
    of, of_best = dict(option.shares), dict(best.shares)
    more = {cause: of.get(part, 0.0) - of_best.get(part, 0.0) for part, cause in _CAUSES.items()}
    recomputes = RECOMPUTE.index(option.how.recompute) > RECOMPUTE.index(best.how.recompute)
    computed = "recomputation, to fit into memory," if recomputes else "smaller kernels"
    more[computed] = sum(of.get(part, 0.0) - of_best.get(part, 0.0) for part in _COMPUTED)
    cause = max(more, key=lambda name: more[name])
    verb = "take" if cause == "smaller kernels" else "takes"
    return (
        f"{option.seconds:.4g} s, {100 * (option.seconds / best.seconds - 1):.1f} % more; {cause} {verb} "
        f"{more[cause]:.3g} s more ({describe_how(option.how)})"
    )


def describe_how(how: Configuration) -> str:
    """Return a configuration in words."""
    parts = [how.shown()]
    if how.pp > 1:
        parts.append(how.schedule)
    if how.recompute != "none":
        parts.append(f"recompute {how.recompute}")
    return ", ".join(parts)
