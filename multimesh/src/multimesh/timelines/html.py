"""A timeline as one HTML file: the SVG picture, which explains what one points at, and can be enlarged."""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from multimesh.timelines.svg import draw

if TYPE_CHECKING:
    from multimesh.timelines.timeline import Timeline


def page(timeline: Timeline) -> str:
    """HTML of a timeline; see `multimesh.Plan.to_html`."""
    frame = (resources.files("multimesh.timelines") / "page.html").read_text(encoding="utf-8")
    return frame.replace("TITLE", escape(timeline.title), 1).replace("<!-- PICTURE -->", draw(timeline), 1)
