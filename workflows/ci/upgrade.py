"""Moves every pin to the newest release that its source offers, as far as patches and validation let it."""

from __future__ import annotations

import base64
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packaging.version import InvalidVersion, Version

from workflows import console, errors, proc
from workflows.ci import upstream
from workflows.sources import build, bump, git, lock, manifest
from workflows.sources.manifest import Component
from workflows.sources.workspace import Workspace

BRANCH, TITLE = "bump/pins", "Move pins to the newest releases"
PINNED = ("sources.yaml", "sources.lock", "requirements", "patches")
_REVISION = re.compile(r"^XLA_COMMIT = \"([0-9a-f]{40})\"", re.MULTILINE)
_JAX = re.compile(r"^(jax|jaxlib)==\S+$", re.MULTILINE)


@dataclass(frozen=True)
class Move:
    """What became of one pin: ``fault`` says why it stayed."""

    name: str
    old: str
    new: str
    fault: str = ""

    @property
    def line(self) -> str:
        """A row of the report's table."""
        return f"| {self.name} | {self.old[:12]} | {self.new[:12]} | {self.fault or 'moved'} |"


def newest(component: Component, mirror: str | None) -> str:
    """Return the highest version among an upstream's release tags; pre-releases do not count.

    Raises
    ------
    MissingCommitError
        The upstream has no release.
    """
    prefix, _, suffix = component.tag.partition(component.version)
    url, answer = upstream.ask(component, f"refs/tags/{prefix}*", mirror)
    found = []
    for ref in answer:
        name = ref.removeprefix(f"refs/tags/{prefix}").removesuffix("^{}")
        try:
            version = Version(name.removesuffix(suffix))
        except InvalidVersion:
            continue
        if not version.is_prerelease:
            found.append((version, name.removesuffix(suffix)))
    if not found:
        raise errors.MissingCommitError(f"{component.name}: {url} has no release tag {prefix}*")
    return max(found)[1]


def upgrade(here: Workspace, mirror: str | None, reporter: console.Reporter) -> list[Move]:
    """Move what can be moved; a pin that cannot stays as it was, and its move says why."""
    moves = []
    for component in manifest.load(here.manifest).components:
        if component.tag:
            moves.append(_move(here, component, partial(newest, component, mirror), mirror, reporter))
            if component.name == "jax" and not moves[-1].fault and moves[-1].new != moves[-1].old:
                xla = manifest.load(here.manifest)["xla"]
                moves.append(_move(here, xla, partial(_xla_of, here, mirror), mirror, reporter))
                moves.append(_relock(here.root, moves[-2].new))
    return [move for move in moves if move.fault or move.new != move.old]


def _move(
    here: Workspace, component: Component, find: Callable[[], str], mirror: str | None, reporter: console.Reporter
) -> Move:
    new = component.version
    try:
        new = find()
        if new != component.version:
            bump.bump(here, component.name, new, mirror, reporter)
        return Move(component.name, component.version, new)
    except errors.WorkflowsError as error:
        return Move(component.name, component.version, new, str(error))


def _xla_of(here: Workspace, mirror: str | None) -> str:
    """Return the revision of xla that the pinned jax names."""
    jax, pin = manifest.load(here.manifest)["jax"], lock.load(here.lock)["jax"]
    with tempfile.TemporaryDirectory() as folder:
        repo = git.init(Path(folder, "jax"))
        git.fetch(repo, build.address(jax, mirror), str(pin.commit), label="jax", on_progress=lambda done, total: None)
        text = repo("show", f"{pin.commit}:third_party/xla/revision.bzl", check=False)
    match = _REVISION.search(text.text)
    if match is None:
        raise errors.MissingCommitError("xla: jax's third_party/xla/revision.bzl names no commit; bump xla by hand")
    return match[1]


def _relock(root: Path, version: str) -> Move:
    """Put a jax version into the requirements and lock them anew."""
    path = root / "requirements" / "run.in"
    text = path.read_text(encoding="utf-8")
    old = next((match[0].partition("==")[2] for match in _JAX.finditer(text)), "")
    locks = {
        name: (root / "requirements" / f"{name}.txt").read_bytes() for name in ("run", "dev", "workflows", "bench")
    }
    try:
        path.write_text(_JAX.sub(lambda match: f"{match[1]}=={version}", text), encoding="utf-8")
        for name in locks:
            compile_lock(root, name)
    except errors.WorkflowsError as error:
        path.write_text(text, encoding="utf-8")
        for name, content in locks.items():
            (root / "requirements" / f"{name}.txt").write_bytes(content)
        return Move("requirements", old, version, str(error))
    return Move("requirements", old, version)


def compile_lock(root: Path, name: str) -> None:
    """Lock ``requirements/NAME.in`` by hash for every platform, moving only what its text asks for."""
    options = ("--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate",
               "--no-emit-index-url", "--no-emit-find-links", "--quiet")  # fmt: skip
    argv = [sys.executable, "-m", "uv", "pip", "compile", *options, f"{name}.in", "-o", f"{name}.txt"]
    proc.run(argv, cwd=root / "requirements")


def validate(root: Path) -> tuple[bool, str]:
    """Bring the new pins in and run the CPU job; return whether it passed, and the end of what it said."""
    said = ""
    for argv in (["./bootstrap.sh", "--group", "run"], ["maxtext/validate-cpu.sh"]):
        done = proc.run(argv, cwd=root, check=False)
        said += f"$ {' '.join(argv)}\n{done.text}\n"
        if done.returncode:
            return False, f"{said}{done.complaint}"
    return True, said


def report(moves: list[Move], passed: bool, said: str) -> str:
    """Return the text of the pull request."""
    rows = "\n".join(move.line for move in moves)
    tail = "\n".join(said.splitlines()[-40:]).replace("```", "'''")
    verdict = "passed" if passed else "**failed**"
    return (
        f"| pin | from | to | outcome |\n|---|---|---|---|\n{rows}\n\n"
        f"The CPU validation job {verdict} on the new pins:\n\n```text\n{tail}\n```\n"
    )


def changed(root: Path) -> bool:
    """Say whether a pin differs from the last commit."""
    return bool(proc.run(["git", "status", "--porcelain", "--", *_present(root)], cwd=root).text)


def _present(root: Path) -> list[str]:
    return [name for name in PINNED if (root / name).exists()]


def push(root: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Commit the pins on a branch of their own and push it; the token is in no argument."""
    who = {"GIT_AUTHOR_NAME": "MultiMesh bumps", "GIT_COMMITTER_NAME": "MultiMesh bumps",
           "GIT_AUTHOR_EMAIL": "bumps@multimesh.invalid", "GIT_COMMITTER_EMAIL": "bumps@multimesh.invalid"}  # fmt: skip
    server = environ.get("GITHUB_SERVER_URL", "https://github.com").rstrip("/")
    secret = base64.b64encode(f"x-access-token:{environ['GITHUB_TOKEN']}".encode()).decode()
    header = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"http.{server}/.extraheader",
              "GIT_CONFIG_VALUE_0": f"AUTHORIZATION: basic {secret}"}  # fmt: skip
    env = dict(environ) | who | header
    proc.run(["git", "checkout", "--quiet", "-B", BRANCH], cwd=root, env=env)
    proc.run(["git", "commit", "--quiet", "-m", TITLE, "--", *_present(root)], cwd=root, env=env)
    url = f"{server}/{environ['GITHUB_REPOSITORY']}.git"
    proc.run(["git", "push", "--quiet", "--force", url, f"HEAD:refs/heads/{BRANCH}"], cwd=root, env=env)
