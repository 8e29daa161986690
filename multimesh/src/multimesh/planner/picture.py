"""Memory against the time of a step, as an SVG picture; a list below names the configurations on the Pareto front."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from multimesh.timelines.drawing import begin, coordinate, label, ticks
from multimesh.timelines.drawing import point as circle

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 860, 440, 64, 64, 28, 52  # the height is without the list
_LINE = 16  # between lines of the list
_NEAR = 14  # points that are nearer have their letters on different sides


@dataclass(frozen=True)
class Point:
    """A configuration: seconds of a step, bytes of the fullest device, and its name."""

    seconds: float
    bytes: float
    name: str


def front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return points that no other beats in both memory and time, the fastest first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.seconds, point.bytes)):
        if not found or point.bytes < found[-1].bytes:
            found.append(point)
    return tuple(found)


def draw(title: str, points: Sequence[Point], limit: float) -> str:
    """SVG of configurations in a device's memory."""
    return "\n".join(_lines(title, points, limit)) + "\n"


def _lines(title: str, points: Sequence[Point], limit: float) -> Iterator[str]:
    best = front(points)
    first, last = min(p.seconds for p in points), max(p.seconds for p in points)
    margin = 0.06 * (last - first) or 0.05 * last
    low, high = max(0.0, first - margin), last + margin
    top = 1.06 * max(limit, *(p.bytes for p in points)) / 1e9
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(seconds: float) -> float:
        return _LEFT + wide * (seconds - low) / (high - low)

    def y(size: float) -> float:
        return _TOP + tall * (1 - size / 1e9 / top)

    name = f"mm{zlib.crc32(repr((title, points)).encode()):08x}"
    words = "; ".join(f"{p.name}: {p.seconds:.4g} s, {p.bytes / 1e9:.1f} GB" for p in best)
    yield from begin(
        name, _WIDTH, _HEIGHT + _LINE * (len(best) + 1), title, f"On the front: {words}.", _own("#" + name)
    )
    yield label(16, 26, title, "title")
    yield label(16, 46, "GB of the fullest device, against seconds of a step", "soft")
    for tick in ticks(top, tall):
        yield f'<path class="grid" d="M{_LEFT} {coordinate(y(1e9 * tick))}h{wide}"/>'
        yield label(_LEFT - 6, y(1e9 * tick) + 4, f"{tick:g}", "soft e")
    for tick in _between(low, high, wide):
        yield label(x(tick), _HEIGHT - _BOTTOM + 18, f"{tick:g}", "soft m")
    yield label(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM + 36, "s", "soft e")
    yield f'<path class="limit" d="M{_LEFT} {coordinate(y(limit))}h{wide}"/>'
    yield label(_WIDTH - _RIGHT, y(limit) - 5, f"{limit / 1e9:.1f} GB may be used", "soft e")
    path = "L".join(f"{coordinate(x(p.seconds))} {coordinate(y(p.bytes))}" for p in best)
    yield f'<path class="front" d="M{path}"/>'
    for p in points:
        told = f"{p.name}: {p.seconds:.4g} s, {p.bytes / 1e9:.1f} GB"
        yield circle(x(p.seconds), y(p.bytes), "best" if p in best else "other", told)
    before, above = -_WIDTH * 1.0, False
    for i, p in enumerate(best):
        above = not (above and x(p.seconds) - before < _NEAR)
        before = x(p.seconds)
        letter = f"{ascii_uppercase[i % 26]}{i // 26 or ''}"  # the table has numbers
        yield label(before, y(p.bytes) + (-8 if above else 16), letter, "m")
        line = _HEIGHT + _LINE * (i + 0.5)
        yield label(_LEFT - 6, line, letter, "e")
        yield label(_LEFT + 6, line, f"{p.seconds:.4g} s")
        yield label(_LEFT + 66, line, f"{p.bytes / 1e9:.1f} GB")
        yield label(_LEFT + 126, line, p.name)
    yield "</svg>"


def _own(root: str) -> str:
    return "\n".join(
        f"{root} .{kind}{{{style}}}"
        for kind, style in (
            ("best", "fill:#0072b2"),
            ("other", "fill:#8a8f98"),
            ("front", "fill:none;stroke:#0072b2;stroke-width:1.4"),
            ("limit", "fill:none;stroke:#e69f00;stroke-width:1.4;stroke-dasharray:5 4"),
        )
    )


def _between(low: float, high: float, width: float) -> Iterator[float]:
    """Round numbers of an axis that does not begin at 0."""
    steps = list(itertools.islice(ticks(high - low, width), 1, 2))
    if not steps:
        return
    number = int(low / steps[0]) + 1
    while number * steps[0] <= high:
        yield round(number * steps[0], 12)
        number += 1
