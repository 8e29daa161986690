"""The moves of operations outside of tasks to where they add no stage and save transfers.

`follow_operands` does not see the readers of an operation; here all operations are looked at together. In a loop a
*place* is a position on the way of a microbatch: the stages forward, then backward, then any submesh for what only
results of the loop read. In straight code it is a submesh. An operation never has an earlier place than what it reads,
so there are as many stages as the tasks alone need. Among such placements this looks for the one

* that sends the fewest arrays in a loop, each once to a submesh; then the fewest scalars and keys; then bytes;
* that sends the fewest bytes in straight code, where whole parameters are at stake; then arrays;
* that then leaves the most operations where `follow_operands` has put them.

An expansion asks which operations should move to one place. The cheapest cut of a graph answers exactly (Boykov,
Veksler and Zabih, "Fast approximate energy minimization via graph cuts", 2001). Expansions are repeated until none
helps: with two places that is the optimum.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core.grouping import group
from multimesh.ir.primitives import is_small
from multimesh.passes.placing.mincut import SINK, SOURCE, Cut
from multimesh.passes.placing.note_routes import position


@dataclass(frozen=True, eq=False)
class Node:
    """An operation on a submesh, or the reads and results of a loop on a submesh."""

    reads: Mapping[ir.Value, Mesh]  # each with its submesh, which counts if no node makes it
    outs: Sequence[ir.Value]
    mesh: Mesh
    movable: bool = False
    staged: bool = True  # it has a place on the way of a microbatch; what depends on inputs only has none
    backward: bool = False
    after: Sequence[ir.Value] = ()


def minimize_transfers(
    nodes: Sequence[Node], route: Sequence[Mesh] = (), awaited: Iterable[ir.Value] = ()
) -> dict[int, Mesh]:
    """Return the nodes that should move, with their new submesh. The next iteration waits for ``awaited``."""
    if not any(node.movable for node in nodes) or len({node.mesh for node in nodes}) < 2:
        return {}
    problem = _Problem(nodes, tuple(route), awaited)
    starts: list[_Places] = list(problem.starts())
    best: _Places = {}
    for moving, weight in problem.parts():
        tried: list[_Places] = [problem.expanded({n: start[n] for n in moving}, weight) for start in starts]
        costs = [problem.cost(places, weight) for places in tried]
        best |= tried[costs.index(min(costs))]
    return {n: problem.meshes[place] for n, place in best.items() if problem.meshes[place] != nodes[n].mesh}


_Places = dict[int, int]  # movable node to the number of its place


class _Problem:
    """The problem to solve: places, the nodes that may take each, and the cost of placements."""

    def __init__(self, nodes: Sequence[Node], route: tuple[Mesh, ...], awaited: Iterable[ir.Value]):
        self._nodes, self._route = nodes, route
        self._maker = {o: n for n, node in enumerate(nodes) for o in node.outs}
        self._before = [sorted({self._maker[v] for v in (*x.reads, *x.after) if v in self._maker}) for x in nodes]
        self._back: list[bool] = []
        for node, before in zip(nodes, self._before, strict=True):
            self._back.append(bool(route) and (node.backward or any(self._back[b] for b in before)))
        self._after: list[list[int]] = [[] for _ in nodes]
        for n, before in enumerate(self._before):
            for b in before:
                self._after[b].append(n)
        self._moving = [n for n, node in enumerate(nodes) if node.movable]
        self._fixed = self._earliest(lambda node: not node.movable)
        ends = [at for at, node in zip(self._fixed, nodes, strict=True) if node.staged and not node.movable]
        self._stages = (max(ends, default=0) // len(route) + 1) * len(route) if route else 0
        submeshes = dict.fromkeys((*route, *(node.mesh for node in nodes)))
        forward = tuple(route[n % len(route)] for n in range(self._stages))
        self.meshes = (*forward, *reversed(forward), *submeshes)  # of places
        self._late = {mesh: 2 * self._stages + n for n, mesh in enumerate(submeshes)}
        self._early = self._leading(awaited)
        self._readers = group((v, n) for n, node in enumerate(nodes) for v in node.reads)
        self._weight = self._weights()
        self._never = sum(self._weight.values()) * len(submeshes) + len(nodes) + 1

    def _earliest(self, placed: Callable[[Node], bool]) -> list[int]:
        """Return the first position of each node on the route of its phase, with the ``placed`` ones where they are."""
        positions: list[int] = []
        for n, node in enumerate(self._nodes):
            at = max((positions[b] for b in self._before[n] if self._back[b] == self._back[n]), default=0)
            if self._route and node.staged and placed(node) and node.mesh in self._route:
                at = position(self._route[::-1] if self._back[n] else self._route, node.mesh, at)
            positions.append(at)
        return positions

    def _leading(self, awaited: Iterable[ir.Value]) -> set[int]:
        """Return the nodes that a fixed node, or the next iteration, waits for."""
        leading = {self._maker[v] for v in awaited if v in self._maker}
        for n in reversed(range(len(self._nodes))):
            if n in leading or not self._nodes[n].movable:
                leading.update(self._before[n])
        return leading

    def _weights(self) -> dict[ir.Value, int]:
        """Map each value of a movable node to the cost of sending it; scalars in straight code are free."""
        sent = {
            v: v.nbytes
            for v, readers in self._readers.items()
            if any(self._nodes[n].movable for n in (*readers, *([self._maker[v]] if v in self._maker else ())))
            and not (is_small(v) and (not self._route or v not in self._maker))
        }
        ties, most = len(self._nodes) + 1, len(self._late)
        if not self._route:
            return {v: (size * (len(sent) * most + 1) + 1) * ties for v, size in sent.items()}
        scalar = (sum(sent.values()) * most + 1) * ties
        array = scalar * (len(sent) * most + 1)
        return {v: (scalar if is_small(v) else array) + size * ties for v, size in sent.items()}

    def parts(self) -> Iterator[tuple[list[int], dict[ir.Value, int]]]:
        """Yield independent groups of movable nodes, with the values that they may send: no value is in two groups."""
        part = {n: [n] for n in self._moving}
        touched = {v: [n for n in (*self._readers[v], self._maker.get(v)) if n in part] for v in self._weight}
        linked = [[n, *(b for b in self._before[n] if b in part)] for n in self._moving]
        for first, *others in (*touched.values(), *linked):
            for other in others:
                small, large = sorted((part[first], part[other]), key=len)
                if small is not large:
                    large.extend(small)
                    part.update(dict.fromkeys(small, large))
        weights: dict[int, dict[ir.Value, int]] = collections.defaultdict(dict)
        for v, weight in self._weight.items():
            weights[id(part[touched[v][0]])][v] = weight
        for moving in {id(nodes): nodes for nodes in part.values()}.values():
            yield sorted(moving), weights[id(moving)]

    def starts(self) -> Iterator[_Places]:
        """Yield first placements: that of `follow_operands`, if it adds no stage, and each node at its last operand."""
        at = self._earliest(lambda node: True)
        routed = not self._route or all(self._nodes[n].mesh in self._route for n in self._moving)
        if routed and all(a == b for a, b, node in zip(at, self._fixed, self._nodes, strict=True) if not node.movable):
            chosen = {n: self._place(n, at[n]) for n in self._moving}
            if None not in chosen.values():
                yield {n: place for n, place in chosen.items() if place is not None}
        if self._route:
            yield {n: self._fixed[n] + self._stages * self._back[n] for n in self._moving}

    def _place(self, n: int, at: int) -> int | None:
        """Return the number of the place of a node at this position; None if it may not be that late."""
        if self._route and at < self._stages:
            return at + self._stages * self._back[n]
        return self._late[self._nodes[n].mesh] if self._may_be_late(n) else None

    def _may_be_late(self, n: int) -> bool:
        return not self._route or (self._back[n] and n not in self._early)

    def _rank(self, n: int, places: _Places) -> int:
        """Return how far along the route a node is. All late places are equally far."""
        if n in places:
            return min(places[n], 2 * self._stages)
        return self._fixed[n] + self._stages * self._back[n] if self._nodes[n].staged else -1

    def _mesh(self, n: int, places: _Places) -> Mesh:
        return self.meshes[places[n]] if n in places else self._nodes[n].mesh

    def _home(self, v: ir.Value, places: _Places) -> Mesh:
        return self._mesh(self._maker[v], places) if v in self._maker else self._nodes[self._readers[v][0]].reads[v]

    def cost(self, places: _Places, weights: Mapping[ir.Value, int]) -> int:
        """Return the cost of a group's transfers, plus one for each node that `follow_operands` had elsewhere."""
        total = sum(self._mesh(n, places) != self._nodes[n].mesh for n in places)
        for v, weight in weights.items():
            total += weight * len({self._mesh(n, places) for n in self._readers[v]} - {self._home(v, places)})
        return total

    def expanded(self, places: _Places, weights: Mapping[ir.Value, int]) -> _Places:
        """Improve the places of a group until no expansion betters them."""
        cost, idle = self.cost(places, weights), 0
        near = self._near(places, weights)
        while cost and idle < len(near):
            for place in near:
                tried = self._expansion(places, place, weights)
                better = self.cost(tried, weights)
                idle = 0 if better < cost else idle + 1
                if better < cost:
                    cost, places = better, tried
        return places

    def _near(self, places: _Places, weights: Mapping[ir.Value, int]) -> list[int]:
        """Return the places on submeshes where the group's values are made or read. No other place saves anything."""
        beside = {n for v in weights for n in (*self._readers[v], self._maker.get(v)) if n is not None} | set(places)
        meshes = {self._nodes[n].mesh for n in beside} | {self.meshes[place] for place in places.values()}
        meshes |= {self._nodes[self._readers[v][0]].reads[v] for v in weights if v not in self._maker}
        return [place for place, mesh in enumerate(self.meshes) if mesh in meshes]

    def _expansion(self, places: _Places, place: int, weights: Mapping[ir.Value, int]) -> _Places:
        """Move nodes to ``place`` where that is cheaper: those on the side of `SINK` of a minimum cut."""
        cut, there = Cut(), self.meshes[place]
        for n in places:
            if places[n] != place:
                node_mesh = self._nodes[n].mesh
                cut.pay(n, SINK, int(self._mesh(n, places) != node_mesh))
                late = place >= 2 * self._stages
                allowed = self._may_be_late(n) if late else (place >= self._stages) == self._back[n]
                cut.pay(SOURCE, n, int(there != node_mesh) if allowed else self._never)
                self._order(cut, n, places, place)
        for v, weight in weights.items():
            self._send(cut, v, weight, places, place)
        moved = cut.sink_side()
        return {n: place if n in moved else old for n, old in places.items()}

    def _order(self, cut: Cut, n: int, places: _Places, place: int) -> None:
        """Forbid cuts in which a node is earlier than its operands."""
        rank = min(place, 2 * self._stages)
        for b in self._before[n]:
            operand = b if places.get(b, place) != place else SOURCE
            if self._rank(b, places) > rank:
                cut.pay(operand, n, self._never)
            if operand is not SOURCE and rank > self._rank(n, places):
                cut.pay(n, operand, self._never)
        for r in self._after[n]:
            if places.get(r, place) == place and self._rank(r, places) < rank:
                cut.pay(SOURCE, n, self._never)

    def _send(self, cut: Cut, v: ir.Value, weight: int, places: _Places, place: int) -> None:
        """Add the cost of sending a value: once for each submesh that reads it and does not make it."""
        there, home, maker = self.meshes[place], self._home(v, places), self._maker.get(v)

        def side(n: int | None, mesh: Mesh) -> Any:
            return SINK if mesh == there else n if n in places else SOURCE

        source, come = side(maker, home), ("come", v)
        for mesh, readers in group((self._mesh(n, places), n) for n in self._readers[v]).items():
            stay = ("stay", v, mesh)
            for n in readers:
                cut.pay(come, side(n, mesh), self._never)
                if mesh != there:
                    cut.pay(side(n, mesh), stay, self._never)
            if mesh != there:
                cut.pay(stay, source if mesh == home else SINK, weight)
        cut.pay(source, come, weight)
