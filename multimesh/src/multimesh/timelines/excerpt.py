"""The parts of a long timeline that a picture shows: its beginning, a middle and its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from multimesh.timelines.spans import Spans

MOST = 1500
"""Boxes in a picture that fits a window and opens at once."""

Window = tuple[float, float]


@dataclass(frozen=True)
class Excerpt:
    """The parts of a timeline that a picture shows."""

    windows: tuple[Window, ...]  # start and end of each, in order
    note: str = ""  # a sentence on the parts shown and left out; empty if all is shown

    @property
    def shown(self) -> float:
        """The length of all windows."""
        return sum(end - start for start, end in self.windows)

    def parts(self, start: float, end: float) -> Iterator[Window]:
        """Yield the parts of a time from ``start`` to ``end`` that the windows show."""
        for first, last in self.windows:
            if start < last and end > first:
                yield max(start, first), min(end, last)


def excerpt(timeline: Spans, most: int | None = None) -> Excerpt:
    """Return the windows to show so that a picture has about ``most`` boxes; None shows everything."""
    boxes = [span for span in timeline.spans if span.duration]
    end = timeline.makespan
    if most is None or len(boxes) <= most:
        return Excerpt(((0.0, end),))
    each = end * most / len(boxes) / 3
    windows = ((0.0, each), ((end - each) / 2, (end + each) / 2), (end - each, end))
    shown = [[span for span in boxes if span.start < last and span.end > first] for first, last in windows]
    found = [sorted({span.microbatch for span in part if span.microbatch is not None}) for part in shown]
    ranges = [f"{numbers[0]} to {numbers[-1]}" for numbers in found if numbers]
    what = (
        f"microbatches {', '.join(ranges[:-1])} and {ranges[-1]}"
        if len(ranges) > 1
        else "the beginning, a middle, the end"
    )
    missing = f"{len(boxes) - sum(map(len, shown)):,} of {len(boxes):,} boxes"
    return Excerpt(windows, f"Drawn: {what}. {missing} are left out at the gaps; the page and the trace have all.")
