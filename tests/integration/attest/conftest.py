"""Engines and builders that attest, a repository whose image takes a second to build, and a scanner for BuildKit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.parts import builder
from tests.integration.parts import engine as engines
from workflows.sources import lock as sources

SECRET = "hunter2-hunter2"
# Small, and with what provenance could give away: build arguments, and a secret that a step reads.
DOCKERFILE = """\
ARG RUNTIME_BASE_IMAGE
FROM ${RUNTIME_BASE_IMAGE} AS runtime
RUN --mount=type=secret,id=pip.conf cat /run/secrets/pip.conf >/dev/null && echo "made by a step" >/made
USER 1000:1000
"""
# BuildKit's protocol: files to look at in one folder, in-toto statements into another.
SCANNER = b"""\
#!/bin/sh
set -eu
cd "$BUILDKIT_SCAN_SOURCE"
{
  printf '{"_type": "https://in-toto.io/Statement/v0.1", "predicateType": "https://spdx.dev/Document", "predicate":'
  printf ' {"spdxVersion": "SPDX-2.3", "SPDXID": "SPDXRef-DOCUMENT", "name": "stand-in", "files": ['
  separator=
  for file in $(find opt made -type f); do
    printf '%s{"fileName": "%s"}' "$separator" "$file"
    separator=', '
  done
  printf ']}}'
} >"$BUILDKIT_SCAN_DESTINATION/stand-in.spdx.json"
"""


@dataclass(frozen=True)
class Bench:
    """A small repository with the real build.py, and the variables that choose an engine and a builder."""

    repository: Path
    base: str
    scanner: str
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def way(self) -> str:
        """Who makes attestations: ``engine`` or ``builder``."""
        return "builder" if "BUILDX_BUILDER" in self.env else "engine"

    def build(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run build.py on the base image."""
        given = ["--accelerator", "cpu", "--base-image", self.base, *argv]
        return self.run(self.repository / "docker" / "build.py", *given, **env)

    def docker(self, *argv: str, stdin: bytes | None = None) -> str:
        """Run a docker command that must succeed; returns its output."""
        done = subprocess.run(["docker", *argv], input=stdin, capture_output=True, env=os.environ | self.env)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        return done.stdout.decode().strip()

    def run(self, *argv: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a program; no user may see a traceback."""
        settings = os.environ | self.env | {"PIP_INDEX_URL": "https://me:hunter2-hunter2@pypi.example/simple"} | env
        done = subprocess.run(argv, cwd=self.repository, capture_output=True, text=True, env=settings, timeout=300)
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return done


@pytest.fixture(scope="session")
def store(parts_folder: Path) -> Iterator[str]:
    """The DOCKER_HOST of an engine that keeps its images in containerd."""
    folder = parts_folder / "store"
    folder.mkdir()
    with engines.with_containerd_store(folder) as host:
        engines.with_buildx(folder)
        yield host


@pytest.fixture(scope="session")
def bench(root: Path, store: str, registry: str, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """On the engine that keeps its images in containerd."""
    place = tmp_path_factory.mktemp("attest") / "repository"
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    wanted = re.compile(r"(workflows|docker|requirements|multimesh/pyproject.toml|sources|images|\.gitignore)")
    for name in filter(wanted.match, listed.split("\0")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, place / name, follow_symlinks=False)
    (place / "docker" / "Dockerfile").write_text(DOCKERFILE)
    (place / ".venv").symlink_to((root / ".venv").resolve())
    maxtext, lock = place / "third_party" / "maxtext", place / "sources.lock"
    (maxtext / "src" / "maxtext").mkdir(parents=True)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    for tree in (maxtext, place):
        for argv in (["init", "-q"], ["add", "-A"], ["commit", "-q", "--allow-empty", "-m", "t"]):
            subprocess.run([*git, "-C", tree, *argv], check=True)
        if tree == maxtext:  # the lock says what lies there
            head = subprocess.run([*git, "-C", tree, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
            pinned = str(sources.value(lock, "maxtext", "patched_commit"))
            lock.write_text(lock.read_text().replace(pinned, head.stdout.strip()))
    subprocess.run(
        [*git, "-C", place, "remote", "add", "origin", "https://me:hunter2-hunter2@git.example/team/code.git"],
        check=True,
    )
    bare = Bench(place, "", "", {"DOCKER_HOST": store})
    files, links = engines.checkable()
    base = publish(bare, f"{registry}/base", engines.archive(files, links))
    files |= {"scan.sh": (SCANNER, 0o755)}
    scanner = publish(bare, f"{registry}/scanner", engines.archive(files, links), 'ENTRYPOINT ["/scan.sh"]')
    return Bench(place, base, scanner, bare.env)


def publish(bench: Bench, name: str, content: bytes, *changes: str) -> str:
    """Push an image of these files; returns it by its digest."""
    bench.docker("import", *(word for each in changes for word in ("--change", each)), "-", f"{name}:1", stdin=content)
    said = bench.docker("push", f"{name}:1")
    return f"{name}@{re.search(r'digest: (sha256:[0-9a-f]{64})', said)[1]}"


@pytest.fixture(scope="session")
def builder_bench(bench: Bench, docker_engine: None, store: str, parts_folder: Path) -> Iterator[Bench]:
    """On an engine that keeps no image index, with a builder of its own."""
    env = {name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ} | {"BUILDX_BUILDER": "mm-test"}
    with builder.running(store, parts_folder / "buildkit.sock") as place:
        create = ["docker", "buildx", "create", "--name", "mm-test", "--driver", "remote", place]
        subprocess.run(["docker", "buildx", "rm", "mm-test"], capture_output=True)  # a run that was killed left it
        subprocess.run(create, check=True, capture_output=True)
        try:
            yield Bench(bench.repository, bench.base, bench.scanner, env)
        finally:
            subprocess.run(["docker", "buildx", "rm", "mm-test"], capture_output=True)


@pytest.fixture(params=["bench", "builder_bench"])
def attesting(request: pytest.FixtureRequest) -> Callable[..., Bench]:
    """Each way to attestations in turn."""
    return request.getfixturevalue(request.param)
