"""A clean clone of this repository, and servers on this machine that stand for GitHub and for the upstreams."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds no folder

import api as github_api
import jobs

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
    """What answers instead of GitHub: its interface, this repository to push to, and the upstreams."""

    api: Any
    git: Any
    folder: Path

    @property
    def repository(self) -> Path:
        return self.folder / OWNER / f"{NAME}.git"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    spec = importlib.util.spec_from_file_location("git_server", ROOT / "benchmarks" / "git_server.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("served")
    bare(folder / OWNER / f"{NAME}.git", ROOT, "HEAD:refs/heads/main")
    # MaxText as its wheel brings it, in the shape of its upstream; its release has the tag that is pinned.
    maxtext = ROOT / "third_party" / "maxtext"
    base = "refs/multimesh/base"
    bare(folder / "maxtext.git", maxtext, f"{base}:refs/heads/main", f"{base}:refs/tags/maxtext-v0.2.4")
    running = github_api.Api()
    with module.GitServer(folder) as served:
        yield Servers(running, served, folder)
    running.close()


@pytest.fixture(scope="module")
def machine(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> jobs.Machine:
    """A runner's machine: a clean clone, an empty home, and a token that only the stand-in knows."""
    clone = tmp_path_factory.mktemp("runner") / NAME
    git(ROOT, "clone", "-q", str(ROOT), str(clone))
    git(clone, "checkout", "-q", "-B", "main")
    artifacts, home = (tmp_path_factory.mktemp(name) for name in ("artifacts", "home"))
    github = {
        "repository": f"{OWNER}/{NAME}", "repository_owner": OWNER, "actor": "somebody", "event_name": "push",
        "ref": "refs/heads/main", "ref_name": "main", "sha": git(clone, "rev-parse", "HEAD"), "run_id": "1",
        "api_url": servers.api.url, "server_url": servers.git.url, "token": github_api.TOKEN,
    }  # fmt: skip
    environ = jobs.clean_environment(home) | {"MULTIMESH_MIRROR": servers.git.url}
    return jobs.Machine(clone, artifacts, github, environ)
