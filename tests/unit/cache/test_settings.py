"""What a cache is asked to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from workflows import errors
from workflows.cache import bazel_remote, nginx, settings, usage
from workflows.cache.settings import Place, Settings

PIN = "docker.io/buchgr/bazel-remote-cache@sha256:" + "ab" * 32


def wanted(**changes: object) -> Settings:
    return Settings(**({"backend": "bazel-remote", "host": "127.0.0.1", "port": 9090, "max_bytes": 50 << 30} | changes))


def test_sizes() -> None:
    assert [settings.parse_size(text) for text in ("500M", "50G", "1T")] == [500 << 20, 50 << 30, 1 << 40]
    for text in ("", "0G", "50", "50g", "-1G", "1.5G", "50G "):
        with pytest.raises(errors.UsageError, match="whole number and M, G or T"):
            settings.parse_size(text)
    assert [settings.shown_size(size) for size in (0, 2048, 5 << 20, 3 << 29)] == ["0 B", "2 KiB", "5 MiB", "1.5 GiB"]


def test_bazel_remote_runs_confined_on_loopback_and_sees_no_secret(tmp_path: Path) -> None:
    place = Place(tmp_path)
    argv = bazel_remote.run_argv(place, wanted(password_file="/etc/password"), PIN)
    assert "127.0.0.1:9090:8080" in argv
    assert argv[argv.index(PIN) :] == [
        PIN,
        "--max_size",
        "50",
        "--enable_endpoint_metrics",
        "--htpasswd_file",
        "/htpasswd",
    ]
    assert {"--read-only", "no-new-privileges"} <= set(argv)
    assert not any("/etc/password" in word for word in argv)


@pytest.mark.parametrize("pin", [None, "buchgr/bazel-remote-cache:latest", PIN[:-1]])
def test_bazel_remote_without_a_digest_is_refused(tmp_path: Path, pin: str | None) -> None:
    with pytest.raises(errors.PinError, match="use --backend nginx"):
        bazel_remote.start(Place(tmp_path), wanted(), None, pin)


def test_bazel_remote_counts_whole_gibibytes() -> None:
    wanted().check()
    with pytest.raises(errors.UsageError, match="whole GiB"):
        wanted(max_bytes=500 << 20).check()


def test_metrics_of_bazel_remote() -> None:
    text = """\
# HELP bazel_remote_incoming_requests_total The number of incoming cache requests
# TYPE bazel_remote_incoming_requests_total counter
bazel_remote_incoming_requests_total{kind="ac",method="get",status="hit"} 41
bazel_remote_incoming_requests_total{kind="ac",method="get",status="miss"} 9
bazel_remote_incoming_requests_total{kind="cas",method="get",status="hit"} 1e+06
bazel_remote_incoming_requests_total{kind="cas",method="contains",status="miss"} 3
"""
    assert bazel_remote.parse_metrics(text) == usage.Hits(41, 9)
    assert str(usage.Hits(41, 9)) == "41 of 50 actions found (82%)"


def test_log_is_read_once_and_only_in_whole_lines(tmp_path: Path) -> None:
    key, log = "0f" * 32, tmp_path / "requests.log"
    reader = usage.LogReader(log)
    assert list(reader.new()) == []
    log.write_text(f"200 GET /ac/{key}\n404 GET /ac/{key}\n200 GET /cas/{key}\n404 GET /favicon.ico\n201 PU")
    assert usage.count(reader.new()) == usage.Hits(1, 1)
    log.write_text(log.read_text() + f"T /ac/{key}\n")
    assert list(reader.new()) == [usage.Request(201, "PUT", "ac", key)]
    log.write_text(f"200 GET /ac/{key}\n")  # the server began a new one
    assert usage.count(reader.new()) == usage.Hits(1, 0)
    assert list(usage.LogReader(log, from_now=True).new()) == []


def test_rc_holds_the_password_and_nginx_only_a_salted_hash() -> None:
    assert (
        settings.bazelrc("127.0.0.1:1", None, write=True).splitlines()[0] == "build --remote_cache=http://127.0.0.1:1"
    )
    shown = settings.bazelrc("127.0.0.1:1", "s3cret-word", write=False)
    assert "multimesh:s3cret-word@" in shown
    assert "--remote_upload_local_results=false" in shown
    assert nginx.salted("s3cret-word") != nginx.salted("s3cret-word")
    assert "s3cret" not in nginx.salted("s3cret-word")


def test_default_place_follows_xdg() -> None:
    assert settings.default_place({"XDG_CACHE_HOME": "/var/x"}).root == Path("/var/x/multimesh-jax/bazel")
    assert settings.default_place({}).root == Path.home() / ".cache/multimesh-jax/bazel"
