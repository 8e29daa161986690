"""Layers to stages."""

from __future__ import annotations

import heapq
import itertools
import math

from multimesh.planner.configuration import Configuration
from multimesh.planner.layer import LayerParts
from multimesh.planner.products import Times
from multimesh.planner.transformer import Transformer


def layers(model: Transformer, how: Configuration) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    As given, or equal. Where equal ones need it, the embedding and the head count as a layer each: 126 layers on 64
    stages are 1, 2, ..., 2, 1. Otherwise the first stages have a layer more.
    """
    if how.layers:
        return how.layers
    number, rest = divmod(model.layers, how.stages)
    if not rest:
        return (number,) * how.stages
    if (model.layers + 2) % how.stages == 0:
        return (number, *(number + 1,) * (how.stages - 2), number)
    return (number + 1,) * rest + (number,) * (how.stages - rest)


def balance(model: Transformer, how: Configuration, parts: LayerParts, route: tuple[int, ...]) -> tuple[int, ...]:
    """Distribute layers over stages: minimize the slowest submesh, and after that the slowest stage.

    One layer after the other goes to the submesh that has least to do, there to the stage that has; the embedding and
    the head are there before.
    """
    places, each = placement(how, route), parts.layer.total
    ends = math.ceil((parts.embedding.total + parts.head.total) / each)
    least = max(1, model.layers // how.stages - ends - 2)  # that each stage has in the end
    sizes, busy, rows = [least] * how.stages, [least * each] * how.stages, [0.0] * how.pp
    busy[0] += parts.embedding.total
    busy[-1] += parts.head.total
    for stage, row in enumerate(places):
        rows[row] += busy[stage]
    queue = [(rows[row], busy[stage], stage) for stage, row in enumerate(places)]
    heapq.heapify(queue)
    left = model.layers - least * how.stages
    while left:
        of_row, _, stage = heapq.heappop(queue)
        if of_row == rows[places[stage]]:
            sizes[stage] += 1
            busy[stage] += each
            rows[places[stage]] += each
            left -= 1
        heapq.heappush(queue, (rows[places[stage]], busy[stage], stage))
    return tuple(sizes)


def placement(how: Configuration, route: tuple[int, ...]) -> tuple[int, ...]:
    """Return the submesh of each stage, from the submeshes of a schedule's first stages."""
    return tuple(itertools.islice(itertools.cycle(route), how.stages))


def times(model: Transformer, how: Configuration, parts: LayerParts) -> tuple[Times, ...]:
    """Return the seconds of each stage: its layers, the embedding on the first and the head on the last."""
    dense, found = model.dense_layers, []
    for number in layers(model, how):
        first = min(dense, number)
        dense -= first
        found.append(parts.layer * (number - first) + parts.first * first if first else parts.layer * number)
    found[0] += parts.embedding
    found[-1] += parts.head
    return tuple(found)
