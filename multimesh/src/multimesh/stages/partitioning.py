"""Layers to stages: contiguous pieces of a list of layers, chosen by cost. Nothing here imports JAX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from multimesh.core import checks
from multimesh.core.text import amount
from multimesh.errors import UsageError
from multimesh.schedules.costs import CLOSE, cost


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a layer on a submesh.

    Attributes
    ----------
    time
        Of F, B and W of a microbatch together, in any unit.
    held
        Bytes that it holds all the time: parameters, gradients, the state of the optimizer.
    activation
        Bytes that it keeps of a microbatch from F to the end of its backward.
    """

    time: float
    held: float = 0.0
    activation: float = 0.0

    def __post_init__(self) -> None:
        """Check that the costs are valid numbers."""
        for name, value in vars(self).items():
            cost(value, f"a layer's {name}")


def partition(
    layers: Iterable[LayerCosts | float],
    submeshes: int,
    *,
    microbatches: int,
    chunks: int = 1,
    memory: float | None = None,
) -> tuple[int, ...]:
    """Cut a list of layers into stages so that their pipeline can end earliest.

    With ``t`` the times of the stages, ``m`` microbatches and ``v`` stages on each submesh, it minimizes ``max over s
    of (t_0 + ... + t_(s-1) + m v t_s)``. With one stage on each submesh, no table whose B makes the
    weight gradients too ends before that in the simulator: stage ``s`` runs ``m`` times, after the first microbatch has
    come through the stages before, and before the last one has gone back through them. With several stages it is an
    upper estimate: as if all stages of a submesh took the time of its longest. Of equal cuts, one with the shortest
    longest stage is taken. Dynamic programming finds it in time ``stages * layers ** 2``; no other cut has a smaller
    value.

    Parameters
    ----------
    layers
        The costs of each layer, in order; a number is its time.
    submeshes, chunks
        The number of submeshes, and of stages on each, round and round.
    microbatches
        ``m``.
    memory
        Bytes of a submesh; None: enough. A stage fits if it takes at most a ``v``-th of it: for what its layers hold,
        and for the activations that are alive under 1F1B (interleaved, if ``v`` is above 1).

    Returns
    -------
    tuple[int, ...]
        The number of layers of each stage, at least one.

    Raises
    ------
    UsageError
        If there are fewer layers than stages, or no cut fits into memory.

    Examples
    --------
    A head that takes as long as three layers:

    >>> partition([1, 1, 1, 1, 1, 1, 1, 1, 3], submeshes=4, microbatches=8)
    (3, 3, 2, 1)
    """
    submeshes = checks.integer("partition: submeshes", submeshes, 1)
    chunks = checks.integer("partition: chunks", chunks, 1)
    microbatches = checks.integer("partition: microbatches", microbatches, 1)
    costs = [
        c if isinstance(c, LayerCosts) else LayerCosts(c) for c in checks.many("partition: layers", layers, "costs")
    ]
    number = submeshes * chunks
    if len(costs) < number:
        raise UsageError(
            f"partition: {len(costs)} layers cannot make {number} stages ({submeshes} submeshes x {chunks}); each "
            "needs one at least"
        )
    room = math.inf if memory is None else cost(memory, "partition: memory of a submesh") / chunks
    before, state, saved = (
        [0.0, *itertools.accumulate(getattr(c, name) for c in costs)] for name in ("time", "held", "activation")
    )

    def needs(stage: int, start: int, end: int) -> float:
        return state[end] - state[start] + alive(stage, submeshes, chunks, microbatches) * (saved[end] - saved[start])

    def value(stage: int, start: int, end: int) -> float | None:
        if needs(stage, start, end) > room:
            return None
        return before[start] + microbatches * chunks * (before[end] - before[start])

    bound, _ = best_ends(number, len(costs), value, max)
    if math.isinf(bound):
        least = max(needs(number - 1, i, i + 1) for i in range(len(costs)))
        raise UsageError(
            f"partition: no cut of {len(costs)} layers into {number} stages fits into {amount(memory or 0, 'bytes')} "
            f"on each submesh; a layer alone takes up to {amount(least, 'bytes')}. Use more submeshes, or keep less "
            "of a microbatch with jax.checkpoint"
        )

    def length(stage: int, start: int, end: int) -> float | None:
        here = value(stage, start, end)
        return None if here is None or here > bound * (1 + CLOSE) else before[end] - before[start]

    _, cuts = best_ends(number, len(costs), length, max)
    return tuple(end - start for start, end in itertools.pairwise(cuts))


def alive(stage: int, submeshes: int, chunks: int = 1, microbatches: float = math.inf) -> float:
    """Return the microbatches in flight on a stage under 1F1B (interleaved, with several stages on a submesh)."""
    rank = stage % submeshes
    many = submeshes - rank if chunks == 1 else 2 * (submeshes - rank - 1) + (chunks - 1) * submeshes + 1
    return min(microbatches * chunks, many) / chunks


def best_ends(
    stages: int, last: int, price: Callable[[int, int, int], Any], join: Callable[[Any, Any], Any]
) -> tuple[Any, list[int]]:
    """Return the least joined price of stages that end at ``last``, and their ends from 0; infinity if there is none.

    The ``price`` of (stage, start, end) is None where a stage is too long, and so is any longer one. Of equal cuts,
    stages end late.
    """
    tables: list[dict[int, tuple[Any, int]]] = [{0: (None, 0)}]
    for behind in reversed(range(stages)):
        table: dict[int, tuple[Any, int]] = {}
        for start, (before, _) in tables[-1].items():
            for end in range(start + 1, last - behind + 1) if behind else (last,):
                here = price(stages - behind - 1, start, end)
                if here is None:
                    break
                here = here if before is None else join(before, here)
                if end not in table or here <= table[end][0]:
                    table[end] = here, start
        tables.append(table)
    if last not in tables[-1]:
        return math.inf, []
    ends = [last]
    for table in reversed(tables[1:]):
        ends.append(table[ends[-1]][1])
    return tables[-1][last][0], ends[::-1]
