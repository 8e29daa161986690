"""Runs our tests against the heads of jax and MaxText, and keeps one issue about what breaks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from workflows import errors, files, proc
from workflows.ci import upstream
from workflows.sources import manifest
from workflows.sources.manifest import Component
from workflows.sources.workspace import Workspace

LABEL = "nightly"
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


def head_of(component: Component, mirror: str | None) -> tuple[str, str]:
    """Return the address of a component's upstream and the commit of its default branch."""
    url, answer = upstream.ask(component, "HEAD", mirror)
    if "HEAD" not in answer:
        raise errors.MissingCommitError(f"{component.name}: {url} has no default branch")
    return url, answer["HEAD"]


def run(here: Workspace, name: str, mirror: str | None) -> Outcome:
    """Test against the head of a component.

    Raises
    ------
    NetworkError
        The upstream cannot be asked; that says nothing about the head.
    """
    if name not in _STEPS:
        raise errors.UsageError(f"{name}: has no nightly test; there are {', '.join(_STEPS)}")
    url, commit = head_of(manifest.load(here.manifest)[name], mirror)
    started, said, argv = time.monotonic(), "", []
    for argv in _STEPS[name](here.root, url, commit):
        done = proc.run(
            argv, cwd=here.root, check=False, env=os.environ | {"PYTHONPATH": str(here.root / "multimesh/src")}
        )
        said = done.text + "\n" + done.stderr.decode("utf-8", "replace")
        if done.returncode:
            break
    tail = "\n".join(said.strip().splitlines()[-_TAIL:])
    seconds = round(time.monotonic() - started, 1)
    return Outcome(name, commit, done.returncode == 0, seconds, proc.quoted([str(word) for word in argv]), tail)


def _maxtext(root: Path, url: str, commit: str) -> list[list[str]]:
    """Put the head, with our patches, in MaxText's place; train on it and run the launcher's tests."""
    return [
        ["./bootstrap.sh", "--group", "run", "--group", "dev", "--override", f"maxtext={url}@{commit}"],
        ["maxtext/validate-cpu.sh"],
        [".venv/bin/pytest", "-q", "maxtext/tests"],
    ]


def _jax(root: Path, url: str, commit: str) -> list[list[str]]:
    """Install the head, with the newest jaxlib, into an environment of its own; run the library's tests there."""
    folder = root / ".venv-nightly"
    python = str(folder / "bin" / "python")
    return [
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [python, "-m", "pip", "install", "--quiet", "--pre", "jaxlib", f"jax @ git+{url}@{commit}"],
        [python, "-m", "pip", "install", "--quiet", "optax", "hypothesis", "pytest", "pytest-timeout"],
        [python, "-m", "pytest", "-q", "multimesh/tests", "-m", "not full and not flax"],
    ]


_STEPS: dict[str, Callable[[Path, str, str], list[list[str]]]] = {"maxtext": _maxtext, "jax": _jax}


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
    if missing := _STEPS.keys() - {each.component for each in outcomes}:
        raise errors.UsageError(f"there is no outcome of {', '.join(sorted(missing))}; run `ci nightly` again")
    return outcomes


def issue(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Return title and text of the issue about the heads that fail."""
    failed = [each for each in outcomes if not each.passed]
    title = f"Nightly: the head of {' and '.join(each.component for each in failed)} breaks our tests"
    rows = "\n".join(
        f"| {e.component} | {e.commit} | {'passed' if e.passed else 'failed'} | {e.seconds:.0f} s |" for e in outcomes
    )
    parts = [f"| component | commit | outcome | time |\n|---|---|---|---|\n{rows}"]
    for each in failed:
        said = each.said.replace("```", "'''")
        parts.append(f"### {each.component}\n\n`{each.command}` ended with\n\n```text\n{said}\n```")
    return title, "\n\n".join(parts) + "\n"
