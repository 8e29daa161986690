"""The truth ledger: which promises of this repository were run, where, and which never were.

A test keeps a promise by carrying ``@pytest.mark.promise("Sentence.")``. The recorder in ``conftest.py`` writes
what happened to such tests into a results file (``pytest --ledger FILE``; several runs add up), and
``python -m workflows ledger`` renders ``docs/validation.md`` from the results, from the promises that the test
sources declare and from ``docs/promises.yaml``, which lists the promises that no test here can keep.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from workflows.errors import LedgerError

ROOT = Path(__file__).resolve().parent.parent
TEST_ROOTS = ("tests", "multimesh/tests")
VALIDATION = Path("docs/validation.md")
UNTESTED = Path("docs/promises.yaml")
RESULTS = Path("build/ledger.json")
RESULTS_FORMAT = 1

RUN, STAND_IN, FAILED, NEVER = "Run", "Run on a stand-in", "Failed", "Never run here"


@dataclasses.dataclass(frozen=True)
class Promise:
    """A sentence that the repository claims, and what stands in for the real thing when its test runs here."""

    text: str
    stand_in: str | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """What happened to one test that keeps one promise; ``jax`` is the version that the run had, if any."""

    promise: Promise
    test: str
    outcome: str
    seconds: float
    commit: str
    date: str
    jax: str | None

    @property
    def key(self) -> tuple[str, str, str | None]:
        """What a later run of the same test replaces."""
        return (self.promise.text, self.test, self.jax)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One promise as ``docs/validation.md`` shows it: its state, and the evidence or the reason for none."""

    promise: Promise
    state: str
    records: tuple[Record, ...] = ()
    why: str = ""


# Results files -------------------------------------------------------------------------------------------------------


def read_results(path: Path) -> tuple[Record, ...]:
    """Return the records of a results file; raise ``LedgerError`` where there is none or it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != RESULTS_FORMAT:
            raise LedgerError(f"{path}: format {data['format']}, this version reads {RESULTS_FORMAT}; record it again")
        return tuple(Record(**{**item, "promise": Promise(**item["promise"])}) for item in data["records"])
    except FileNotFoundError:
        raise LedgerError(f"{path}: no results; record some with `.venv/bin/pytest --ledger {path}`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path}: not a results file ({error}); delete it and record it again") from None


def merge_results(path: Path, new: Iterable[Record]) -> None:
    """Add records to a results file, replacing those of the same promise, test and JAX version; atomic."""
    old = read_results(path) if path.exists() else ()
    merged = {record.key: record for record in (*old, *new)}
    records = [dataclasses.asdict(merged[key]) for key in sorted(merged, key=str)]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"format": RESULTS_FORMAT, "records": records}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def current_commit(root: Path) -> str:
    """Return the short id of HEAD, with ``+changes`` when tracked files differ from it; ``unknown`` outside git."""

    def git(*args: str) -> str:
        argv = ["git", "-C", str(root), *args]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# Declared promises ---------------------------------------------------------------------------------------------------


def _marks(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="mark"), attr="promise")):
                yield node


def declared_promises(root: Path) -> tuple[Promise, ...]:
    """Return the promises that test sources declare, read from their syntax so that nothing is imported."""
    found: dict[str, Promise] = {}
    for folder in TEST_ROOTS:
        for path in sorted((root / folder).rglob("test_*.py")):
            for call in _marks(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
                stand_in = next((k.value for k in call.keywords if k.arg == "stand_in"), ast.Constant(None))
                match (call.args, stand_in):
                    case [[ast.Constant(value=str(text))], ast.Constant(value=(str() | None) as name)]:
                        found.setdefault(text, Promise(text, name))
                    case _:
                        where = f"{path.relative_to(root)}:{call.lineno}"
                        raise LedgerError(f"{where}: promise takes one literal sentence and a literal stand_in")
    return tuple(found[text] for text in sorted(found))


def untested_promises(root: Path) -> Mapping[str, str]:
    """Return the promises of ``docs/promises.yaml``: sentence to the reason why it was never run here."""
    import yaml  # here, because the recorder must also load in environments that only run the library's tests

    path = root / UNTESTED
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or not all(isinstance(v, str) and v for v in data.values()):
        raise LedgerError(f"{path}: must map each sentence to the reason why it was never run here")
    return data


def living(records: Iterable[Record], root: Path) -> tuple[Record, ...]:
    """Return the records whose test is still there: a result outlives neither its file nor its function."""
    sources: dict[str, str] = {}

    def is_there(test: str) -> bool:
        file, _, name = test.partition("[")[0].partition("::")
        if file not in sources:
            path = root / file
            sources[file] = path.read_text(encoding="utf-8") if path.is_file() else ""
        return f"def {name.rpartition('::')[2]}(" in sources[file]

    return tuple(record for record in records if is_there(record.test))


# The ledger ----------------------------------------------------------------------------------------------------------


def _entry(promise: Promise, records: tuple[Record, ...]) -> Entry:
    failed = tuple(r for r in records if r.outcome == "failed")
    passed = tuple(r for r in records if r.outcome == "passed")
    real = tuple(r for r in passed if r.promise.stand_in is None)
    if failed:
        return Entry(promise, FAILED, failed)
    if real:
        return Entry(promise, RUN, real)
    if passed:
        return Entry(passed[0].promise, STAND_IN, passed)
    return Entry(promise, NEVER, why="its test was skipped" if records else "its test has no recorded result")


def entries(declared: Iterable[Promise], untested: Mapping[str, str], records: Iterable[Record]) -> tuple[Entry, ...]:
    """Join promises with their evidence. A failed or missing test never counts as run."""
    by_text: dict[str, list[Record]] = {}
    for record in records:
        by_text.setdefault(record.promise.text, []).append(record)
    tested = [_entry(promise, tuple(by_text.get(promise.text, ()))) for promise in declared]
    both = [e.promise.text for e in tested if e.promise.text in untested]
    if both:
        raise LedgerError(f"{UNTESTED}: {both[0]!r} has a test now; remove it from this file")
    return (*tested, *(Entry(Promise(text), NEVER, why=why) for text, why in sorted(untested.items())))


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _tests(records: tuple[Record, ...]) -> str:
    """Name the tests without their parameters, and how many cases ran."""
    cases: dict[str, set[str]] = {}
    for record in records:
        cases.setdefault(record.test.partition("[")[0], set()).add(record.test)
    return ", ".join(f"`{name}`" + (f" ({len(ids)} cases)" if len(ids) > 1 else "") for name, ids in cases.items())


def _evidence(entry: Entry) -> tuple[str, ...]:
    jaxes = sorted({record.jax for record in entry.records if record.jax})
    newest = max(entry.records, key=lambda record: record.date)
    commits = sorted({record.commit for record in entry.records if record.date == newest.date})
    return _tests(entry.records), ", ".join(jaxes), ", ".join(commits), newest.date


_HEADINGS: Mapping[str, tuple[str, ...]] = {
    RUN: ("promise", "test", "jax", "commit", "date"),
    STAND_IN: ("promise", "stand-in", "test", "jax", "commit", "date"),
    FAILED: ("promise", "test", "jax", "commit", "date"),
    NEVER: ("promise", "why"),
}
_INTRO = """\
# Validation

What this repository promises, and what was really run. Generated by `python -m workflows ledger` from test results;
do not edit. `CONTRIBUTING.md` says how a promise gets here.
"""


def render(all_entries: Iterable[Entry]) -> str:
    """Return ``docs/validation.md`` as text: one table a state, empty states left out."""
    listed = tuple(all_entries)
    parts = [_INTRO]
    for state, heading in _HEADINGS.items():
        rows = []
        for entry in sorted((e for e in listed if e.state == state), key=lambda e: e.promise.text):
            text, stand_in = entry.promise.text, entry.promise.stand_in or ""
            match state:
                case "Never run here":
                    rows.append(_cells(text, entry.why))
                case "Run on a stand-in":
                    rows.append(_cells(text, stand_in, *_evidence(entry)))
                case _:
                    rows.append(_cells(text, *_evidence(entry)))
        if rows:
            head = [f"\n## {state} ({len(rows)})\n", _cells(*heading), _cells(*("---" for _ in heading))]
            parts.append("\n".join([*head, *rows]) + "\n")
    return "".join(parts)


def parse(markdown: str) -> dict[str, str]:
    """Return promise to state, read back from a rendered ``docs/validation.md``."""
    states: dict[str, str] = {}
    state = ""
    for line in markdown.splitlines():
        if line.startswith("## "):
            state = line[3:].rpartition(" (")[0]
        elif line.startswith("| ") and not line.startswith(("| promise |", "| --- |")):
            text = line[2:].replace(r"\|", "\0").partition(" | ")[0].replace("\0", "|")
            states[text] = state
    return states


# Command -------------------------------------------------------------------------------------------------------------


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``ledger`` to the command line."""
    parser = subparsers.add_parser(
        "ledger",
        help="render docs/validation.md from test results",
        description="Render docs/validation.md: which promises were run, run on a stand-in, or never run here.",
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / RESULTS, metavar="FILE", help=f"what pytest --ledger wrote ({RESULTS})"
    )
    parser.add_argument(
        "--check", action="store_true", help="only check that docs/validation.md lists exactly today's promises"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Render the ledger, or check the committed one against the promises that exist now."""
    declared, untested = declared_promises(ROOT), untested_promises(ROOT)
    target = ROOT / VALIDATION
    if args.check:
        wanted = {promise.text for promise in declared} | set(untested)
        listed = set(parse(target.read_text(encoding="utf-8"))) if target.exists() else set()
        for text in sorted(wanted ^ listed):
            print(f"{'missing' if text in wanted else 'gone'}: {text}")
        if wanted != listed:
            raise LedgerError(
                f"{VALIDATION} does not list today's promises; run the tests and `python -m workflows ledger`"
            )
        print(f"{VALIDATION} lists all {len(wanted)} promises")
        return 0
    listed_entries = entries(declared, untested, living(read_results(args.results), ROOT))
    target.write_text(render(listed_entries), encoding="utf-8")
    counts = {state: sum(e.state == state for e in listed_entries) for state in _HEADINGS}
    print(f"{VALIDATION}: " + ", ".join(f"{n} {state.lower()}" for state, n in counts.items() if n))
    for entry in listed_entries:
        if entry.state == FAILED:
            print(f"failed: {entry.promise.text}", file=sys.stderr)
    return 0
