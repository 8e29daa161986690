"""What a cache is asked to be."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tooling import cli
from tooling.core import errors
from tooling.image import bazel_cache
from tooling.image.bazel_cache import Cache, Server, Settings
from tooling.image.digests import ImagePin

WANTED = Settings("127.0.0.1", 9090, 50)


def test_sizes() -> None:
    assert [bazel_cache.gib(text) for text in ("50G", "1T")] == [50, 1024]
    for text in ("", "0G", "50", "50g", "-1G", "1.5G", "50G ", "500M"):
        with pytest.raises(argparse.ArgumentTypeError, match="whole number and G or T"):
            bazel_cache.gib(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "localhost"], "argument --host: invalid ip_address value: 'localhost'"),
        (["--port", "0"], "argument --port: 0: must be from 1 to 65535"),
        (["--port", "70000"], "argument --port: 70000: must be from 1 to 65535"),
        (["--max-size", "5"], "argument --max-size: '5': write a whole number and G or T, e.g. 50G"),
    ],
)
def test_settings_that_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.parse(["cache", *options])
    assert refused.value.code == errors.UsageError.exit_code
    assert capsys.readouterr().err.splitlines()[-1] == f"docker/start-cache.sh: error: {said}"


def test_settings_that_are_taken() -> None:
    args = cli.parse(["cache", "--host", "0.0.0.0", "--port", "1"])
    assert (str(args.host), args.port, args.max_size) == ("0.0.0.0", 1, 50)
    assert Settings(str(args.host), args.port, args.max_size).address == "127.0.0.1:1"
    assert Settings("::1", 2, 50).address == "[::1]:2"


def test_a_password_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    first = Cache(tmp_path).password()
    assert first == Cache(tmp_path).password()
    assert len(first) >= 24
    file = tmp_path / "password"
    assert file.stat().st_mode & 0o077 == 0
    file.chmod(0o644)
    with pytest.raises(errors.UsageError, match="chmod 600"):
        Cache(tmp_path).password()


def test_rc_says_where_the_cache_is_and_what_it_may_take(tmp_path: Path) -> None:
    rc = tmp_path / "rc"
    Server("127.0.0.1:1", None).write_rc(rc, write=True)
    assert rc.read_text().splitlines()[0] == "build --remote_cache=http://127.0.0.1:1"
    Server("127.0.0.1:1", "s3cret-word").write_rc(rc, write=False)
    assert "multimesh:s3cret-word@" in rc.read_text()
    assert "--remote_upload_local_results=false" in rc.read_text()


def test_default_folder_follows_xdg() -> None:
    assert bazel_cache.default({"XDG_CACHE_HOME": "/var/x"}).folder == Path("/var/x/multimesh-jax/bazel")
    assert bazel_cache.default({}).folder == Path.home() / ".cache/multimesh-jax/bazel"


def test_another_address_gets_no_password(tmp_path: Path) -> None:
    assert bazel_cache.find_server("127.0.0.1:9", Cache(tmp_path)) == Server("127.0.0.1:9", None)
    assert bazel_cache.find_server(None, Cache(tmp_path)) is None


def test_bazel_remote_without_a_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.PinError, match="no digest of its image is locked"):
        Cache(tmp_path).start(WANTED, ImagePin("docker.io/buchgr/bazel-remote-cache:latest", None))
    assert Cache(tmp_path).look() == (None, "stopped")
