"""Starting, finding and stopping a cache server, again and in the wrong moment."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.parts.processes import free_port
from workflows import errors
from workflows.cache import server
from workflows.cache.settings import Place, Settings

from .conftest import ROOT, Cache, gone, holds

USAGE, CACHE = 2, 17
KEY = "/cas/" + "ab" * 32


def test_start_and_stop_twice(cache: Cache) -> None:
    keeper = cache.keeper
    assert cache.request("PUT", KEY, b"entry") == 201

    assert "runs already" in cache.start()
    assert cache.keeper == keeper
    status = cache.status
    assert (status["state"], status["settings"]["host"]) == ("running", "127.0.0.1")

    stopped = cache.run("stop")
    assert (stopped.returncode, "stopped; " in stopped.stdout) == (0, True)
    assert gone(keeper)
    assert "was not running" in cache.run("stop").stdout
    assert cache.run("status").returncode == 1

    cache.start()
    assert cache.request("GET", KEY) == 200


def test_two_starts_at_once_give_one_server(make_cache: Callable[..., Cache]) -> None:
    cache = make_cache()
    with ThreadPoolExecutor(2) as pool:
        said = sorted(answer.split(";")[0] for answer in pool.map(lambda _: cache.start(), range(2)))
    assert said == ["runs already", "started"]


def test_the_door_starts_it(make_cache: Callable[..., Cache]) -> None:
    cache = make_cache()
    argv = [ROOT / "docker" / "start-cache.sh", "start", "--backend", "nginx", "--port", str(cache.port)]
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("this checkout has no .venv")
    done = subprocess.run([*argv, "--folder", cache.folder], capture_output=True, text=True, timeout=60, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"state running, backend nginx, address 127.0.0.1:{cache.port}" in done.stdout


def test_port_in_use_is_named(make_cache: Callable[..., Cache]) -> None:
    cache = make_cache()
    with socket.create_server(("127.0.0.1", cache.port)):
        said = cache.refused(CACHE)
    assert f"127.0.0.1:{cache.port}: Address already in use; take another --port" in said


def test_other_settings_need_a_stop_first(cache: Cache) -> None:
    said = cache.refused(CACHE, "--port", str(free_port()))
    assert "run `start-cache.sh stop` first" in said
    assert cache.status["state"] == "running"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "add --password-file FILE"),
        (("--host", "localhost"), "write an address"),
        (("--port", "0"), "must be from 1"),
        (("--max-size", "0G"), "whole number"),
        (("--max-size", "lots"), "whole number"),
        (("--password-file", "/tmp/no/such/file"), "does not exist"),
        (("--folder", "/tmp/a;b"), "nginx cannot have"),
    ],
)
def test_settings_that_are_refused(make_cache: Callable[..., Cache], options: tuple[str, ...], said: str) -> None:
    assert said in make_cache().refused(USAGE, *options)


def test_password_file_that_others_may_read_is_refused(make_cache: Callable[..., Cache], tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("correct-horse-battery")
    file.chmod(0o644)
    said = make_cache().refused(USAGE, "--password-file", str(file))
    assert "chmod 600" in said
    assert "horse" not in said


def test_killed_server_starts_again(cache: Cache) -> None:
    keeper = cache.keeper
    cache.request("PUT", KEY, b"entry")
    os.kill(keeper, signal.SIGKILL)
    assert gone(keeper)
    assert cache.status["state"] == "stopped"

    assert holds(lambda: cache.run("start").returncode == 0)  # its nginx ends with it, but not in the same moment

    assert cache.request("GET", KEY) == 200


def test_nginx_that_ends_takes_the_keeper_with_it(cache: Cache) -> None:
    keeper = cache.keeper
    os.kill(int((cache.folder / "nginx.pid").read_text()), signal.SIGKILL)
    assert gone(keeper)
    assert cache.status["state"] == "stopped"
    assert holds(lambda: cache.run("start").returncode == 0)  # its workers end too


def test_stop_does_not_touch_a_stranger(make_cache: Callable[..., Cache]) -> None:
    cache = make_cache()
    cache.start()
    cache.run("stop")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        (cache.folder / "lock").write_text(f"{stranger.pid}\n")
        assert "was not running" in cache.run("stop").stdout
        assert stranger.poll() is None
        cache.start()
        assert stranger.poll() is None
        stranger.communicate(b"\n")
    assert stranger.returncode == 0


def test_cut_upload_leaves_nothing(cache: Cache) -> None:
    with socket.create_connection(("127.0.0.1", cache.port)) as upload:
        upload.sendall(f"PUT {KEY} HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n".encode() + b"x" * 1_000_000)
        assert holds(lambda: any((cache.folder / "tmp" / "body").iterdir()))
        os.kill(cache.keeper, signal.SIGKILL)
    assert holds(lambda: cache.run("start").returncode == 0)
    assert cache.request("GET", KEY) == 404
    assert list((cache.folder / "tmp" / "body").iterdir()) == []


def test_only_entries_can_be_written(cache: Cache) -> None:
    for path in ("cas/short", "ac/../../escape", "other/" + "ab" * 32, "cas/%2e%2e/%2e%2e/escape"):
        assert cache.request("PUT", f"/{path}", b"x") in (400, 404, 405), path
    assert cache.request("PUT", KEY, b"x") == 201
    for method in ("DELETE", "MKCOL", "COPY", "MOVE"):
        assert cache.request(method, KEY, Destination="/cas/" + "cd" * 32) == 405
    assert sorted(path.name for path in cache.folder.rglob("*") if "escape" in path.name) == []


def test_bound_by_size(cache: Cache) -> None:
    cache.run("stop")
    cache.start("--max-size", "4M")
    names = [f"/cas/{number:064x}" for number in range(8)]
    for name in names[:4]:
        assert cache.request("PUT", name, os.urandom(700_000)) == 201
        os.utime(cache.folder / "content" / name[1:], (1, 1))
    assert cache.request("GET", names[0]) == 200
    assert holds(lambda: (cache.folder / "content" / names[0][1:]).stat().st_mtime > 1)

    for name in names[4:]:
        assert cache.request("PUT", name, os.urandom(700_000)) == 201

    assert holds(lambda: cache.status["used_bytes"] <= 4 << 20)
    assert [cache.request("GET", name) for name in names[:4]] == [200, 404, 404, 404]
    assert cache.request("GET", names[-1]) == 200


def test_refused_backend_leaves_the_other_as_it_was(cache: Cache) -> None:
    cache.run("stop")
    with pytest.raises(errors.PinError, match="no digest of its image is locked"):
        server.start(Place(cache.folder), Settings("bazel-remote", "127.0.0.1", cache.port, 1 << 30), None)
    assert cache.status["settings"]["backend"] == "nginx"


def test_missing_nginx_is_named(
    make_cache: Callable[..., Cache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "setpriv").symlink_to(shutil.which("setpriv"))
    cache = make_cache()
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path / "bin"))
        assert "nginx is not installed (Debian: nginx-light)" in cache.refused(CACHE)
