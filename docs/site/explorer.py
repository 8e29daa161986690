"""The timeline on the front page, of which a reader chooses the schedule: its tables, and its place in the page.

The tables are those from which plans are made, simulated with a forward that takes 1, a backward 2 and weights 1 of it.
A script draws them (static/explorer.js) and asks no server.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

SUBMESHES, MICROBATCHES = (2, 4, 8), (4, 8, 16)
FIRST = ("1f1b", 4, 8)
LABELS = {"schedule": "schedule", "submeshes": "submeshes (pp)", "microbatches": "microbatches"}


def collect() -> dict[str, Any]:
    """Return the timeline of each schedule by ``schedule,submeshes,microbatches``.

    A span is phase, microbatch, start and duration, the times in hundredths of a submesh's forward of a microbatch.
    """
    forecast = importlib.import_module("multimesh.commands.forecast")
    runs: dict[str, Any] = {}
    for submeshes in SUBMESHES:
        for microbatches in MICROBATCHES:
            for name, shape in forecast.choose_schedules(None, submeshes, None, microbatches):
                result = forecast.simulate_schedule(name, shape)
                rows: list[list[list[Any]]] = [[] for _ in range(submeshes)]
                for span in result.timeline.spans:
                    times = round(100 * span.start), round(100 * span.duration)
                    rows[span.row].append([span.phases[:1], span.microbatch, *times])
                runs[f"{name},{submeshes},{microbatches}"] = {
                    "time": round(100 * result.timeline.makespan),
                    "bubble": round(100 * result.timeline.bubble, 1),
                    "peaks": [round(peak, 2) for peak in result.peaks],
                    "stages": shape.chunks,
                    "rows": rows,
                }
    return runs


def write_tables(app: Sphinx, error: Exception | None) -> None:
    """Write the tables as a script beside the pages, which a browser loads from a file, too."""
    folder = Path(app.outdir) / "timelines"
    folder.mkdir(exist_ok=True)
    text = json.dumps(collect(), separators=(",", ":"))
    (folder / "tables.js").write_text(f"window.multimeshTimelines={text};\n", encoding="utf-8")


def explorer(_: str) -> Iterator[str]:
    """Yield the place of the timeline: three choices, and an empty figure that the script fills."""
    schedules = importlib.import_module("multimesh.schedules")
    names = [name for name in schedules.names() if schedules.get(name).name == name]
    choices = {"schedule": names, "submeshes": SUBMESHES, "microbatches": MICROBATCHES}
    yield '<form class="explorer" id="explorer" hidden onsubmit="return false">'
    for (field, options), first in zip(choices.items(), FIRST, strict=True):
        yield f'<label>{LABELS[field]} <select name="{field}">'
        yield "".join(f"<option{' selected' * (option == first)}>{option}</option>" for option in options)
        yield "</select></label>"
    yield '<figure><svg role="img" aria-labelledby="explorer-said"></svg>'
    yield '<figcaption id="explorer-said" aria-live="polite"></figcaption></figure></form>'
    yield '<script defer src="../timelines/tables.js"></script><script defer src="../_static/explorer.js"></script>'
