"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def amount(value: float, unit: str) -> str:
    """Return a time or size with three significant digits and a unit: ``1.23 ms``, ``4.1 kB``, ``7``."""
    scales = {
        "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
        "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")),
    }.get(unit)
    if scales is None:
        return f"{value:.4g}"
    scale, name = next(((s, n) for s, n in scales if abs(value) >= s), scales[-1])
    return f"{value / scale:.3g} {name}"


def columns(parts: Sequence[tuple[str, Sequence[str]]], texts: Collection[int] = (), gap: str = "  ") -> list[str]:
    """Return the lines of a text table. A part is a head and its cells. Columns in ``texts`` are left-aligned."""
    widths = [max(map(len, (head, *cells))) for head, cells in parts]
    heads, rows = [head for head, _ in parts], zip(*(cells for _, cells in parts), strict=True)
    signs = ["<" if number in texts else ">" for number in range(len(parts))]
    return [gap.join(f"{c:{s}{w}}" for c, s, w in zip(row, signs, widths, strict=True)) for row in (heads, *rows)]
