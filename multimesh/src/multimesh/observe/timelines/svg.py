"""A timeline as an SVG picture: a row for each submesh, a box for each kernel, a line for each transfer.

The colours of Okabe and Ito stay apart for every kind of colour vision. A picture brings its background, so it can be
read on any page.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
import zlib
from collections.abc import Iterator
from html import escape

from multimesh.core.text import amount
from multimesh.observe.timelines.spans import Hop, Span, Spans

_STYLE = """\
{id} text{{font-family:Helvetica,Arial,'Liberation Sans',sans-serif;font-size:11px;fill:#1d2126}}
{id} .card{{fill:#fff;stroke:#d5d9de}}
{id} .idle{{fill:#eceef1}}
{id} .grid{{stroke:#c4c9cf;stroke-width:1}}
{id} .x{{stroke:#cc79a7;stroke-width:1.4;fill:none}}
{id} .title{{font-size:15px;font-weight:bold}}
{id} .soft{{fill:#545b64}}
{id} .e{{text-anchor:end}}
{id} .m{{text-anchor:middle}}"""
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
    return "\n".join(_Picture(timeline).lines()) + "\n"


class _Picture:
    """Geometry and parts of one picture."""

    def __init__(self, timeline: Spans) -> None:
        lengths = sorted(span.duration for span in timeline.spans if span.phases and span.duration)
        lengths = [length for length in lengths if length > lengths[-1] / 20]  # a loss has no room for a label
        short = timeline.makespan / lengths[len(lengths) // 10] if lengths else 0.0
        readable = min(short * _ROOMY, max(_PAGE, short * _TIGHT))
        self.timeline = timeline
        self.plot = min(max(_NARROWEST, round(readable)), _WIDEST)  # width
        self.width = _LEFT + self.plot + _RIGHT

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
        height = below + 18 * len(note)
        wide, high, inner = _number(self.width), _number(height), (_number(self.width - 1), _number(height - 1))
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" id="{name}" width="{wide}" height="{high}" '
            f'viewBox="0 0 {wide} {high}" role="img" aria-labelledby="{name}t {name}d">'
        )
        yield f'<title id="{name}t">{escape(timeline.title)}</title>'
        yield f'<desc id="{name}d">{escape(summary(timeline))}</desc>'
        yield "\n".join([f"<style>{_STYLE.format(id='#' + name)}", *styles, f"#{name} .on{{fill:#fff}}</style>"])
        yield '<rect class="card" x=".5" y=".5" width="{}" height="{}" rx="6"/>'.format(*inner)
        room = int((self.width - 2 * _MARGIN) / (_CHARACTER * 15 / 11))
        yield _label(_MARGIN, 26, textwrap.shorten(timeline.title, room, placeholder=" ..."), "title")
        yield _label(_MARGIN, 46, timeline.total, "soft")
        yield from self.axis(self.y(len(numbers)) - _GAP + 8)
        yield _label(_LEFT + self.plot + 52, _TOP - 10, "bubble", "soft e")
        if timeline.live:
            yield _label(self.width - _MARGIN, _TOP - 10, f"peak {timeline.live_unit}", "soft e")
        for row in numbers:
            yield from self.track(row)
        yield from map(self.transfer, timeline.transfers)
        for row in numbers:
            yield from ("<g>", *self.boxes(row), "</g>")
        yield from legend
        yield from (_label(_MARGIN, below + 18 * number, text, "soft") for number, text in enumerate(note))
        yield "</svg>"

    def track(self, row: int) -> Iterator[str]:
        """Yield the label of a row, its idle time as background, its figures on the right."""
        timeline, middle = self.timeline, self.y(row) + _ROW / 2 + 4
        yield _label(_MARGIN, middle, timeline.rows[row], "row")
        yield _box(_LEFT, self.y(row), self.plot, _ROW, "idle")
        yield _label(_LEFT + self.plot + 52, middle, f"{100 * timeline.bubbles[row]:.1f} %", "e")
        if timeline.live:
            unit = timeline.live_unit if timeline.live_unit == "bytes" else ""
            yield _label(self.width - _MARGIN, middle, amount(timeline.peaks[row], unit), "e")

    def boxes(self, row: int) -> Iterator[str]:
        """Yield the boxes of one submesh, each with the number of its microbatch if there is room."""
        spans = [span for span in self.timeline.row(row) if span.duration]
        stages = sorted({span.stage for span in spans if span.stage is not None})
        for span in spans:
            later = stages.index(span.stage) / max(1, len(stages) - 1) if span.stage is not None else 0.0
            x, width = self.x(span.start), self.plot * span.duration / self.timeline.makespan
            width -= min(0.8, width / 8)
            kind, words = _phase(span)[0], f"{span or 'kernel'}\n{self.times(span)}"
            yield _box(x, self.y(row), width, _ROW, f"c {kind}", words, 1 - 0.6 * later)
            text = span.name if span.microbatch is None else str(span.microbatch)
            if len(text) * _CHARACTER <= width:
                ink = "m on" if kind == "F" and not later else "m"
                yield _label(x + width / 2, self.y(row) + _ROW / 2 + 4, text, ink)

    def transfer(self, hop: Hop) -> str:
        """Return the line of a transfer, which stands behind the boxes."""
        down, rows = hop.target > hop.source, self.timeline.rows
        start = _number(self.y(hop.source) + (_ROW if down else 0))
        end = _number(self.y(hop.target) + (0 if down else _ROW))
        size = "arrays" if hop.nbytes is None else amount(hop.nbytes, "bytes")
        words = f"{size} from {rows[hop.source]} to {rows[hop.target]}\n{self.times(hop)}"
        path = f"M{_number(self.x(hop.start))} {start}L{_number(self.x(hop.end))} {end}"
        return f'<path class="x" d="{path}"><title>{escape(words)}</title></path>'

    def times(self, event: Span | Hop) -> str:
        """Return when something ran, and for how long."""
        times = (event.start, event.end, event.end - event.start)
        return "{} to {} ({})".format(*(amount(time, self.timeline.unit) for time in times))

    def axis(self, y: float) -> Iterator[str]:
        """Yield a time axis with round numbers, at least 60 pixels apart."""
        scale, unit = 1.0, self.timeline.unit
        if unit == "s":
            unit = amount(self.timeline.makespan, "s").split()[1]
            scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
        yield f'<path class="grid" d="M{_LEFT} {_number(y)}h{_number(self.plot)}"/>'
        end = self.timeline.makespan / scale
        least = end * 60 / self.plot or 1.0
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
        for tick in (round(i * step, 12) for i in range(math.floor(end / step * (1 + 1e-9)) + 1)):
            x = self.x(tick * scale)
            yield f'<path class="grid" d="M{_number(x)} {_number(y)}v4"/>'
            yield _label(x, y + 17, f"{tick:g}", "soft m")
        yield _label(_LEFT + self.plot + 20, y + 17, unit or "time", "soft")

    def legend(self, y: float) -> tuple[list[str], float]:
        """Return the meaning of the colours, in as many lines as it takes, and the position of the next part."""
        spans = [span for span in self.timeline.spans if span.duration]
        phases = set(map(_phase, spans))
        items = [(kind, meaning, 1.0) for kind, _, meaning in _PHASES.values() if (kind, _, meaning) in phases]
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
            parts += [_box(x, y - 10, 14, 12, kind, "", opacity), _label(x + 20, y, text)]
            x += wide
        return parts, y + 24


def summary(timeline: Spans) -> str:
    """Return the picture in words, for readers who do not see it."""
    figures = zip(timeline.rows, timeline.busy, timeline.idle, timeline.bubbles, strict=True)
    rows = (
        f"{name} computes {amount(busy, timeline.unit)} and is idle for {amount(idle, timeline.unit)} "
        f"({100 * bubble:.1f} %)"
        for name, busy, idle, bubble in figures
    )
    return f"{timeline.total}. {'; '.join(rows)}."


def _phase(span: Span) -> tuple[str, str, str]:
    return _PHASES.get(span.phases, _PHASES["FB"])


def _label(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text, of classes of the style."""
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{_number(x)}" y="{_number(y)}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str, words: str = "", opacity: float = 1.0) -> str:
    """Return a rectangle. ``words`` are shown to readers who point at it."""
    size = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    light = "" if opacity == 1 else f' fill-opacity="{_number(opacity)}"'
    end = f"><title>{escape(words)}</title></rect>" if words else "/>"
    return f'<rect class="{kind}" {size}{light}{end}'


def _number(value: float) -> str:
    """Return the shortest text of a coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
