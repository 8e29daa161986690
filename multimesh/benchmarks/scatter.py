"""Forecasts against measurements as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from multimesh.timelines.drawing import begin, coordinate, label, point

_SIZE, _LEFT, _TOP, _WIDTH, _HEIGHT = 460, 54, 44, 530, 560
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
_TITLE = "Forecast against measured seconds of a step"


def scatter(points: Iterable[tuple[str, float, float]]) -> str:
    """An SVG of (group, measured seconds, forecast seconds) on logarithmic axes, with lines at 0 and 10 %."""
    return "\n".join(_lines(list(points))) + "\n"


def _lines(points: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    values = [v for _, *pair in points for v in pair]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * _SIZE

    def x(value: float) -> float:
        return _LEFT + at(value)

    def y(value: float) -> float:
        return _TOP + _SIZE - at(value)

    def line(one: tuple[float, float], other: tuple[float, float], style: str) -> str:
        (a, b), (c, d) = ((coordinate(x(v)), coordinate(y(w))) for v, w in (one, other))
        return f'<path {style} d="M{a} {b}L{c} {d}"/>'

    ends = 10.0**low, 10.0**high
    groups = list(dict.fromkeys(group for group, *_ in points))
    styles = (f"#forecasts .g{n}{{fill:{_COLORS[n % len(_COLORS)]};fill-opacity:.7}}" for n in range(len(groups)))
    words = f"{len(points)} steps; the lines are at 0 and at 10 % of difference."
    yield from begin("forecasts", _WIDTH, _HEIGHT, _TITLE, words, "\n".join(styles))
    yield label(16, 26, _TITLE, "title")
    for value in (10.0**power for power in range(low, high + 1)):
        yield line((value, ends[0]), (value, ends[1]), 'class="grid"')
        yield line((ends[0], value), (ends[1], value), 'class="grid"')
        yield label(x(value), _TOP + _SIZE + 18, f"{value:g}", "soft m")
        yield label(_LEFT - 6, y(value) + 4, f"{value:g}", "soft e")
    for share, dash in ((1.0, ""), (1.1, ' stroke-dasharray="4 4"'), (1 / 1.1, ' stroke-dasharray="4 4"')):
        low_end, high_end = ends[0] / min(1, share), ends[1] / max(1, share)
        yield line((low_end, low_end * share), (high_end, high_end * share), f'stroke="#888"{dash}')
    for group, measured, expected in points:
        told = f"{group}: measured {measured:.3g} s, forecast {expected:.3g} s"
        yield point(x(measured), y(expected), f"g{groups.index(group)}", told)
    for number, group in enumerate(groups):
        yield point(_LEFT + 16, _TOP + 16 + 18 * number, f"g{number}", group)
        yield label(_LEFT + 26, _TOP + 20 + 18 * number, group)
    yield label(_LEFT + _SIZE, _HEIGHT - 18, "measured seconds of a step; upwards the forecast", "soft e")
    yield "</svg>"
