"""What a real Bazel gets from a cache, and that it never needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from tests.integration.parts import processes
from tests.integration.parts import registry as registries
from tooling.image import bazel_cache, digests

from .conftest import ACTIONS, Bazel, Remote

ROOT = Path(__file__).resolve().parents[3]
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


@pytest.fixture
def clone(trixie: str, registry: str, docker: Callable[..., str], tmp_path: Path) -> Iterator[Path]:
    """The doors of this repository and the tools behind them; nginx with WebDAV stands for bazel-remote in its lock."""
    context = tmp_path / "nginx"
    context.mkdir()
    (context / "nginx.conf").write_text(NGINX)
    (context / "Dockerfile").write_text(f"FROM {trixie}{DOCKERFILE}")
    docker("build", "--quiet", "--network", "host", "--tag", f"{registry}/nginx:1", str(context))
    made = tmp_path / "clone"
    for name in ("docker", "tooling"):
        shutil.copytree(ROOT / name, made / name, symlinks=True)
    (made / ".venv").symlink_to(ROOT / ".venv")
    lock, name = digests.load(made), f"{registry}/nginx:1"
    pin = lock.images["bazel-remote"]._replace(reference=name, digest=registries.push(name, name))
    digests.save(made, lock._replace(images=lock.images | {"bazel-remote": pin}))
    yield made
    docker("image", "rm", "--force", name)


@pytest.mark.full
@pytest.mark.stand_in("nginx with WebDAV, for bazel-remote")
def test_start_cache_serves_a_real_bazel_and_nobody_without_its_password(
    clone: Path, bazel: Bazel, tmp_path: Path
) -> None:
    port, folder = processes.free_port(), tmp_path / "cache"
    ports = ["--port", str(port)]

    def start_cache(*argv: str) -> subprocess.CompletedProcess[str]:
        door = [clone / "docker" / "start-cache.sh", *argv, "--folder", folder]
        return subprocess.run(door, env=os.environ, capture_output=True, text=True)

    started = start_cache("start", *ports)
    assert started.returncode == 0, started.stderr
    try:
        rc = folder / "bazelrc"
        assert f"bazel --bazelrc={rc} build" in started.stdout
        first, second = bazel.build(rc), bazel.build(rc)
        assert (first.code, first.ran, first.found) == (0, ACTIONS, 0), first.said
        assert (second.code, second.ran, second.found) == (0, 0, ACTIONS), second.said
        reading = bazel.build(folder / "reading.bazelrc")
        assert (reading.ran, reading.found) == (0, ACTIONS), reading.said
        [entry, *_] = (folder / "content").glob("ac/*")
        for method in ("GET", "PUT"):
            assert requests.request(method, f"http://127.0.0.1:{port}/ac/{entry.name}", timeout=9).status_code == 401
    finally:
        stopped = start_cache("stop")
    assert stopped.returncode == 0, stopped.stderr
    bazel_cache.Server(f"127.0.0.1:{port}", "of-nobody").write_rc(tmp_path / "rc", write=True)
    alone = bazel.build(tmp_path / "rc")
    assert (alone.code, alone.ran, alone.found) == (0, ACTIONS, 0), alone.said


@pytest.mark.stand_in("a server that keeps what is PUT, for bazel-remote")
def test_a_server_serves_every_build_and_its_end_breaks_none(remote: Remote, bazel: Bazel, tmp_path: Path) -> None:
    cache = bazel_cache.Server(remote.address, None)
    cache.write_rc(rc := tmp_path / "rc", write=True)
    assert rc.stat().st_mode & 0o077 == 0
    first, second = bazel.build(rc), bazel.build(rc)
    assert (first.code, first.ran, first.found) == (0, ACTIONS, 0), first.said
    assert (second.code, second.ran, second.found) == (0, 0, ACTIONS), second.said

    remote.stop()
    alone = bazel.build(rc)
    assert (alone.code, alone.ran, alone.found) == (0, ACTIONS, 0), alone.said


@pytest.mark.stand_in("a server that keeps what is PUT, for bazel-remote")
def test_read_only_build_writes_nothing(remote: Remote, bazel: Bazel, tmp_path: Path) -> None:
    cache = bazel_cache.Server(remote.address, None)
    cache.write_rc(tmp_path / "readonly", write=False)
    build = bazel.build(tmp_path / "readonly")
    assert (build.code, build.ran) == (0, ACTIONS)
    assert remote.entries == {}
