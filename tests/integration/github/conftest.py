"""A clean clone of this repository, and servers on this machine that stand for GitHub and for the upstreams."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds no folder

import workflow_jobs
from gh import TOKEN
from stand_ins import NAME, OWNER, ROOT, Servers, bare, git

from tests.integration.parts import registry as registries


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    spec = importlib.util.spec_from_file_location("git_server", ROOT / "tests" / "benchmarks" / "git_server.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("served")
    bare(folder / OWNER / f"{NAME}.git", ROOT, "HEAD:refs/heads/main")
    # MaxText as its wheel brings it, in the shape of its upstream; its release has the tag that is pinned.
    maxtext = ROOT / "third_party" / "maxtext"
    base = "refs/multimesh/base"
    bare(folder / "maxtext.git", maxtext, f"{base}:refs/heads/main", f"{base}:refs/tags/maxtext-v0.2.5")
    keeps = tmp_path_factory.mktemp("gh")
    with module.GitServer(folder) as served:
        yield Servers(served, folder, keeps)


@pytest.fixture(scope="module")
def machine(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> workflow_jobs.Machine:
    """A runner's machine: an empty home, a clean clone, and a token that only the stand-ins know."""
    clone = tmp_path_factory.mktemp("runner") / NAME
    git(ROOT, "clone", "-q", str(ROOT), str(clone))
    git(clone, "checkout", "-q", "-B", "main")
    artifacts, home, work = (tmp_path_factory.mktemp(name) for name in ("artifacts", "home", "work"))
    # Where the engine's fixture puts buildx; GitHub's runners have it where every configuration finds it.
    config = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    for folder in (home / ".docker", home / "temp" / "docker"):
        folder.mkdir(parents=True)
        (folder / "cli-plugins").symlink_to(config / "cli-plugins")
    (home / "bin").mkdir()
    (home / "bin" / "gh").symlink_to(Path(__file__).with_name("gh.py"))
    github = {
        "repository": f"{OWNER}/{NAME}", "repository_owner": OWNER, "actor": "somebody", "event_name": "push",
        "ref": "refs/heads/main", "ref_name": "main", "sha": git(clone, "rev-parse", "HEAD"), "run_id": "1",
        "server_url": servers.git.url, "token": TOKEN,
        "event": {"repository": {"private": False, "default_branch": "main"}},
    }  # fmt: skip
    environ = workflow_jobs.clean_environment(home) | {
        "MULTIMESH_MIRROR": servers.git.url,
        "GH_KEEPS": str(servers.keeps),
    }
    environ["PATH"] = f"{home / 'bin'}:{environ['PATH']}"
    return workflow_jobs.Machine(clone, work / NAME, artifacts, github, environ)


@pytest.fixture(scope="module")
def ghcr(machine: workflow_jobs.Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry in place of ghcr.io, which takes the run's token and nobody else."""
    with registries.running(tmp_path_factory.mktemp("ghcr"), login=("somebody", TOKEN)) as address:
        machine.constants["REGISTRY"] = address
        yield address
