"""Kernels of a plan in time. Forecasts and measured runs share this form, and pictures show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from multimesh.core import checks
from multimesh.core.text import amount, columns
from multimesh.observe.timelines.perfetto import trace
from multimesh.observe.timelines.spans import Spans
from multimesh.observe.timelines.svg import draw


@dataclass(frozen=True)
class Timeline(Spans):
    """Kernels and transfers of one call, by submesh and time.

    Attributes
    ----------
    title
        Schedule and sizes.
    note
        Where the times are from, for the caption of a picture.
    unit
        ``s`` for seconds, or empty for the unit of the given costs.
    rows
        A name for each submesh.
    spans, transfers
        In the order in which they were dispatched.
    live
        For each submesh pairs (time, amount alive from then on), in order.
    live_unit
        ``bytes``, or ``activations`` (of one stage and microbatch).
    """

    def __str__(self) -> str:
        parts: list[tuple[str, Sequence[str]]] = [
            ("submesh", [str(row) for row in range(len(self.rows))]),
            ("busy", [amount(time, self.unit) for time in self.busy]),
            ("idle", [amount(time, self.unit) for time in self.idle]),
            ("bubble", [f"{100 * share:.1f} %" for share in self.bubbles]),
        ]
        if self.live:
            unit = self.live_unit if self.live_unit == "bytes" else ""
            parts.append((f"peak {self.live_unit}", [amount(peak, unit) for peak in self.peaks]))
        return "\n".join([self.title, self.note, "", *columns(parts), "", self.total])

    __repr__ = __str__  # what a console shows: the table, not each span

    def _repr_svg_(self) -> str:
        """Return the picture for a notebook."""
        return draw(self)

    def to_svg(self, path: str | Path) -> None:
        """Write a picture. A viewer shows the name and times of the box or line that one points at."""
        Path(checks.path("to_svg: path", path)).write_text(draw(self), encoding="utf-8")

    def to_html(self, path: str | Path) -> None:
        """Write the picture of `to_svg` as a page. It is one file, and needs no network."""
        head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(self.title)}</title>\n'
        Path(checks.path("to_html: path", path)).write_text(head + draw(self), encoding="utf-8")

    def to_perfetto(self, path: str | Path) -> None:
        """Write it as Chrome-trace JSON, which ``ui.perfetto.dev`` and ``chrome://tracing`` open."""
        Path(checks.path("to_perfetto: path", path)).write_text(trace(self), encoding="utf-8")
