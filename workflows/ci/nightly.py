"""Runs our tests against the heads of jax and MaxText, and keeps one issue about what breaks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from workflows import errors, files, proc
from workflows.sources import git, manifest
from workflows.sources.workspace import Workspace

LABEL, HEADS = "nightly", ("jax", "maxtext")
_TAIL = 60  # lines of output in a report


@dataclass(frozen=True)
class Outcome:
    """How our tests fared against one head."""

    component: str
    commit: str
    passed: bool
    seconds: float
    command: str
    said: str


def run(here: Workspace, name: str, mirror: str | None) -> Outcome:
    """Test against the head of a component; a ``NetworkError`` says nothing about it."""
    url = manifest.load(here.manifest)[name].address(mirror)
    commit = git.ask(url, "HEAD", label=name).get("HEAD")
    if commit is None:
        raise errors.MissingCommitError(f"{name}: {url} has no default branch")
    env = os.environ | {"PYTHONPATH": str(here.root / "multimesh/src")}
    steps = _maxtext(url, commit) if name == "maxtext" else _jax(here.root / ".venv-nightly", url, commit)
    started = time.monotonic()
    for argv in steps:
        done = proc.run(argv, cwd=here.root, check=False, env=env)
        if done.returncode:
            break
    said = done.text + "\n" + done.stderr.decode("utf-8", "replace")
    tail = "\n".join(said.strip().splitlines()[-_TAIL:])
    return Outcome(name, commit, not done.returncode, round(time.monotonic() - started, 1), proc.quoted(argv), tail)


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
        [python, "-m", "pip", "install", "--quiet", "optax", "hypothesis", "pytest", "pytest-timeout"],
        [python, "-m", "pytest", "-q", "multimesh/tests", "-m", "not full and not flax"],
    ]


def save(path: Path, outcome: Outcome) -> None:
    """Write an outcome for the reporting job."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, asdict(outcome))


def load(paths: Sequence[Path]) -> list[Outcome]:
    """Read the outcomes of both heads; one that is missing is an error, for it would look like success."""
    try:
        outcomes = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(paths)]
    except (OSError, ValueError, TypeError) as error:
        raise errors.UsageError(f"an outcome cannot be read: {error}; run `ci nightly` again") from error
    if missing := set(HEADS) - {each.component for each in outcomes}:
        raise errors.UsageError(f"there is no outcome of {', '.join(sorted(missing))}; run `ci nightly` again")
    return outcomes


def issue(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Return title and text of the issue about the heads that fail."""
    failed = [each for each in outcomes if not each.passed]
    title = f"Nightly: the head of {' and '.join(each.component for each in failed)} breaks our tests"
    text = "| component | commit | outcome | time |\n|---|---|---|---|\n"
    for each in outcomes:
        text += (
            f"| {each.component} | {each.commit} | {'passed' if each.passed else 'failed'} | {each.seconds:.0f} s |\n"
        )
    for each in failed:
        said = each.said.replace("```", "'''")
        text += f"\n### {each.component}\n\n`{each.command}` ended with\n\n```text\n{said}\n```\n"
    return title, text
