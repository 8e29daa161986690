"""Figures on pages that a benchmark measured: ``python -m tests.figures --write`` copies them from files of runs.

A block ``<!-- figures: NAME -->`` of a page ends with ``<!-- end of figures -->``; `MAKERS` has what stands between.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/performance.md", "planner/README.md")
BLOCK = re.compile(r"(?<=<!-- figures: )(\w+)( -->\n).*?(?=\n<!-- end of figures -->)", re.DOTALL)
WIDTHS = {"tiny": "tiny (width 8)", "small": "small (width 64)"}
STEPS = "CPU time of a step"
PEERS = "multimesh/benchmarks/runs/peers.json"
RATIOS = "CPU time of a step, x one SPMD program (median, least)"


def load(name: str) -> dict[str, Any]:
    """Return a run that a benchmark wrote."""
    return dict(json.loads((ROOT / name).read_text(encoding="utf-8")))


def step_run() -> dict[str, Any]:
    """Return the newest run of ``multimesh/benchmarks/step.py --json``."""
    return load("multimesh/benchmarks/runs/step.json")


def peer_ratios() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each run of ``multimesh/benchmarks/peers.py --json``, by its version of JAX."""
    runs = load(PEERS)["runs"]
    return {run["jax"]: run["tables"][RATIOS] for run in runs}


def held_out(table: str) -> list[dict[str, Any]]:
    """Return a table of ``planner/benchmarks/held_out.py --write``."""
    return list(load("planner/benchmarks/runs/held_out.json")["tables"][table])


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""
    names = list(head)
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (names, *rows)]
    lines.insert(1, "|---" * len(names) + "|")
    return "\n".join(lines)


def ratio(rows: list[dict[str, Any]], stages: int, column: str) -> str:
    """Return the median of a contender for the small model with 1F1B."""
    (row,) = (row for row in rows if (row["d"], row["pp"], row["schedule"]) == (64, stages, "1f1b"))
    return f"{row[column]:.2f}"


def summary() -> Iterator[str]:
    """Yield the figures of README: a step beside one program, peers, and forecasts of sources left out of the fit."""
    run, ratios, dates = step_run(), peer_ratios(), {row["jax"]: row["date"] for row in load(PEERS)["runs"]}
    name = f"MultiMesh, jax {run['jax']}, {run['date']}"
    rows = [(name, *(ratio(run["tables"][STEPS], stages, "ratio") for stages in (2, 4)))]
    for library, jax in (("MultiMesh", "0.10.2"), ("SpectraX 0.1.4", "0.10.2"), ("JaxPP 0.9.2", "0.9.2")):
        figures = (ratio(ratios[jax], stages, library.split()[0]) for stages in (2, 4))
        rows.append((f"{library}, jax {jax}, {dates[jax]}", *figures))
    yield table(("CPU time of a step, x one SPMD program", "2 stages", "4 stages"), rows)
    yield ""
    names = {"nvidia, dense": "NVIDIA's software", "pytorch, dense": "PyTorch", "maxtext, dense": "MaxText"}
    rows = [
        (f"{names[row['runs']]}, dense models", row["number"], f"{row['median %']:g} %", f"{row['p90 %']:g} %")
        for row in held_out("By class")
        if row["runs"] in names
    ]
    yield table(("forecast of a step, source left out of the fit", "runs", "median error", "nine in ten within"), rows)


def steps() -> Iterator[str]:
    """Yield the table of a step beside one SPMD program, on the JAX of the locks."""
    run = step_run()
    yield f"jax {run['jax']}, {run['date']}, {run['cores']} cores:"
    yield ""
    rows = []
    for row in run["tables"][STEPS]:
        step = f"{row['MultiMesh ms']:.0f} ({row['SPMD ms']:.0f})"
        rows.append((WIDTHS[row["size"]], row["pp"], row["schedule"], step, f"{row['ratio']:.2f}"))
    yield table(("size", "stages", "schedule", "step, ms (SPMD)", "x SPMD"), rows)


def peers() -> Iterator[str]:
    """Yield the same of each peer on the newest JAX that it runs on, and of MultiMesh beside it."""
    columns = (("MultiMesh", "0.9.2"), ("JaxPP", "0.9.2"), ("MultiMesh", "0.10.2"), ("SpectraX", "0.10.2"))
    ratios = peer_ratios()
    rows = []
    for number, row in enumerate(ratios["0.10.2"]):
        figures = (f"{ratios[jax][number][library]:.2f}" for library, jax in columns)
        rows.append((row["d"], row["pp"], row["schedule"], *figures))
    yield table(("width", "stages", "schedule", *(f"{library}, jax {jax}" for library, jax in columns)), rows)


def forecasts() -> Iterator[str]:
    """Yield the errors of forecasts of sources that the fit has not seen, by class of software and kind of model."""
    head = ("software and kind of model", "runs", "median error", "nine in ten within", "usual band", "inside")
    rows = [
        (row["runs"], row["number"], *(f"{row[key]:g} %" for key in ("median %", "p90 %", "band %", "inside %")))
        for row in held_out("By class")
    ]
    yield table(head, rows)


def compare_best() -> Iterator[str]:
    """Yield suggestions beside the fastest published runs, by ``planner/benchmarks/beside.py --json``."""
    head = ("model, devices", "published: s (forecast)", "suggested: s", "because")
    rows = []
    for row in load("planner/benchmarks/runs/beside.json")["tables"]["Beside the best published"]:
        published = f"{row['published']}: {row['published s']:.4g} ({row['its forecast s']:.4g})"
        text = f"{row['suggested']}: {row['suggested s']:.4g} ± {row['band %']:.0f} %"
        rows.append((f"{row['model']}, {row['on']}", published, text, row["because"]))
    yield table(head, rows)


MAKERS = {"summary": summary, "steps": steps, "peers": peers, "forecasts": forecasts, "beside": compare_best}


def renew(page: str) -> str:
    """Return the text of a page with the figures of the runs on file."""
    return BLOCK.sub(lambda match: f"{match[1]}{match[2]}" + "\n".join(MAKERS[match[1]]()), page)


def main() -> None:
    """Renew the pages."""
    for name in PAGES:
        path = ROOT / name
        path.write_text(renew(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        main()
    else:
        sys.exit(__doc__)
