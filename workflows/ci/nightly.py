"""Runs our tests against the heads of jax and MaxText and against releases of jax; one issue names the failures."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workflows import errors, files, proc
from workflows.ci import moved
from workflows.ci.moved import Moved
from workflows.sources import git, manifest
from workflows.sources.workspace import Workspace

LABEL = "nightly"
# The tested heads and releases, as an issue names them. The releases are parts of `.ci/run`, which bring no lock.
HEADS = {"jax": "the head of jax", "maxtext": "the head of maxtext"}
RELEASES = {"middle-jax": "jax 0.11.2 on Python 3.12", "newest-jax": "the newest jax of the package index"}
NAMES = HEADS | RELEASES
_TAIL = 60  # lines of output in a report


@dataclass(frozen=True)
class Outcome:
    """The result of our tests against one head (by its commit) or release (by its version), and moved parts of JAX."""

    component: str
    commit: str
    passed: bool
    seconds: float
    command: str
    said: str
    moved: tuple[Moved, ...] = ()


def run(here: Workspace, name: str, mirror: str | None) -> Outcome:
    """Test against one of ``NAMES``; a ``NetworkError`` says nothing about it."""
    if name in RELEASES:
        return _tested(here, name, "", [[".ci/run", name]])
    url = manifest.load(here.manifest)[name].address(mirror)
    commit = git.ask(url, "HEAD", label=name).get("HEAD")
    if commit is None:
        raise errors.MissingCommitError(f"{name}: {url} has no default branch")
    steps = _maxtext(url, commit) if name == "maxtext" else _jax(here.root / ".venv-nightly", url, commit)
    return _tested(here, name, commit, steps)


def _tested(here: Workspace, name: str, commit: str, steps: Sequence[Sequence[str]]) -> Outcome:
    """Run the steps up to the first that fails."""
    env = os.environ | {"PYTHONPATH": str(here.root / "multimesh/src")}
    started = time.monotonic()
    for argv in steps:
        done = proc.run(argv, cwd=here.root, check=False, env=env)
        if done.returncode:
            break
    said = done.text + "\n" + done.stderr.decode("utf-8", "replace")
    tail = "\n".join(said.strip().splitlines()[-_TAIL:])
    release = re.search(r"^jax (\S+) on Python ", said, re.MULTILINE)
    took = round(time.monotonic() - started, 1)
    tested = release[1] if release else commit
    return Outcome(name, tested, not done.returncode, took, proc.quoted(argv), tail, tuple(moved.read(said)))


def _maxtext(url: str, commit: str) -> list[list[str]]:
    """Put the head, with our patches, in MaxText's place; train on it and run the launcher's tests."""
    return [
        ["./bootstrap.sh", "--group", "run", "--group", "dev", "--override", f"maxtext={url}@{commit}"],
        ["maxtext/validate-cpu.sh"],
        [".venv/bin/pytest", "-q", "maxtext/tests"],
    ]


def _jax(folder: Path, url: str, commit: str) -> list[list[str]]:
    """Install the head, with the newest jaxlib, into an environment of its own; run the library's tests there."""
    python = str(folder / "bin" / "python")
    return [
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [python, "-m", "pip", "install", "--quiet", "--pre", "jaxlib", f"jax @ git+{url}@{commit}"],
        [python, "-m", "pip", "install", "--quiet", "optax", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist"],
        [python, "-m", "pytest", "-q", "--tb=short", "multimesh/tests", "-m", "not full and not flax"],
    ]


def save(path: Path, outcome: Outcome) -> None:
    """Write an outcome for the reporting job."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, asdict(outcome))


def load(paths: Sequence[Path]) -> list[Outcome]:
    """Read the outcomes of all; one that is missing is an error, for it would look like success."""
    try:
        outcomes = [_outcome(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(paths)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise errors.UsageError(f"an outcome cannot be read: {error}; run `ci nightly` again") from error
    if missing := NAMES.keys() - {each.component for each in outcomes}:
        raise errors.UsageError(f"there is no outcome of {', '.join(sorted(missing))}; run `ci nightly` again")
    return outcomes


def _outcome(raw: dict[str, Any]) -> Outcome:
    return Outcome(**raw | {"moved": tuple(Moved(**each) for each in raw["moved"])})


def issue(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Return title and text of the issue about the failures: first the API that moved."""
    failed = [each for each in outcomes if not each.passed]
    title = f"Nightly: {' and '.join(NAMES[each.component] for each in failed)} breaks our tests"
    text = "| tested | commit or version | outcome | time |\n|---|---|---|---|\n"
    for each in outcomes:
        outcome = "passed" if each.passed else "failed"
        text += f"| {NAMES[each.component]} | {each.commit} | {outcome} | {each.seconds:.0f} s |\n"
    for each in failed:
        said = each.said.replace("```", "'''")
        text += f"\n### {NAMES[each.component]}\n\n"
        if each.moved:
            rows = "\n".join(one.line for one in each.moved)
            text += f"What of JAX moved, and how many errors say so:\n\n| times | error |\n|---|---|\n{rows}\n\n"
        text += f"`{each.command}` ended with\n\n```text\n{said}\n```\n"
    return title, text
