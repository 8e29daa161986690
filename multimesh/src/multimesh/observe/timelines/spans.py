"""Kernels and transfers in time: the parts of a `Timeline`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from multimesh.core.text import amount


@dataclass(frozen=True)
class Span:
    """One run of a kernel on a submesh, from ``start`` to ``end``."""

    row: int  # index of the submesh
    # start, end: in the unit of the timeline
    start: float
    end: float
    # the phases of the kernel: ``F``, ``B``, ``W``, several of them (``FB``), or empty outside of microbatch loops
    phases: str = ""
    name: str = ""  # task names, or the name of the kernel
    # stage, microbatch: in a pipeline; None elsewhere
    stage: int | None = None
    microbatch: int | None = None

    @property
    def duration(self) -> float:
        """``end - start``."""
        return self.end - self.start

    def __str__(self) -> str:
        label = self.phases + ("" if self.stage is None else str(self.stage))
        cell = "" if self.microbatch is None else f"microbatch {self.microbatch}"
        return " ".join(filter(None, (label, self.name if self.name != label else "", cell)))


@dataclass(frozen=True)
class Hop:
    """A transfer from one submesh to another; ``producer`` and ``consumers`` are indices of spans."""

    source: int
    target: int
    start: float
    end: float
    nbytes: int | None = None
    producer: int | None = None
    consumers: tuple[int, ...] = ()


Levels = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Spans:
    """The fields of a `Timeline`, and the figures that follow from them."""

    title: str
    note: str
    unit: str
    rows: tuple[str, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Hop, ...] = ()
    live: tuple[Levels, ...] = ()
    live_unit: str = "bytes"

    @functools.cached_property
    def makespan(self) -> float:
        """Time from the start of the call to the end of its last kernel or transfer."""
        return max([0.0, *(span.end for span in self.spans), *(t.end for t in self.transfers)])

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each submesh computes."""
        times = [0.0] * len(self.rows)
        for span in self.spans:
            times[span.row] += span.duration
        return tuple(times)

    @functools.cached_property
    def idle(self) -> tuple[float, ...]:
        """Time that each submesh does not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @functools.cached_property
    def period(self) -> float:
        """Time of a step when steps follow each other: the longest from a submesh's first kernel to its last.

        Kernels without duration do not count.
        """
        rows = [[s for s in self.row(number) if s.duration] for number in range(len(self.rows))]
        return max((max(s.end for s in row) - min(s.start for s in row) for row in rows if row), default=0.0)

    @functools.cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Idle share of each submesh: idle / (idle + busy)."""
        return tuple(idle / self.makespan if self.makespan else 0.0 for idle in self.idle)

    @functools.cached_property
    def bubble(self) -> float:
        """Idle share of all submeshes together."""
        return sum(self.idle) / (self.makespan * len(self.rows)) if self.makespan and self.rows else 0.0

    @functools.cached_property
    def peaks(self) -> tuple[float, ...]:
        """The most that is alive at once on each submesh."""
        return tuple(max((amount for _, amount in steps), default=0) for steps in self.live)

    def row(self, number: int) -> tuple[Span, ...]:
        """Return the spans of one submesh in the order of their start."""
        return tuple(sorted((s for s in self.spans if s.row == number), key=lambda span: (span.start, span.end)))

    @property
    def total(self) -> str:
        """Makespan and bubble in a few words."""
        return f"makespan {amount(self.makespan, self.unit)}, bubble {100 * self.bubble:.1f} % in all"


def levels(changes: Iterable[tuple[float, int, float]]) -> Levels:
    """Return the running total of changes. A change is (time, order among those at that time, difference)."""
    ordered = sorted(changes)
    return tuple(zip((time for time, _, _ in ordered), itertools.accumulate(by for _, _, by in ordered), strict=True))
