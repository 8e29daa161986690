"""A timeline as one HTML file: the SVG picture, with explanations and zoom."""

from __future__ import annotations

from html import escape
from importlib import resources

from multimesh.timelines.spans import Spans
from multimesh.timelines.svg import draw


def page(timeline: Spans) -> str:
    """HTML of a timeline; see `multimesh.Plan.to_html`."""
    frame = (resources.files("multimesh.timelines") / "page.html").read_text(encoding="utf-8")
    return frame.replace("TITLE", escape(timeline.title), 1).replace("<!-- PICTURE -->", draw(timeline), 1)
