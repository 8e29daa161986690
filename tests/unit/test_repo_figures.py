"""Figures of README and of docs/performance.md are those of the newest run on file, on the JAX that the locks bring."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tooling.environment import find_python

Row = dict[str, Any]


@pytest.fixture
def run(root: Path) -> dict[str, Any]:
    """The newest run of ``multimesh/benchmarks/step.py --json``."""
    return dict(json.loads((root / "multimesh" / "benchmarks" / "runs" / "step.json").read_text(encoding="utf-8")))


@pytest.fixture
def steps(run: dict[str, Any]) -> list[Row]:
    """Its rows: a size, a number of stages and a schedule each, with the CPU time relative to one SPMD program."""
    return list(run["tables"]["CPU time of a step"])


def test_the_run_is_of_the_jax_that_the_locks_bring(run: dict[str, Any], root: Path) -> None:
    locked = find_python.jax_for(str(root / "requirements" / "run.txt"), find_python.NEWEST)
    assert run["jax"] == locked, "run multimesh/benchmarks/step.py --json into runs/step.json, and change the pages"
    assert datetime.date.fromisoformat(run["date"]) >= datetime.date(2026, 11, 26)


def test_readme_says_what_the_run_gave(run: dict[str, Any], steps: list[Row], root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    minor = ".".join(run["jax"].split(".")[:2])
    four = {row["schedule"]: row["ratio"] for row in steps if (row["size"], row["pp"]) == ("small", 4)}
    (said,) = re.findall(rf"On jax {re.escape(minor)}, .* it took ([\d.]+): `python multimesh/benchmarks/step", text)
    assert float(said) == pytest.approx(four["1f1b"], abs=0.005)
    ((least, most),) = re.findall(rf"([\d.]+) to ([\d.]+) \({re.escape(minor)}\)", text)
    assert (float(least), float(most)) == pytest.approx((min(four.values()), max(four.values())), abs=0.05)


def test_the_table_of_steps_is_that_of_the_run(run: dict[str, Any], steps: list[Row], root: Path) -> None:
    page = (root / "docs" / "performance.md").read_text(encoding="utf-8")
    section = page.partition("## One step against one SPMD program\n")[2].partition("\n#")[0]
    assert f"jax {run['jax']}, {run['date']}" in section
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    told = [[re.sub(r" \(d .*", "", size), pp, schedule, ratio] for size, pp, schedule, _, ratio, *_ in cells[2:]]
    assert told == [[row["size"], str(row["pp"]), row["schedule"], f"{row['ratio']:.2f}"] for row in steps]


def test_the_tables_of_peers_are_those_of_the_runs(root: Path) -> None:
    """Of each peer on the newest JAX that it runs on, and of MultiMesh beside it and on today's."""
    runs = json.loads((root / "multimesh/benchmarks/runs/peers.json").read_text(encoding="utf-8"))["runs"]
    found = {run["jax"]: run["tables"]["CPU time of a step, x one SPMD program (median, least)"] for run in runs}
    assert find_python.jax_for(str(root / "requirements" / "run.txt"), find_python.NEWEST) in found
    page = (root / "docs" / "performance.md").read_text(encoding="utf-8")
    lines = page.partition("## Beside JaxPP and SpectraX\n")[2].partition("\n#")[0].splitlines()
    head, _, *cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    columns = [name.split(", jax ") for name in head[3:]]
    told = [[f"{row[who]:.2f}, {row[who + ' min']:.2f}" for row in found[version]] for who, version in columns]
    assert [row[3:] for row in cells] == [list(row) for row in zip(*told, strict=True)]

    small = next(
        n for n, row in enumerate(found["0.10.2"]) if (row["d"], row["pp"], row["schedule"]) == (64, 4, "1f1b")
    )
    ours, spectrax, before, jaxpp = (
        f"{found[version][small][who]:.2f}"
        for version, who in (
            ("0.10.2", "MultiMesh"),
            ("0.10.2", "SpectraX"),
            ("0.9.2", "MultiMesh"),
            ("0.9.2", "JaxPP"),
        )
    )
    readme = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    assert f"took {ours} of its CPU time where SpectraX took {spectrax} (jax 0.10)" in readme
    assert f"and {before} where JaxPP took {jaxpp} (jax 0.9)" in readme
    peers = (root / "docs" / "peers.md").read_text(encoding="utf-8")
    assert f"| {before} (jax 0.9), {ours} (0.10), " in peers
    assert f"| 1 | {jaxpp} (jax 0.9) | {spectrax} (0.10) |" in peers


def test_the_tables_of_compiled_jobs_are_those_of_the_file(root: Path) -> None:
    """Each line that ``maxtext/benchmarks/compiled.py --page`` prints stands on the page."""
    done = subprocess.run(
        [sys.executable, root / "maxtext/benchmarks/compiled.py", "--page"], capture_output=True, text=True, check=True
    )
    page = (root / "docs" / "forecasts.md").read_text(encoding="utf-8")
    told = [line for line in done.stdout.splitlines() if line]
    assert len(told) > 10
    assert [line for line in told if line not in page] == []
