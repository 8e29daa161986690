"""What the tests of a run stood on: a table from pytest's own reports (``--junitxml``), for the log and as an artifact.

A test that exercises a stand-in says so with ``@pytest.mark.stand_in("a registry on this machine")``, and
``tests/conftest.py`` writes that into the report. All other tests exercise the real thing.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from workflows import errors

STAND_IN = "stand_in"
_OUTCOMES = ("failure", "error", "skipped")  # elements of a report; a test case without one passed


@dataclass(frozen=True)
class Outcome:
    """One test of a report: ``passed``, ``skipped``, ``failure`` or ``error``, and what stood in for the real thing."""

    test: str
    outcome: str
    seconds: float
    stand_in: str | None


def read(path: Path) -> tuple[Outcome, ...]:
    """Return the tests of one report.

    Raises
    ------
    ReportError
        There is no such file, or it is not a report.
    """
    try:
        root = ElementTree.parse(path).getroot()  # noqa: S314 - our own pytest wrote it
        return tuple(_outcome(case) for case in root.iter("testcase"))
    except (OSError, ElementTree.ParseError, KeyError, ValueError) as error:
        raise errors.ReportError(f"{path}: is no report of pytest ({error}); make one with --junitxml") from None


def _outcome(case: ElementTree.Element) -> Outcome:
    found = [name for name in _OUTCOMES if case.find(name) is not None]
    properties = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
    test = f"{case.attrib['classname']}::{case.attrib['name']}"
    return Outcome(test, found[0] if found else "passed", float(case.attrib["time"]), properties.get(STAND_IN))


def render(outcomes: Iterable[Outcome]) -> str:
    """Return Markdown: how many tests had which outcome, those that did not pass, and those that used a stand-in."""
    listed = tuple(outcomes)
    counts = collections.Counter(each.outcome for each in listed)
    total = ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) or "no tests"
    parts = [f"# What ran\n\n{total}; {sum(each.seconds for each in listed):.0f} s of test time\n"]
    parts += _table("Did not pass", ("test", "outcome"), [(o.test, o.outcome) for o in listed if o.outcome != "passed"])
    used = [(o.stand_in, o.test, o.outcome) for o in listed if o.stand_in is not None]
    parts += _table("Ran on a stand-in", ("stand-in", "test", "outcome"), sorted(used))
    return "\n".join(parts)


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    cells = [head, tuple("---" for _ in head), *(tuple(cell.replace("|", r"\|") for cell in row) for row in rows)]
    return [f"## {title} ({len(rows)})\n", *(f"| {' | '.join(row)} |" for row in cells), ""]
