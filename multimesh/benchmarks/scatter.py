"""Forecasts against measurements as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable

_SIZE, _MARGIN = 460, 54
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")


def scatter(points: Iterable[tuple[str, float, float]]) -> str:
    """An SVG of (group, measured seconds, forecast seconds) on logarithmic axes, with lines at 0 and 10 %."""
    points = list(points)
    values = [v for _, *pair in points for v in pair]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * _SIZE

    def x(value: float) -> float:
        return _MARGIN + at(value)

    def y(value: float) -> float:
        return 10 + _SIZE - at(value)

    def line(one: tuple[float, float], other: tuple[float, float], style: str) -> str:
        (a, b), (c, d) = one, other
        return f'<line x1="{x(a):.1f}" y1="{y(b):.1f}" x2="{x(c):.1f}" y2="{y(d):.1f}" {style}/>'

    ends = 10.0**low, 10.0**high
    grid = 'stroke="#8884" stroke-width="1"'
    parts = []
    for power in range(low, high + 1):
        value = 10.0**power
        parts += [line((value, ends[0]), (value, ends[1]), grid), line((ends[0], value), (ends[1], value), grid)]
        parts.append(f'<text x="{x(value):.1f}" y="{_SIZE + 26}" text-anchor="middle">{value:g}</text>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for share, dash in ((1.0, ""), (1.1, ' stroke-dasharray="4 4"'), (1 / 1.1, ' stroke-dasharray="4 4"')):
        low_end, high_end = ends[0] / min(1, share), ends[1] / max(1, share)
        parts.append(line((low_end, low_end * share), (high_end, high_end * share), f'stroke="#888"{dash}'))
    groups = list(dict.fromkeys(group for group, *_ in points))
    color = {group: _COLORS[number % len(_COLORS)] for number, group in enumerate(groups)}
    for group, measured, expected in points:
        title = f"<title>{group}: measured {measured:.3g} s, forecast {expected:.3g} s</title>"
        place = f'cx="{x(measured):.1f}" cy="{y(expected):.1f}" r="3.5"'
        parts.append(f'<circle {place} fill="{color[group]}" fill-opacity="0.7">{title}</circle>')
    for number, group in enumerate(groups):
        top = 30 + 18 * number
        parts.append(f'<circle cx="{_MARGIN + 16}" cy="{top - 4}" r="4" fill="{color[group]}"/>')
        parts.append(f'<text x="{_MARGIN + 26}" y="{top}">{group}</text>')
    middle = _MARGIN + _SIZE / 2
    parts.append(f'<text x="{middle}" y="{_SIZE + 46}" text-anchor="middle">measured seconds of a step</text>')
    turned = f'transform="translate(14 {10 + _SIZE / 2}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">forecast</text>')
    box = f"0 0 {_SIZE + _MARGIN + 16} {_SIZE + 56}"
    style = "text{font:12px sans-serif;fill:#444}@media(prefers-color-scheme:dark){text{fill:#ccc}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img"><style>{style}</style>'
    return "\n".join([head, *parts, "</svg>\n"])
