"""The settings of a cache, and its password."""

from __future__ import annotations

from pathlib import Path

import pytest

from tooling import cli
from tooling.core import errors
from tooling.image import bazel_cache, build, pipeline
from tooling.image.reference import ImagePin


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--port", "70000"], "argument --port: '70000' is no port; give a number from 1 to 65535"),
        *(
            ([f"--max-size={size}"], f"argument --max-size: '{size}': write a whole number and G or T, e.g. 50G")
            for size in ("", "0G", "50", "50g", "-1G", "1.5G", "50G ", "500M")
        ),
    ],
)
def test_settings(options: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert [cli.parse(["cache", "--max-size", size]).max_size for size in ("50G", "1T")] == [50, 1024]
    with pytest.raises(SystemExit) as info:
        cli.parse(["cache", *options])
    assert info.value.code == errors.OptionError.exit_code
    assert capsys.readouterr().err.splitlines()[-1] == f"docker/start-cache.sh: error: {line}"


def test_another_address_gets_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    options = build.reach_cache(pipeline.parse(["--bazel-cache", "r.example:9"]), tmp_path)
    assert options == ["--secret", f'id=bazelrc,"src={tmp_path}/bazelrc"']
    lines = (tmp_path / "bazelrc").read_text().splitlines()
    assert lines[:2] == ["build --remote_cache=http://r.example:9", "build --remote_timeout=15"]
    assert build.reach_cache(pipeline.parse([]), tmp_path) == []


def test_bazel_remote_without_a_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.SourceError, match="no digest of its image is locked"):
        bazel_cache.start(tmp_path, 9090, 50, ImagePin("docker.io/buchgr/bazel-remote-cache:latest", None))
    assert bazel_cache.look(tmp_path) == ""


def test_a_stop_that_fails_keeps_the_options_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its container ran on, and nobody could use it."""
    (tmp_path / "bazelrc").write_text("build\n")
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/no-such.sock")
    with pytest.raises(errors.EngineError, match="no engine answers"):
        bazel_cache.stop(tmp_path)
    assert (tmp_path / "bazelrc").exists()
