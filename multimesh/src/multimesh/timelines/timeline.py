"""Kernels of a plan in time. Forecasts and measured runs share this form, and pictures show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from multimesh.core import checks
from multimesh.core.text import amount, columns
from multimesh.timelines.excerpt import MOST
from multimesh.timelines.perfetto import trace
from multimesh.timelines.spans import Spans
from multimesh.timelines.svg import draw


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

    def _repr_svg_(self) -> str:
        """Return the picture for a notebook."""
        return draw(self, MOST)

    def to_svg(self, path: str | Path) -> None:
        """Write a picture; of a long timeline its beginning, a middle and its end, with a note that says so."""
        Path(checks.path("to_svg: path", path)).write_text(self._repr_svg_(), encoding="utf-8")

    def to_html(self, path: str | Path) -> None:
        """Write the picture as a page that explains each box. It is one file, and needs no network."""
        page = (resources.files("multimesh.timelines") / "page.html").read_text(encoding="utf-8")
        text = page.replace("TITLE", escape(self.title), 1).replace("<!-- PICTURE -->", draw(self), 1)
        Path(checks.path("to_html: path", path)).write_text(text, encoding="utf-8")

    def to_perfetto(self, path: str | Path) -> None:
        """Write it as Chrome-trace JSON, which ``ui.perfetto.dev`` and ``chrome://tracing`` open."""
        Path(checks.path("to_perfetto: path", path)).write_text(trace(self), encoding="utf-8")
