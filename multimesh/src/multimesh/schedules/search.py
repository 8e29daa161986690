"""A search for short tables: list scheduling under many policies, then local improvement of the best ones.

The list scheduler is that of the zero-bubble papers (Qi et al. 2023), greedy over any placement and costs. The
scheduler that also validates, orders and forecasts (`schedules.scheduler.run`) simulates every table.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from multimesh.schedules.costs import CLOSE, StageCosts
from multimesh.schedules.scheduler import run
from multimesh.schedules.table import Cell, Table
from multimesh.schedules.validation import needs

_WINDOW = 8  # how far a cell is moved within its row
_STARTS = 3  # tables that are improved

Rows = tuple[tuple[int, ...], ...]
"""The kinds of each submesh in order. A kind is a phase of a stage, and stands for its next microbatch."""


class Problem:
    """A loop to be ordered: its cells as numbers, ``kind * microbatches + microbatch``.

    Microbatches cost the same, so those of a kind keep their order: a row is a sequence of kinds. ``place`` has the
    submesh of each stage. If it ``splits``, weight gradients are cells of their own; else B takes the time of both.
    """

    def __init__(self, place: Sequence[int], microbatches: int, costs: StageCosts, *, backward: bool, splits: bool):
        self.place, self.microbatches, self.costs = tuple(place), microbatches, costs
        self.phases = "F" if not backward else "FBW" if splits else "FB"
        stages, count = len(place), microbatches
        self.submeshes = max(place) + 1
        self.kinds = range(len(self.phases) * stages)
        self.stage = [kind % stages for kind in self.kinds]
        self.row = [place[stage] for stage in self.stage]
        covers = {"F": "F", "B": "B" if splits else "BW", "W": "W"}
        times = [costs.of(stage, covers[phase]) for phase in self.phases for stage in range(stages)]
        self.time = [time for time in times for _ in range(count)]
        self.needs = [tuple(map(self._number, needs(self._cell(n), stages))) for n in range(len(self.time))]
        self.users: list[list[int]] = [[] for _ in self.needs]
        for cell, sources in enumerate(self.needs):
            for need in sources:
                self.users[need].append(cell)
        self.last = len(self.phases) - 1

    def hop(self, source: int, cell: int) -> float:
        """Return the time of a transfer between two cells of different submeshes."""
        one, other = (self.stage[c // self.microbatches] for c in (source, cell))
        return self.costs.hop(one, other)

    def times(self, rows: Rows) -> dict[int, tuple[float, float]] | None:
        """Return start and end of every cell; None if cells wait for each other."""
        found = run([self.cells(row) for row in rows], self.needs.__getitem__, self.time.__getitem__, self.hop)
        return found if len(found) == len(self.time) else None

    def cells(self, row: Sequence[int]) -> list[int]:
        """Return the cells of a row of kinds."""
        nexts = [kind * self.microbatches for kind in self.kinds]
        found = []
        for kind in row:
            found.append(nexts[kind])
            nexts[kind] += 1
        return found

    def grows(self, kind: int) -> float:
        """Return the memory that a cell adds to its submesh when it starts, or, if negative, frees when it ends."""
        phase, stage = divmod(kind, len(self.place))
        return self.costs.grows(stage, self.phases[phase], last=self.phases[-1]) if self.last else 0.0

    def peak(self, row: Sequence[int]) -> float:
        """Return the most activations alive on a submesh.

        If W follows its B at once, B's values for it do not count.
        """
        alive = most = held = 0.0
        late = [0] * len(self.place)  # of each stage: B whose W have not run
        for kind, following in itertools.zip_longest(row, row[1:]):
            phase, stage = divmod(kind, len(self.place))
            by = self.grows(kind) + held
            at_once = phase == 1 < self.last and not late[stage] and following == kind + len(self.place)
            held, by = (by, 0.0) if at_once else (0.0, by)
            alive += by
            most = max(most, alive)
            late[stage] += (phase == 1) - (phase == 2)
        return most

    def bound(self) -> float:
        """Return a time before which no table ends."""
        stages, times = len(self.place), self.time[:: self.microbatches]

        def way(phase: int, stage: int) -> float:
            """Through all stages before one, forward, or all after it in the backward's order."""
            return sum(times[phase * stages + s] + self._between(s) for s in range(stage))

        least = [way(0, stages - 1) + times[stages - 1]]
        if self.last:
            tail = way(1, stages - 1) + times[2 * stages - 1] + (times[2 * stages] if self.last == 2 else 0.0)
            least = [least[0] + tail]
        for row in range(self.submeshes):
            mine = [kind for kind in self.kinds if self.row[kind] == row]
            head = min(way(0, kind) for kind in mine if kind < stages)
            least.append(head + self.microbatches * sum(times[kind] for kind in mine))
            if self.last:
                front = self.microbatches * sum(times[kind] for kind in mine if kind < 2 * stages)
                after = min(way(1, kind - stages) for kind in mine if stages <= kind < 2 * stages)
                least.append(head + front + after + (times[2 * stages] if self.last == 2 else 0.0))
        return max(least)

    def _between(self, stage: int) -> float:
        """Return the time of the transfer between a stage and the next."""
        return self.costs.hop(stage, stage + 1) if self.place[stage] != self.place[stage + 1] else 0.0

    def table(self, rows: Rows) -> Table:
        """Return the rows as cells with names."""
        return tuple(tuple(map(self._cell, self.cells(row))) for row in rows)

    def _cell(self, number: int) -> Cell:
        kind, microbatch = divmod(number, self.microbatches)
        phase, stage = divmod(kind, len(self.place))
        return Cell(self.phases[phase], stage, microbatch)

    def _number(self, cell: Cell) -> int:
        kind = self.phases.index(cell.phase) * len(self.place) + cell.stage
        return kind * self.microbatches + cell.microbatch

    def rows(self, table: Table) -> Rows:
        """Return the kinds of a table whose microbatches are in order."""
        return tuple(tuple(self._number(cell) // self.microbatches for cell in row) for row in table)


@dataclass(frozen=True)
class Policy:
    """The preferences of the list scheduler between cells that could start.

    A submesh waits for a better cell that will arrive, as long as ``patience`` times the cell that it could start.
    """

    limits: tuple[float, ...]  # the most activations alive on each submesh
    forward: bool  # a submesh prefers a forward to a backward, as long as it may hold more
    patience: float
    grouped: bool  # stages take turns by groups of as many microbatches as submeshes, not one by one


def fill_rows(problem: Problem, policy: Policy) -> Rows | None:
    """Fill rows in order of time. None if all submeshes are full before a backward can run."""
    count, stages = problem.microbatches, len(problem.place)
    left = [len(needs) for needs in problem.needs]
    arrival = [0.0] * len(left)
    nexts = [kind * count for kind in problem.kinds]
    mine = [[kind for kind in problem.kinds if problem.row[kind] == row] for row in range(problem.submeshes)]
    clock, alive = [0.0] * problem.submeshes, [0.0] * problem.submeshes
    rows: list[list[int]] = [[] for _ in range(problem.submeshes)]
    looks = [(0.0, row) for row in range(problem.submeshes)]

    def rank(kind: int) -> tuple[float, ...]:
        phase, stage = divmod(kind, stages)
        microbatch = nexts[kind] % count
        group = microbatch // problem.submeshes if policy.grouped else microbatch
        preferred = 2 if phase == 2 else phase != 0 if policy.forward else phase != 1
        return (preferred, group, stage if phase == 0 else -stage, microbatch)

    while looks:
        now, row = heapq.heappop(looks)
        if clock[row] > now:
            continue
        room = policy.limits[row] * (1 + CLOSE) - alive[row]
        fit = [k for k in mine[row] if nexts[k] < (k + 1) * count and not left[nexts[k]] and problem.grows(k) <= room]
        here = [kind for kind in fit if arrival[nexts[kind]] <= now]
        later = [kind for kind in fit if arrival[nexts[kind]] > now]
        if here:
            best = min(here, key=rank)
            until = now + policy.patience * problem.time[nexts[best]]
            later = [k for k in later if arrival[nexts[k]] <= until and rank(k)[0] < rank(best)[0]]
        if later:
            heapq.heappush(looks, (min(arrival[nexts[kind]] for kind in later), row))
        if later or not here:
            continue
        cell = nexts[best]
        nexts[best] += 1
        rows[row].append(best)
        alive[row] += problem.grows(best)
        clock[row] = end = now + problem.time[cell]
        heapq.heappush(looks, (end, row))
        for user in problem.users[cell]:
            other = problem.row[user // count]
            arrival[user] = max(arrival[user], end + (problem.hop(cell, user) if other != row else 0.0))
            left[user] -= 1
            if not left[user]:
                heapq.heappush(looks, (max(arrival[user], clock[other]), other))
    return tuple(map(tuple, rows)) if sum(map(len, rows)) == len(left) else None


@dataclass(frozen=True)
class Found:
    """A table as rows, and the time at which it ends."""

    problem: Problem
    rows: Rows
    makespan: float


def search(
    problems: Sequence[Problem],
    starts: Sequence[Found],
    limits: Sequence[float],
    *,
    evaluations: int,
    seed: int,
) -> Found | None:
    """Return the shortest table within the limits that the search finds; it simulates so many ``evaluations``.

    ``problems`` are the loop with weight gradients apart, with them in B, or one of these. ``starts`` are known tables
    that fit; they are improved too. ``limits`` are the most activations alive on each submesh. The same arguments, with
    the ``seed`` of the random choices, give the same table.
    """
    rng = random.Random(seed)  # noqa: S311
    bound = min(problem.bound() for problem in problems)
    found = sorted(starts, key=lambda f: f.makespan)
    caps = [tuple(f.problem.peak(row) for row in f.rows) for f in starts] or [tuple(limits)]
    seen: set[tuple[int, Policy]] = set()
    spent = 0
    while spent < evaluations // 3 and not _reaches(found, bound):
        which = spent % len(problems)
        policy = _policy(rng, limits, caps, problems[which])
        spent += 1
        if (which, policy) in seen:
            continue
        seen.add((which, policy))
        rows = fill_rows(problems[which], policy)
        times = rows and problems[which].times(rows)
        if rows and times:
            found.append(Found(problems[which], rows, max(end for _, end in times.values())))
    found.sort(key=lambda f: f.makespan)
    chosen = _different(found)
    for number, start in enumerate(chosen):
        if _reaches(found, bound):
            break
        budget = (evaluations - spent) // (len(chosen) - number)
        found.insert(0, _improve(start, limits, bound, budget, rng))
        spent += budget
        found.sort(key=lambda f: f.makespan)
    return found[0] if found else None


def _reaches(found: Sequence[Found], bound: float) -> bool:
    return any(f.makespan <= bound * (1 + CLOSE) for f in found)


def _different(found: Sequence[Found]) -> list[Found]:
    """Return the first few tables that differ."""
    unique: dict[Rows, Found] = {}
    for f in found:
        unique.setdefault(f.rows, f)
    return list(unique.values())[:_STARTS]


def _policy(rng: random.Random, limits: Sequence[float], caps: Sequence[tuple[float, ...]], problem: Problem) -> Policy:
    """Return a random policy: the memory of a known table, a little more or less, or all of it."""
    cap = rng.choice([*caps, tuple(limits)])
    sizes = [max(problem.grows(k) for k in problem.kinds if problem.row[k] == row) for row in range(problem.submeshes)]
    moved = [c + size * rng.choice((0, 0, 1, 2, -1)) for c, size in zip(cap, sizes, strict=True)]
    bounded = tuple(min(limit, max(c, size)) for limit, c, size in zip(limits, moved, sizes, strict=True))
    return Policy(bounded, rng.random() < 0.5, rng.choice((0.0, 0.0, 0.25, 0.5, 1.0)), rng.random() < 0.5)


def _improve(start: Found, limits: Sequence[float], bound: float, evaluations: int, rng: random.Random) -> Found:
    """Move cells within their rows; keep each move that makes the table no longer."""
    problem, rows, makespan = start.problem, start.rows, start.makespan
    times = problem.times(rows)
    for _ in range(evaluations):
        if times is None or makespan <= bound * (1 + CLOSE):
            break
        changed = _move_cell(problem, rows, times, rng)
        if changed is None:
            continue
        row, order = changed
        if not _keeps_order(problem, order) or problem.peak(order) > limits[row] * (1 + CLOSE):
            continue
        candidate = (*rows[:row], order, *rows[row + 1 :])
        new = problem.times(candidate)
        end = max(end for _, end in new.values()) if new else None
        if new is not None and end is not None and end <= makespan * (1 + CLOSE):
            rows, times, makespan = candidate, new, min(end, makespan)
    return Found(problem, rows, makespan)


def _move_cell(
    problem: Problem, rows: Rows, times: dict[int, tuple[float, float]], rng: random.Random
) -> tuple[int, tuple[int, ...]] | None:
    """Return a row with one cell moved: into idle time, ahead because another submesh waits for it, or anywhere."""
    row = rng.randrange(len(rows))
    cells = problem.cells(rows[row])
    gaps = [
        n for n, (a, b) in enumerate(itertools.pairwise(cells), 1) if times[b][0] > times[a][1] * (1 + CLOSE) + 1e-300
    ]
    way = rng.random()
    if gaps and way < 0.8:
        at = rng.choice(gaps)
        if way < 0.4:
            source = at + rng.randint(1, _WINDOW)
            return _shift(rows, row, source, at) if source < len(cells) else None
        needs = problem.needs[cells[at]]
        if not needs:
            return None
        late = max(needs, key=lambda cell: times[cell][1])
        row = problem.row[late // problem.microbatches]
        source = problem.cells(rows[row]).index(late)
        return _shift(rows, row, source, max(0, source - rng.randint(1, _WINDOW)))
    source = rng.randrange(len(cells))
    return _shift(rows, row, source, min(len(cells) - 1, max(0, source + rng.randint(-_WINDOW, _WINDOW))))


def _shift(rows: Rows, row: int, source: int, target: int) -> tuple[int, tuple[int, ...]] | None:
    order = list(rows[row])
    order.insert(target, order.pop(source))
    return (row, tuple(order)) if tuple(order) != rows[row] else None


def _keeps_order(problem: Problem, row: Sequence[int]) -> bool:
    """Return whether every F of a stage comes before its B, and every B before its W."""
    stages = len(problem.place)
    done = [0] * len(problem.kinds)
    for kind in row:
        if kind >= stages and done[kind] >= done[kind - stages]:
            return False
        done[kind] += 1
    return True
