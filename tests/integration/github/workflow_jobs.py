"""Runs workflows on this machine: every ``run:`` block as it stands, every action by what it reads and leaves.

Whoever starts it is the runner's user. Each checkout gives a clone with nothing in it but what is committed.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from actions import ACTIONS, Runner
from expressions import evaluate, expand, text_of

MINUTES = 360  # after that GitHub ends a job that names no limit
# As GitHub starts them: a step that names no shell has no `pipefail`.
SHELLS = {"": ["bash", "-e"], "bash": ["bash", "--noprofile", "--norc", "-eo", "pipefail"]}
ASKS = re.compile(r"\b(success|failure|always|cancelled)\(\)")


class StepFailed(AssertionError):
    """A step ended with another exit code than 0."""


@dataclass
class Step:
    """What was run, and what it printed."""

    job: str
    command: str
    output: str
    seconds: float


@dataclass
class Machine:
    """A runner's machine. ``clone`` is the repository on GitHub; each job has an empty ``workspace``.

    ``vars`` and ``secrets`` are what the repository sets; ``constants`` stand for an ``env`` of a whole workflow.
    """

    clone: Path
    workspace: Path
    artifacts: Path
    github: dict[str, Any]
    environ: dict[str, str]
    vars: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    attested: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def workflow(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        only: tuple[str, ...] = (),
        may_fail: str = "",
        before: Mapping[str, Mapping[str, str]] | None = None,
        rights: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Run the jobs of ``.github/workflows/NAME``; return its outputs. A step that fails fails the test.

        Parameters
        ----------
        only
            Jobs, or values of their matrices: the others are left out. All by default.
        may_fail
            A job whose failure is left to the jobs after it.
        before
            Jobs that were run already, with their outputs; their artifacts are there. None for a new run.
        rights
            Of the job that calls this workflow, whose jobs can have no more. None where nobody calls it.
        """
        if rights is None and before is None:
            shutil.rmtree(self.artifacts)
            self.artifacts.mkdir()
        text = (self.clone / ".github" / "workflows" / name).read_text(encoding="utf-8")
        spec = yaml.load(text, Loader=yaml.BaseLoader)  # plain strings: `on` stays a word
        declared = spec["on"].get("workflow_call", {}) if isinstance(spec["on"], dict) else {}
        kinds = declared.get("inputs") or {}
        given = {key: each.get("default", "") for key, each in kinds.items()} | dict(inputs or {})
        given = {
            key: value in (True, "true") if kinds[key]["type"] == "boolean" else value for key, value in given.items()
        }
        needs: dict[str, Any] = {}
        for job, body in in_order(spec["jobs"]):
            if job in (before or {}):
                needs[job] = {"result": "success", "outputs": dict((before or {})[job])}
                continue
            known = {key: self.constants.get(key, value) for key, value in spec.get("env", {}).items()}
            context = self._context(needs, given, known)
            wanted = body.get("if", "success()").removeprefix("${{").removesuffix("}}")
            mine = body.get("needs", [])
            mine = [mine] if isinstance(mine, str) else mine
            healthy = all(needs[each]["result"] == "success" for each in mine)
            calls = self._calls(healthy)
            runs = evaluate(wanted, context, calls) and (healthy or "cancelled()" in wanted or "always()" in wanted)
            if not runs:
                self.skipped.append(f"{name}:{job}")
                needs[job] = {"result": "skipped", "outputs": {}}
                continue
            outputs, result, own = {}, "success", body.get("permissions", {})
            beyond = {name: right for name, right in own.items() if rights is not None and rights.get(name) != right}
            assert not beyond, f"{name}:{job} wants {beyond}, which the job that calls it has not"
            if "uses" in body:
                for cell in expand(list(chosen(job, body, only)), context, calls):
                    asked = expand(body.get("with", {}), context | {"matrix": cell}, calls)
                    outputs = self.workflow(Path(body["uses"]).name, asked, rights=own)
            else:
                for cell in chosen(job, body, only):
                    try:
                        outputs = self._job(f"{name}:{job}", body, context | {"matrix": cell})
                    except StepFailed:
                        if job != may_fail:
                            raise
                        result = "failure"
            needs[job] = {"result": result, "outputs": outputs}
        context = {"jobs": needs}
        return {key: expand(each["value"], context, {}) for key, each in (declared.get("outputs") or {}).items()}

    def _context(self, needs: Mapping[str, Any], inputs: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
        context = {"github": self.github, "vars": self.vars, "secrets": self.secrets, "needs": needs, "inputs": inputs}
        context |= {
            "runner": {
                "os": "Linux",
                "temp": self.environ["RUNNER_TEMP"],
                "environment": self.environ["RUNNER_ENVIRONMENT"],
            },
            "env": {},
            "steps": {},
        }
        return context | {"env": expand(dict(env), context, {})}

    @staticmethod
    def _calls(healthy: bool) -> dict[str, Any]:
        return {
            "success": lambda: healthy,
            "failure": lambda: not healthy,
            "always": lambda: True,
            "cancelled": lambda: False,
            "startsWith": lambda text, start: str(text).startswith(start),
            "hashFiles": lambda *patterns: "0" * 64,
        }

    def _job(self, label: str, body: Mapping[str, Any], context: dict[str, Any]) -> dict[str, Any]:
        calls = self._calls(True)
        env = context["env"] | expand(body.get("env", {}), context, calls)
        context = context | {"env": env, "steps": {}}
        shutil.rmtree(self.workspace, ignore_errors=True)
        self.workspace.mkdir()
        for folder in (Path(self.environ["HOME"], ".docker"), Path(self.environ["RUNNER_TEMP"], "docker")):
            (folder / "config.json").unlink(
                missing_ok=True
            )  # each job has a new machine: logins of others are not there
        rights = body.get("permissions", {})
        env["GH_RIGHTS"] = " ".join(
            f"{name}:{right}" for name, right in rights.items()
        )  # which the program for gh looks at
        until = time.monotonic() + 60 * int(expand(body.get("timeout-minutes", MINUTES), context, calls))
        exported: dict[str, str] = {}
        failed: StepFailed | None = None
        for step in body["steps"]:
            wanted = step.get("if", "success()").removeprefix("${{").removesuffix("}}")
            if (failed and not ASKS.search(wanted)) or not evaluate(wanted, context, calls):
                self.skipped.append(f"{label}: {step.get('name', step.get('run', step.get('uses')))}")
                continue
            if "uses" in step:
                seen = self.environ | {key: text_of(each) for key, each in (env | exported).items()}
                where = (self.clone, self.workspace, self.artifacts, self.github)
                action = ACTIONS[step["uses"].partition("@")[0]]
                action(Runner(*where, seen, rights, self.attested), expand(step.get("with", {}), context, calls))
                continue
            assert "${{" not in step["run"], f"{label}: an expression inside a script; pass it through env"
            variables = env | expand(step.get("env", {}), context, calls) | exported
            try:
                outputs, more = self._script(
                    label, step, {key: text_of(each) for key, each in variables.items()}, until
                )
            except StepFailed as error:
                failed, calls = failed or error, self._calls(False)
                continue
            exported |= more
            if "id" in step:
                context["steps"][step["id"]] = {"outputs": outputs}
        if failed:
            raise failed
        return expand(body.get("outputs", {}), context, calls)

    def _script(
        self, label: str, step: Mapping[str, str], env: Mapping[str, str], until: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        files = {
            name: Path(self.environ["RUNNER_TEMP"], name.lower())
            for name in ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_STEP_SUMMARY")
        }
        for path in files.values():
            path.write_text("")
        variables = {f"GITHUB_{key.upper()}": str(value) for key, value in self.github.items() if key != "token"}
        full = self.environ | variables | dict(env) | {name: str(path) for name, path in files.items()}
        argv = [*SHELLS[step.get("shell", "")], "-c", step["run"]]
        folder = self.workspace / step.get("working-directory", ".")
        began = time.monotonic()
        done = subprocess.run(
            argv, cwd=folder, env=full, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=until - began,
        )  # fmt: skip
        self.steps.append(Step(label, step["run"], done.stdout, time.monotonic() - began))
        if done.returncode:
            raise StepFailed(f"{label}: {step['run']}\n{done.stdout[-4000:]}")
        return pairs(files["GITHUB_OUTPUT"]), pairs(files["GITHUB_ENV"])


def pairs(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


def cells(body: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the cells of a job's matrix; one empty cell where it has none."""
    matrix = body.get("strategy", {}).get("matrix", {})
    if "include" in matrix:
        yield from matrix["include"]
        return
    for values in itertools.product(*matrix.values()):
        yield dict(zip(matrix, values, strict=True))


def chosen(job: str, body: Mapping[str, Any], only: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Yield the cells that are asked for: all, or those of jobs or of values."""
    return (cell for cell in cells(body) if not only or {job, *cell.values()} & set(only))


def in_order(jobs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield jobs after those that they need."""
    left, done = dict(jobs), set()
    while left:
        for name, body in list(left.items()):
            needs = body.get("needs", [])
            if set([needs] if isinstance(needs, str) else needs) <= done:
                yield name, left.pop(name)
                done.add(name)


def clean_environment(home: Path) -> dict[str, str]:
    """Return what the machine's administrator sets, with an empty home."""
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_", "UV_", "DOCKER_"))}
    kept |= {"RUNNER_ENVIRONMENT": os.environ.get("RUNNER_ENVIRONMENT", "self-hosted")}
    return kept | {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "RUNNER_TEMP": str(home / "temp"),
        "CI": "true",
        "GIT_CONFIG_NOSYSTEM": "1",
    }
