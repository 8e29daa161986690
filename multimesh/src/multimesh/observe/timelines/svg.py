"""A timeline as an SVG picture: a row for each submesh, a box for each kernel, a line for each transfer.

The colours of Okabe and Ito stay apart for every kind of colour vision. A picture brings its background, so it can be
read on any page.
"""

from __future__ import annotations

import dataclasses
import textwrap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from multimesh.core.text import amount
from multimesh.observe.timelines.drawing import begin, box, coordinate, label, ticks
from multimesh.observe.timelines.spans import Hop, Span, Spans

_PHASES = {  # class in the picture, colour, meaning
    "F": ("F", "#0072b2", "forward"),
    "B": ("B", "#e69f00", "backward"),
    "W": ("W", "#009e73", "weight gradients"),
    "L": ("L", "#cc79a7", "late: waits for all stages"),
    "FB": ("FB", "#d55e00", "forward and backward in one kernel"),
    "": ("O", "#8a8f98", "outside of the loop"),
}
_LEFT, _RIGHT, _TOP, _ROW, _GAP, _MARGIN = 88, 184, 74, 30, 14, 16
_NARROWEST, _PAGE, _WIDEST = 660, 1000, 3000  # of the plot: at least, on a page, at most
_ROOMY, _TIGHT = 22.0, 15.0  # width of a short kernel: comfortable, and just enough for two digits
_CHARACTER = 7.0  # widest average width of a character


def draw(timeline: Spans) -> str:
    """Return the SVG of a timeline; see `multimesh.Plan.to_svg`."""
    lengths = sorted(span.duration for span in timeline.spans if span.phases and span.duration)
    short = timeline.makespan / lengths[len(lengths) // 10] if lengths else 0.0
    readable = min(short * _ROOMY, max(_PAGE, short * _TIGHT))
    plot = min(max(_NARROWEST, round(readable)), _WIDEST)
    return "\n".join(_Picture(timeline, plot).lines()) + "\n"


@dataclass(frozen=True)
class _Picture:
    """Geometry and parts of one picture."""

    timeline: Spans
    plot: float  # width

    @property
    def width(self) -> float:
        return _LEFT + self.plot + _RIGHT

    def x(self, time: float) -> float:
        """Return the position of a time."""
        return _LEFT + self.plot * time / (self.timeline.makespan or 1.0)

    def y(self, row: int) -> float:
        """Return the upper edge of a row."""
        return _TOP + row * (_ROW + _GAP)

    def lines(self) -> Iterator[str]:
        """Yield the document."""
        timeline, numbers = self.timeline, range(len(self.timeline.rows))
        facts = ", ".join(f"{field.name}={getattr(timeline, field.name)!r}" for field in dataclasses.fields(timeline))
        name = f"mm{zlib.crc32(f'Timeline({facts})'.encode()):08x}"
        legend, below = self.legend(self.y(len(numbers)) + 36)
        note = textwrap.wrap(timeline.note, int((self.width - 2 * _MARGIN) / 6))
        styles = [f"#{name} .{kind}{{fill:{colour}}}" for kind, colour, _ in _PHASES.values()]
        styles.append(f"#{name} .on{{fill:#fff}}")
        height = below + 18 * len(note)
        yield from begin(name, self.width, height, timeline.title, summary(timeline), "\n".join(styles))
        room = int((self.width - 2 * _MARGIN) / (_CHARACTER * 15 / 11))
        yield label(_MARGIN, 26, textwrap.shorten(timeline.title, room, placeholder=" ..."), "title")
        yield label(_MARGIN, 46, timeline.total, "soft")
        yield from self.axis(self.y(len(numbers)) - _GAP + 8)
        yield label(_LEFT + self.plot + 52, _TOP - 10, "bubble", "soft e")
        if timeline.live:
            yield label(self.width - _MARGIN, _TOP - 10, f"peak {timeline.live_unit}", "soft e")
        for row in numbers:
            yield from self.track(row)
        yield from map(self.transfer, timeline.transfers)
        for row in numbers:
            yield from ("<g>", *self.boxes(row), "</g>")
        yield from legend
        yield from (label(_MARGIN, below + 18 * number, text, "soft") for number, text in enumerate(note))
        yield "</svg>"

    def track(self, row: int) -> Iterator[str]:
        """Yield the label of a row, its idle time as background, its figures on the right."""
        timeline, middle = self.timeline, self.y(row) + _ROW / 2 + 4
        yield label(_MARGIN, middle, timeline.rows[row], "row")
        yield box(_LEFT, self.y(row), self.plot, _ROW, "idle")
        yield label(_LEFT + self.plot + 52, middle, f"{100 * timeline.bubbles[row]:.1f} %", "e")
        if timeline.live:
            unit = timeline.live_unit if timeline.live_unit == "bytes" else ""
            yield label(self.width - _MARGIN, middle, amount(timeline.peaks[row], unit), "e")

    def boxes(self, row: int) -> Iterator[str]:
        """Yield the boxes of one submesh, each with the number of its microbatch if there is room."""
        spans = [span for span in self.timeline.row(row) if span.duration]
        stages = sorted({span.stage for span in spans if span.stage is not None})
        for span in spans:
            later = stages.index(span.stage) / max(1, len(stages) - 1) if span.stage is not None else 0.0
            x, width = self.x(span.start), self.plot * span.duration / self.timeline.makespan
            width -= min(0.8, width / 8)
            kind, words = _PHASES[_phase(span)][0], f"{span or 'kernel'}\n{self.times(span)}"
            yield box(x, self.y(row), width, _ROW, f"c {kind}", words, 1 - 0.6 * later)
            text = span.name if span.microbatch is None else str(span.microbatch)
            if len(text) * _CHARACTER <= width:
                ink = "m on" if kind == "F" and not later else "m"
                yield label(x + width / 2, self.y(row) + _ROW / 2 + 4, text, ink)

    def transfer(self, hop: Hop) -> str:
        """Return the line of a transfer, which stands behind the boxes."""
        down, rows = hop.target > hop.source, self.timeline.rows
        start = coordinate(self.y(hop.source) + (_ROW if down else 0))
        end = coordinate(self.y(hop.target) + (0 if down else _ROW))
        size = "arrays" if hop.nbytes is None else amount(hop.nbytes, "bytes")
        words = f"{size} from {rows[hop.source]} to {rows[hop.target]}\n{self.times(hop)}"
        path = f"M{coordinate(self.x(hop.start))} {start}L{coordinate(self.x(hop.end))} {end}"
        return f'<path class="x" d="{path}"><title>{escape(words)}</title></path>'

    def times(self, event: Span | Hop) -> str:
        """Return when something ran, and for how long."""
        times = (event.start, event.end, event.end - event.start)
        return "{} to {} ({})".format(*(amount(time, self.timeline.unit) for time in times))

    def axis(self, y: float) -> Iterator[str]:
        """Yield a time axis with round numbers."""
        scale, unit = 1.0, self.timeline.unit
        if unit == "s":
            unit = amount(self.timeline.makespan, "s").split()[1]
            scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
        yield f'<path class="grid" d="M{_LEFT} {coordinate(y)}h{coordinate(self.plot)}"/>'
        for tick in ticks(self.timeline.makespan / scale, self.plot):
            x = self.x(tick * scale)
            yield f'<path class="grid" d="M{coordinate(x)} {coordinate(y)}v4"/>'
            yield label(x, y + 17, f"{tick:g}", "soft m")
        yield label(_LEFT + self.plot + 20, y + 17, unit or "time", "soft")

    def legend(self, y: float) -> tuple[list[str], float]:
        """Return the meaning of the colours, in as many lines as it takes, and the position of the next part."""
        spans = [span for span in self.timeline.spans if span.duration]
        phases = set(map(_phase, spans))
        items = [(kind, meaning, 1.0) for phase, (kind, _, meaning) in _PHASES.items() if phase in phases]
        if len({span.stage for span in spans} - {None}) > len(self.timeline.rows):
            items.append(("F", "lighter: a later stage of the same submesh", 0.4))
        items.append(("idle", "idle", 1.0))
        if self.timeline.transfers:
            items.append(("x", "transfer", 1.0))
        parts: list[str] = []
        x = float(_MARGIN)
        for kind, text, opacity in items:
            wide = 36 + 6 * len(text)
            if x + wide > self.width - _MARGIN:
                x, y = float(_MARGIN), y + 20
            parts += [box(x, y - 10, 14, 12, kind, "", opacity), label(x + 20, y, text)]
            x += wide
        return parts, y + 24


def _phase(span: Span) -> str:
    return span.phases if len(span.phases) < 2 else "FB"


def summary(timeline: Spans) -> str:
    """Return the picture in words, for readers who do not see it."""
    figures = zip(timeline.rows, timeline.busy, timeline.idle, timeline.bubbles, strict=True)
    rows = (
        f"{name} computes {amount(busy, timeline.unit)} and is idle for {amount(idle, timeline.unit)} "
        f"({100 * bubble:.1f} %)"
        for name, busy, idle, bubble in figures
    )
    return f"{timeline.total}. {'; '.join(rows)}."
