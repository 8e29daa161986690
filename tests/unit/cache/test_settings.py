"""What a cache is asked to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from workflows import errors
from workflows.cache import server
from workflows.cache.server import Place, Settings

PIN = "docker.io/buchgr/bazel-remote-cache@sha256:" + "ab" * 32


def wanted(**changes: object) -> Settings:
    return Settings(**({"backend": "bazel-remote", "host": "127.0.0.1", "port": 9090, "max_bytes": 50 << 30} | changes))


def test_sizes() -> None:
    assert [server.parse_size(text) for text in ("500M", "50G", "1T")] == [500 << 20, 50 << 30, 1 << 40]
    for text in ("", "0G", "50", "50g", "-1G", "1.5G", "50G "):
        with pytest.raises(errors.UsageError, match="whole number and M, G or T"):
            server.parse_size(text)
    assert [server.shown_size(size) for size in (0, 2048, 5 << 20, 3 << 29)] == ["0 B", "2 KiB", "5 MiB", "1.5 GiB"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host": "0.0.0.0"}, "add --password-file FILE"),
        ({"host": "localhost"}, "write an address"),
        ({"port": 0}, "must be from 1"),
        ({"max_bytes": 500 << 20}, "whole GiB"),
        ({"backend": "disk", "port": 9091}, "leave out --host, --port"),
        ({"backend": "disk", "password_file": "/x"}, "leave out --host, --port, --password-file"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, object], said: str) -> None:
    wanted().check()
    wanted(backend="disk", max_bytes=500 << 20).check()
    with pytest.raises(errors.UsageError, match=said):
        wanted(**changes).check()


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [(None, 0, "does not exist"), ("correct-horse", 0o644, "chmod 600"), ("short", 0o600, "8 to 128 letters")],
)
def test_password_file_that_is_refused(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    file = tmp_path / "password"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(errors.UsageError, match=said) as refused:
        server.read_password(str(file))
    assert text is None or text not in str(refused.value)


def test_metrics_of_bazel_remote() -> None:
    text = """\
# HELP bazel_remote_incoming_requests_total The number of incoming cache requests
# TYPE bazel_remote_incoming_requests_total counter
bazel_remote_incoming_requests_total{kind="ac",method="get",status="hit"} 41
bazel_remote_incoming_requests_total{kind="ac",method="get",status="miss"} 9
bazel_remote_incoming_requests_total{kind="cas",method="get",status="hit"} 1e+06
bazel_remote_incoming_requests_total{kind="cas",method="contains",status="miss"} 3
"""
    assert server.parse_metrics(text) == server.Hits(41, 9)
    assert str(server.Hits(41, 9)) == "41 of 50 actions found (82%)"


def test_rc_says_where_the_cache_is_and_what_it_may_take() -> None:
    assert server.remote_rc("127.0.0.1:1", None, write=True).splitlines()[0] == (
        "build --remote_cache=http://127.0.0.1:1"
    )
    shown = server.remote_rc("127.0.0.1:1", "s3cret-word", write=False)
    assert "multimesh:s3cret-word@" in shown
    assert "--remote_upload_local_results=false" in shown
    assert server.disk_rc(Path("/c"), 5 << 30).splitlines() == [
        "build --disk_cache=/c",
        "build --experimental_disk_cache_gc_max_size=5120M",
    ]


def test_default_place_follows_xdg() -> None:
    assert server.default_place({"XDG_CACHE_HOME": "/var/x"}).root == Path("/var/x/multimesh-jax/bazel")
    assert server.default_place({}).root == Path.home() / ".cache/multimesh-jax/bazel"


@pytest.mark.parametrize("pin", [None, "buchgr/bazel-remote-cache:latest", PIN[:-1]])
def test_bazel_remote_without_a_digest_is_refused(tmp_path: Path, pin: str | None) -> None:
    with pytest.raises(errors.PinError, match="use --backend disk"):
        server.start(Place(tmp_path), wanted(), pin)
    assert server.status(Place(tmp_path)).settings is None
