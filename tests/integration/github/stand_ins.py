"""Repositories and servers on this machine that stand for GitHub and for the upstreams."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
OWNER, NAME = "Some-Lab", "multimesh-jax"
WHO = {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "Upstream"), ("EMAIL", "upstream@example.org"))
}


def git(cwd: Path, *args: str) -> str:
    env = os.environ | WHO | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *args], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"git {args}: {done.stderr}"
    return done.stdout.strip()


def bare(path: Path, source: Path, *refspecs: str) -> Path:
    """A repository that a server may serve and take pushes for."""
    path.mkdir(parents=True)
    git(path, "init", "-q", "--bare", "-b", "main")
    git(path, "config", "http.receivepack", "true")
    git(path, "config", "receive.shallowUpdate", "true")  # GitHub's checkout has one commit
    git(source, "push", "-q", "--force", str(path), *refspecs)
    return path


def upstream(path: Path, files: dict[str, str], tag: str) -> Path:
    """A small repository of one commit with a tag."""
    work = path.with_suffix(".work")
    for name, text in files.items():
        target = work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    git(work, "init", "-q", "-b", "main")
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "all")
    git(work, "tag", tag)
    return bare(path, work, "main", tag)


@dataclass
class Servers:
    """What answers instead of GitHub: this repository to push to, the upstreams, and what ``gh`` was told."""

    git: Any
    folder: Path
    keeps: Path

    @property
    def told(self) -> dict[str, list[dict[str, Any]]]:
        file = self.keeps / "told.json"
        empty: dict[str, list[dict[str, Any]]] = {"issues": [], "pulls": [], "releases": [], "comments": []}
        return json.loads(file.read_text()) if file.exists() else empty

    @property
    def repository(self) -> Path:
        return self.folder / OWNER / f"{NAME}.git"
