"""Elements of all pictures: style, text, coordinates, and round numbers of axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape

STYLE = """\
{id} text{{font-family:Helvetica,Arial,'Liberation Sans',sans-serif;font-size:11px;fill:#1d2126}}
{id} .card{{fill:#fff;stroke:#d5d9de}}
{id} .idle{{fill:#eceef1}}
{id} .grid{{stroke:#c4c9cf;stroke-width:1}}
{id} .x{{stroke:#cc79a7;stroke-width:1.4;fill:none}}
{id} .title{{font-size:15px;font-weight:bold}}
{id} .soft{{fill:#545b64}}
{id} .e{{text-anchor:end}}
{id} .m{{text-anchor:middle}}"""


def ticks(end: float, width: float) -> Iterable[float]:
    """Return round numbers from 0 to ``end``, at least 60 pixels apart."""
    if end <= 0:
        return [0.0]
    least = end * 60 / width
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    return [round(i * step, 12) for i in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def begin(name: str, width: float, height: float, title: str, words: str, styles: str, *paints: str) -> Iterator[str]:
    """Yield the beginning of a picture, with its card. ``words`` describe it to readers who do not see it."""
    wide, high = coordinate(width), coordinate(height)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" id="{name}" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" role="img" aria-labelledby="{name}t {name}d">'
    )
    yield f'<title id="{name}t">{escape(title)}</title>'
    yield f'<desc id="{name}d">{escape(words)}</desc>'
    yield f"<style>{STYLE.format(id='#' + name)}\n{styles}</style>"
    yield from paints
    yield f'<rect class="card" x=".5" y=".5" width="{coordinate(width - 1)}" height="{coordinate(height - 1)}" rx="6"/>'


def point(x: float, y: float, kind: str, words: str) -> str:
    """Return a point of a class of the picture's own. ``words`` are shown to readers who point at it."""
    place = f'cx="{coordinate(x)}" cy="{coordinate(y)}" r="4"'
    return f'<circle class="{kind}" {place}><title>{escape(words)}</title></circle>'


def label(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text, of classes of `STYLE`."""
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{coordinate(x)}" y="{coordinate(y)}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, words: str = "", opacity: float = 1.0) -> str:
    """Return a rectangle of a class of the picture's own; ``words`` are as in `point`."""
    size = f'x="{coordinate(x)}" y="{coordinate(y)}" width="{coordinate(width)}" height="{coordinate(height)}"'
    light = "" if opacity == 1 else f' fill-opacity="{coordinate(opacity)}"'
    end = f"><title>{escape(words)}</title></rect>" if words else "/>"
    return f'<rect class="{kind}" {size}{light}{end}'


def coordinate(value: float) -> str:
    """Return the shortest text of a coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
