"""A real Bazel is served by a cache, and never needs it. bazel-remote itself never ran here: no image can be had."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import requests

from tests.integration.parts import packages, processes
from tests.integration.parts import registry as registries
from tooling.core.files import ROOT
from tooling.image import bazel_cache, reference

ACTIONS = 6
NGINX = """
daemon off; user root; pid pid; error_log stderr;
events {}
http {
  access_log off; client_max_body_size 2g; client_body_temp_path temp;
  proxy_temp_path temp; fastcgi_temp_path temp; uwsgi_temp_path temp; scgi_temp_path temp;
  server {
    listen 8080; root .; auth_basic cache; auth_basic_user_file /htpasswd;
    location = /status { auth_basic off; return 200; }
    location / { dav_methods PUT; create_full_put_path on; }
  }
}
"""
DOCKERFILE = """
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends nginx-light
COPY nginx.conf /
ENTRYPOINT ["sh", "-c", "exec nginx -p /data -e stderr -c /nginx.conf"]
"""


class Build(NamedTuple):
    """The exit code and the output of a run of Bazel, its actions that ran, and those that a cache had."""

    code: int
    output: str
    actions: int
    hits: int


class Bazel(NamedTuple):
    """A real Bazel and a workspace whose actions need nothing from outside."""

    workspace: Path
    state: Path

    def __call__(self, *args: str, rc: Path | None = None) -> subprocess.CompletedProcess[str]:
        startup = [f"--output_user_root={self.state}", "--nohome_rc", "--host_jvm_args=-Xmx512m"]
        startup += [f"--bazelrc={rc}"] if rc else []
        return subprocess.run(
            ["bazel", *startup, *args], cwd=self.workspace, capture_output=True, text=True, timeout=300
        )

    def build(self, rc: Path) -> Build:
        """Build everything, from nothing but the cache."""
        self("clean", rc=rc)
        process = self("build", "//...", "--nosandbox_debug", "--noshow_progress", rc=rc)
        line = next((line for line in process.stderr.splitlines() if " processes:" in line), "")
        actions = sum(map(int, re.findall(r"(\d+) [\w-]*(?:sandbox|local)", line)))
        hits = sum(map(int, re.findall(r"(\d+) \w+ cache hit", line)))
        return Build(process.returncode, process.stderr, actions, hits)


@pytest.fixture(scope="module")
def bazel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bazel]:
    """A workspace of six actions; the last needs the others. Each output is 200 kB or more."""
    packages.need("bazel", "bazel-bootstrap")
    folder = tmp_path_factory.mktemp("bazel")
    workspace = folder / "workspace"
    workspace.mkdir()
    (workspace / "WORKSPACE").touch()
    (workspace / "BUILD").write_text(
        '[genrule(name = "p%d" % n, outs = ["p%d.txt" % n], cmd = "seq %d 40000 > $@" % n)'
        f" for n in range({ACTIONS - 1})]\n"
        f'genrule(name = "all", srcs = [":p%d" % n for n in range({ACTIONS - 1})], outs = ["all.txt"],'
        ' cmd = "cat $(SRCS) > $@")\n'
    )
    real = Bazel(workspace, folder / "state")
    yield real
    real("shutdown")
    subprocess.run(["chmod", "-R", "u+w", folder], check=True)


@pytest.fixture
def clone(trixie: str, registry: str, docker: Callable[..., str], tmp_path: Path) -> Iterator[Path]:
    """The doors of this repository and the tools behind them; nginx with WebDAV stands for bazel-remote in its lock."""
    context = tmp_path / "nginx"
    context.mkdir()
    (context / "nginx.conf").write_text(NGINX)
    (context / "Dockerfile").write_text(f"FROM {trixie}{DOCKERFILE}")
    docker("build", "--quiet", "--network", "host", "--tag", f"{registry}/nginx:1", str(context))
    folder = tmp_path / "clone"
    for name in ("docker", "tooling"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    lock, name = json.loads((folder / reference.LOCK).read_text()), f"{registry}/nginx:1"
    lock["images"]["bazel-remote"] = {"reference": name, "digest": registries.push(name, name)}
    (folder / reference.LOCK).write_text(json.dumps(lock))
    yield folder
    docker("image", "rm", "--force", name)


@pytest.mark.stand_in("nginx with WebDAV, for bazel-remote")
def test_start_cache_serves_a_real_bazel_and_nobody_without_its_password(
    clone: Path, bazel: Bazel, tmp_path: Path
) -> None:
    port, folder = processes.free_port(), tmp_path / "cache"

    def start_cache(*argv: str) -> subprocess.CompletedProcess[str]:
        door = [clone / "docker" / "start-cache.sh", *argv, "--folder", folder]
        return subprocess.run(door, env=os.environ, capture_output=True, text=True)

    start = start_cache("start", "--port", str(port))
    assert start.returncode == 0, start.stderr
    try:
        assert start_cache("start", "--port", str(port)).stdout.startswith("runs already; state running")
        rc, content = folder / "bazelrc", folder / "content"
        assert f"bazel --bazelrc={rc} build" in start.stdout
        reading = bazel.build(folder / "reading.bazelrc")
        assert (reading.code, reading.actions, [*content.glob("ac/*")]) == (0, ACTIONS, []), reading.output
        first, second = bazel.build(rc), bazel.build(rc)
        assert (first.code, first.actions, first.hits) == (0, ACTIONS, 0), first.output
        assert (second.code, second.actions, second.hits) == (0, 0, ACTIONS), second.output
        reading = bazel.build(folder / "reading.bazelrc")
        assert (reading.actions, reading.hits) == (0, ACTIONS), reading.output
        [entry, *_] = content.glob("ac/*")
        for method in ("GET", "PUT"):
            assert requests.request(method, f"http://127.0.0.1:{port}/ac/{entry.name}", timeout=60).status_code == 401
    finally:
        stop = start_cache("stop")
    assert stop.returncode == 0, stop.stderr
    assert start_cache("status").returncode == 1
    bazel_cache.write_rc(tmp_path / "rc", f"127.0.0.1:{port}", write=True)
    without = bazel.build(tmp_path / "rc")
    assert (without.code, without.actions, without.hits) == (0, ACTIONS, 0), without.output
