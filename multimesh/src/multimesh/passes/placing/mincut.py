"""The minimum cut of a small graph: Dinic's maximum flow, with capacities of any size."""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Any

SOURCE, SINK = "source", "sink"


class Cut:
    """A graph with an edge capacity for each pair of named nodes, to be cut between `SOURCE` and `SINK`."""

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {SOURCE: 0, SINK: 1}
        self._edges: list[list[int]] = [[], []]  # of a node, as numbers in the lists below
        self._target: list[int] = []
        self._left: list[int] = []  # capacity; an edge and its reverse are neighbours, 2 * n and 2 * n + 1

    def _node(self, name: Hashable) -> int:
        if name not in self._number:
            self._number[name] = len(self._edges)
            self._edges.append([])
        return self._number[name]

    def pay(self, source: Any, sink: Any, cost: int) -> None:
        """Add the cost of having ``source`` on the side of `SOURCE` and ``sink`` on that of `SINK`."""
        for a, b, capacity in ((source, sink, cost), (sink, source, 0)):
            self._edges[self._node(a)].append(len(self._target))
            self._target.append(self._node(b))
            self._left.append(capacity)

    def sink_side(self) -> set[Hashable]:
        """Return the nodes on the side of `SINK` in a minimum cut: as few as it can have."""
        while level := self._levels(0, forward=True):
            position = [0] * len(self._edges)
            while self._augment(level, position):
                pass
        reached = self._levels(1, forward=False)
        return {name for name, n in self._number.items() if n in reached}

    def _levels(self, start: int, *, forward: bool) -> dict[int, int]:
        """Return each node's distance from ``start`` over edges with capacity. Empty if source and sink are apart."""
        level = {start: 0}
        queue = collections.deque([start])
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                there = self._target[edge]
                if self._left[edge if forward else edge ^ 1] and there not in level:
                    level[there] = level[node] + 1
                    queue.append(there)
        return level if not forward or 1 in level else {}

    def _augment(self, level: dict[int, int], position: list[int]) -> bool:
        """Send flow along one shortest path. Return whether there was one."""
        path: list[int] = []
        node = 0
        while node != 1:
            edges = self._edges[node]
            while position[node] < len(edges):
                edge = edges[position[node]]
                there = self._target[edge]
                if self._left[edge] and level.get(there) == level[node] + 1:
                    break
                position[node] += 1
            else:
                if not path:
                    return False
                edge = path.pop()
                node = self._target[edge ^ 1]
                position[node] += 1
                continue
            path.append(edge)
            node = there
        most = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= most
            self._left[edge ^ 1] += most
        return True
