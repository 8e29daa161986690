"""What a cache is asked to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tooling.core import errors
from tooling.image import bazel_cache
from tooling.image.bazel_cache import Place, Settings

PIN = "docker.io/buchgr/bazel-remote-cache@sha256:" + "ab" * 32


def wanted(**changes: object) -> Settings:
    return Settings(**({"host": "127.0.0.1", "port": 9090, "grpc_port": 9092, "max_gib": 50} | changes))


def test_sizes() -> None:
    assert [bazel_cache.parse_size(text) for text in ("50G", "1T")] == [50, 1024]
    for text in ("", "0G", "50", "50g", "-1G", "1.5G", "50G ", "500M"):
        with pytest.raises(errors.UsageError, match="whole number and G or T"):
            bazel_cache.parse_size(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host": "localhost"}, "write an address"),
        ({"port": 0}, "--port 0"),
        ({"grpc_port": 70000}, "--grpc-port 70000"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, object], said: str) -> None:
    wanted().check()
    wanted(host="0.0.0.0").check()
    with pytest.raises(errors.UsageError, match=said):
        wanted(**changes).check()


def test_a_password_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    first = Place(tmp_path).password()
    assert first == Place(tmp_path).password()
    assert len(first) >= 24
    file = tmp_path / "password"
    assert file.stat().st_mode & 0o077 == 0
    file.write_text("short")
    with pytest.raises(errors.UsageError, match="8 to 128 letters") as refused:
        Place(tmp_path).password()
    assert "short" not in str(refused.value)
    file.chmod(0o644)
    with pytest.raises(errors.UsageError, match="chmod 600"):
        Place(tmp_path).password()


def test_rc_says_where_the_cache_is_and_what_it_may_take() -> None:
    assert bazel_cache.remote_rc("127.0.0.1:1", None, write=True).splitlines()[0] == (
        "build --remote_cache=http://127.0.0.1:1"
    )
    shown = bazel_cache.remote_rc("127.0.0.1:1", "s3cret-word", write=False)
    assert "multimesh:s3cret-word@" in shown
    assert "--remote_upload_local_results=false" in shown


def test_default_place_follows_xdg() -> None:
    assert bazel_cache.default_place({"XDG_CACHE_HOME": "/var/x"}).root == Path("/var/x/multimesh-jax/bazel")
    assert bazel_cache.default_place({}).root == Path.home() / ".cache/multimesh-jax/bazel"


def test_another_address_gets_no_password(tmp_path: Path) -> None:
    found = bazel_cache.find("127.0.0.1:9", Place(tmp_path))
    assert found == bazel_cache.Cache("127.0.0.1:9", None)
    assert bazel_cache.find(None, Place(tmp_path)) is None


@pytest.mark.parametrize("pin", [None, "buchgr/bazel-remote-cache:latest", PIN[:-1]])
def test_bazel_remote_without_a_digest_is_refused(tmp_path: Path, pin: str | None) -> None:
    with pytest.raises(errors.PinError, match="no digest of its image is locked"):
        bazel_cache.start(Place(tmp_path), wanted(), pin)
    assert bazel_cache.status(Place(tmp_path)).settings is None
