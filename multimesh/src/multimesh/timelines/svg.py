"""A timeline as an SVG picture: a row for each submesh, a box for each kernel, a line for each transfer.

The colours of Okabe and Ito stay apart for every kind of colour vision. The picture has its own background, light or
dark as the viewer prefers, so it can be read on any page.
"""

from __future__ import annotations

import functools
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from multimesh.core.text import amount
from multimesh.timelines import hover
from multimesh.timelines.drawing import begin, ticks
from multimesh.timelines.drawing import coordinate as _n
from multimesh.timelines.drawing import label as _text
from multimesh.timelines.excerpt import Excerpt, excerpt
from multimesh.timelines.spans import Span, Spans

_COLOURS = {"F": "#0072b2", "B": "#e69f00", "W": "#009e73", "L": "#cc79a7", "": "#8a8f98"}
_MEANING = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "L": "late: waits for all stages",
    "FB": "forward and backward in one kernel",
    "": "outside of the loop",
}
_FADE = 0.6  # share of white in the last of several stages of a submesh
_TURN = 0.36  # end of the forward in a box of forward and backward; not to scale
_CHARACTER = 0.64  # widest average width of a character, in units of the font size
_LEFT, _RIGHT, _TOP, _ROW, _GAP, _MARGIN = 88, 184, 74, 30, 14, 16
_NARROWEST, _PAGE, _WIDEST = 660, 1000, 3000  # of the plot: at least, on a page, at most
_CUT = 36  # width of a gap where time is left out
_ROOMY, _TIGHT = 22.0, 14.0  # width of a short kernel: comfortable, and just enough for two digits


def draw(timeline: Spans, most: int | None = None) -> str:
    """Return the SVG of a timeline, of an excerpt if that has more than ``most`` boxes; see `multimesh.Plan.to_svg`."""
    return "\n".join(_Picture(timeline, excerpt(timeline, most)).lines()) + "\n"


@dataclass(frozen=True)
class _Picture:
    """Geometry and parts of one picture."""

    timeline: Spans
    excerpt: Excerpt

    @functools.cached_property
    def plot(self) -> float:
        """The width of the plot: wide enough for the labels of short kernels, within limits."""
        lengths = sorted(s.duration for s in self.timeline.spans if s.phases and s.duration)
        if not lengths:
            return _NARROWEST
        short = self.excerpt.shown / lengths[len(lengths) // 10]
        wanted = min(short * _ROOMY, max(_PAGE, short * _TIGHT))
        return min(max(_NARROWEST, round(wanted)), _WIDEST)

    @property
    def width(self) -> float:
        return _LEFT + self.plot + _RIGHT

    @property
    def bottom(self) -> float:
        """The lower edge of the rows."""
        return _TOP + len(self.timeline.rows) * (_ROW + _GAP) - _GAP

    def x(self, time: float) -> float:
        """Return the position of a time; of one that is left out, the position of the gap."""
        shown, windows = self.excerpt.shown, self.excerpt.windows
        before = [(start, end) for start, end in windows[:-1] if end < time]
        seen = sum(end - start for start, end in before) + max(0.0, time - windows[len(before)][0])
        room = self.plot - _CUT * (len(windows) - 1)
        return _LEFT + _CUT * len(before) + (seen / shown if shown else 0.0) * room

    def y(self, row: int) -> float:
        """Return the upper edge of a row."""
        return _TOP + row * (_ROW + _GAP)

    def lines(self) -> Iterator[str]:
        """Yield the whole document."""
        line = self.timeline
        name = f"mm{zlib.crc32(repr(line).encode()):08x}"
        legend, below = self.legend(self.bottom + 50)
        note = textwrap.wrap(
            " ".join(filter(None, (line.note, self.excerpt.note))), int((self.width - 2 * _MARGIN) / (11 * 0.56))
        )
        height = below + 18 * len(note)
        both = (
            f'<linearGradient id="{name}g"><stop offset="{_TURN}" stop-color="{_COLOURS["F"]}"/>'
            f'<stop offset="{_TURN}" stop-color="{_COLOURS["B"]}"/></linearGradient>'
        )
        paints = [both] * any(len(s.phases) > 1 for s in line.spans)
        styles = self.fills("#" + name)
        yield from begin(name, self.width, height, line.title, summary(line), styles, *paints)
        yield from self.head()
        yield from self.axis()
        yield from (self.track(row) for row in range(len(line.rows)))
        yield from self.transfers()
        hints = hover.of_spans(line)
        for row in range(len(line.rows)):
            yield from self.cells(row, name, hints)
        yield from legend
        for number, text in enumerate(note):
            yield _text(_MARGIN, below + 18 * number, text, "soft")
        yield "</svg>"

    def head(self) -> Iterator[str]:
        """Yield the title, the total, and the heads of the columns on the right."""
        line = self.timeline
        room = int((self.width - 2 * _MARGIN) / (15 * _CHARACTER))
        yield _text(_MARGIN, 26, textwrap.shorten(line.title, room, placeholder=" ..."), "title")
        yield _text(_MARGIN, 46, line.total, "soft")
        yield _text(_LEFT + self.plot + 52, _TOP - 10, "bubble", "soft e")
        if line.live:
            yield _text(self.width - _MARGIN, _TOP - 10, f"peak {line.live_unit}", "soft e")

    def track(self, row: int) -> str:
        """Return the label of a row, its idle time as background, its figures on the right."""
        line, top = self.timeline, self.y(row)
        middle = top + _ROW / 2 + 4
        parts = [
            _text(_MARGIN, middle, line.rows[row], "row"),
            *(
                f'<rect class="idle" x="{_n(self.x(start))}" y="{_n(top)}" width="{_n(self.x(end) - self.x(start))}" '
                f'height="{_ROW}"/>'
                for start, end in self.excerpt.windows
            ),
            _text(_LEFT + self.plot + 52, middle, f"{100 * line.bubbles[row]:.1f} %", "e"),
        ]
        if line.live:
            unit = line.live_unit if line.live_unit == "bytes" else ""
            parts.append(_text(self.width - _MARGIN, middle, amount(line.peaks[row], unit), "e"))
        return "\n".join(parts)

    def cells(self, row: int, name: str, hints: Sequence[str]) -> Iterator[str]:
        """Yield the boxes of one submesh, each with the number of its microbatch if there is room."""
        line = self.timeline
        chunks = self.chunks(row)
        yield "<g>"
        for number in line.order(row):
            span = line.spans[number]
            part = next(self.excerpt.parts(span.start, span.end), None)
            if not span.duration or part is None:
                continue
            left, width = self.x(part[0]), self.x(part[1]) - self.x(part[0])
            style = f'class="c" fill="url(#{name}g)"' if len(span.phases) > 1 else f'class="c {_kind(span, chunks)}"'
            gap = min(0.8, width / 8)
            yield (
                f'<rect {style} x="{_n(left)}" y="{_n(self.y(row))}" width="{_n(width - gap)}" height="{_ROW}" rx="2">'
                f"<title>{escape(hints[number])}</title></rect>"
            )
            label = span.name if span.microbatch is None else str(span.microbatch)
            size = 11 if width >= _ROOMY else 10
            first = _TURN * (width - gap) if len(span.phases) > 1 else 0.0
            if len(label) * size * _CHARACTER <= width - gap - first:
                kind = "tB" if first else f"t{_kind(span, chunks)}"
                small = "" if size == 11 else ' style="font-size:10px"'
                centre = left + (width - gap + first) / 2
                yield (
                    f'<text class="m {kind}" x="{_n(centre)}" y="{_n(self.y(row) + _ROW / 2 + 4)}"{small}>'
                    f"{escape(label)}</text>"
                )
        yield "</g>"

    def transfers(self) -> Iterator[str]:
        """Yield a line for each transfer, behind the boxes."""
        for t in self.timeline.transfers:
            if not any(first <= t.start and t.end <= last for first, last in self.excerpt.windows):
                continue
            down = t.target > t.source
            start = self.y(t.source) + (_ROW if down else 0)
            end = self.y(t.target) + (0 if down else _ROW)
            path = f'd="M{_n(self.x(t.start))} {_n(start)}L{_n(self.x(t.end))} {_n(end)}"'
            yield f'<path class="x" {path}><title>{escape(hover.of_transfer(self.timeline, t))}</title></path>'

    def axis(self) -> Iterator[str]:
        """Yield a time axis with round numbers."""
        line, y = self.timeline, self.bottom + 8
        yield f'<path class="grid" d="M{_LEFT} {_n(y)}H{_n(_LEFT + self.plot)}"/>'
        scale, unit = _scale(line)
        plot = self.plot * line.makespan / self.excerpt.shown if self.excerpt.shown else self.plot
        for tick in ticks(line.makespan / scale, plot):
            if not any(first <= tick * scale <= last * (1 + 1e-9) for first, last in self.excerpt.windows):
                continue
            x = self.x(tick * scale)
            yield f'<path class="grid" d="M{_n(x)} {_n(y)}v4"/>'
            yield _text(x, y + 17, f"{tick:g}", "soft m")
        yield _text(_LEFT + self.plot + 20, y + 17, unit or "time", "soft")

    def legend(self, y: float) -> tuple[list[str], float]:
        """Return the meaning of the colours, in as many lines as it takes, and the position of the next part."""
        line = self.timeline
        present = {s.phases for s in line.spans if s.duration}
        alone = "W" not in present
        items = [
            (p, text + (", weight gradients included" if p == "B" and alone else ""))
            for p, text in _MEANING.items()
            if p in present
        ]
        if any(len(self.chunks(row)) > 1 for row in range(len(line.rows))):
            items.append(("light", "lighter: a later stage of the same submesh"))
        items.append(("idle", "idle"))
        if line.transfers:
            items.append(("x", "transfer"))
        parts: list[str] = []
        x = float(_MARGIN)
        for kind, text in items:
            wide = 20 + len(text) * 11 * 0.54 + 16
            if x + wide > self.width - _MARGIN and x > _MARGIN:
                x, y = float(_MARGIN), y + 20
            parts += [_swatch(kind, x, y), _text(x + 20, y, text)]
            x += wide
        return parts, y + 24

    def chunks(self, row: int) -> tuple[int, ...]:
        """Return the stages of a submesh, in order."""
        return tuple(sorted({s.stage for s in self.timeline.spans if s.row == row and s.stage is not None}))

    def fills(self, root: str) -> str:
        """Return the styles of every kind of box and label. Later stages of a submesh are lighter."""
        most = max((len(self.chunks(row)) for row in range(len(self.timeline.rows))), default=1)
        rules = []
        absent = {"L"}.difference(s.phases for s in self.timeline.spans)
        for phase, colour in _COLOURS.items():
            for chunk in range(0 if phase in absent else most if phase else 1):
                shade = _mix(colour, _FADE * chunk / (most - 1) if most > 1 else 0.0)
                name = (phase or "O") + (str(chunk) if chunk else "")
                rules += [f"{root} .{name}{{fill:{shade}}}", f"{root} .t{name}{{fill:{_on(shade)}}}"]
        return "\n".join(rules)


def _kind(span: Span, chunks: tuple[int, ...]) -> str:
    chunk = chunks.index(span.stage) if span.stage is not None else 0
    return (span.phases or "O") + (str(chunk) if chunk and span.phases else "")


def _swatch(kind: str, x: float, y: float) -> str:
    if kind == "x":
        return f'<path class="x" d="M{_n(x)} {_n(y - 4)}h14"/>'
    box = f'x="{_n(x)}" y="{_n(y - 10)}" width="{{}}" height="12" rx="2"'
    if kind == "FB":
        second = f'<rect class="B" x="{_n(x + 5)}" y="{_n(y - 10)}" width="9" height="12"/>'
        return f'<rect class="F" {box.format(5)}/>{second}'
    if kind == "light":
        fade = [_mix(_COLOURS["F"], share) for share in (0.0, _FADE)]
        second = f'<rect fill="{fade[1]}" x="{_n(x + 7)}" y="{_n(y - 10)}" width="7" height="12"/>'
        return f'<rect fill="{fade[0]}" {box.format(7)}/>{second}'
    return f'<rect class="{kind or "O"}" {box.format(14)}/>'


def summary(timeline: Spans) -> str:
    """Return the picture in words, for readers who do not see it."""
    rows = [
        f"{name} computes {amount(busy, timeline.unit)} and is idle for {amount(idle, timeline.unit)} "
        f"({100 * bubble:.1f} %)"
        for name, busy, idle, bubble in zip(timeline.rows, timeline.busy, timeline.idle, timeline.bubbles, strict=True)
    ]
    return f"{timeline.total}. {'; '.join(rows)}."


def _scale(timeline: Spans) -> tuple[float, str]:
    if timeline.unit != "s":
        return 1.0, timeline.unit
    _, unit = amount(timeline.makespan, "s").split()
    return {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit], unit


def _mix(colour: str, white: float) -> str:
    parts = (round(int(colour[i : i + 2], 16) * (1 - white) + 255 * white) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)


def _on(colour: str) -> str:
    """Return black or white, whichever has more contrast on a colour (WCAG 2)."""
    linear = []
    for i in (1, 3, 5):
        part = int(colour[i : i + 2], 16) / 255
        linear.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#fff"
