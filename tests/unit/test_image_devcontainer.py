"""What ``devcontainer.json`` becomes when a pin moves."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from tooling.core import errors
from tooling.image import digests


@pytest.fixture
def text(root: Path) -> str:
    return (root / digests.DEVCONTAINER).read_text(encoding="utf-8")


def test_it_follows_the_lock_and_keeps_its_comments(root: Path, text: str, tmp_path: Path) -> None:
    held = digests.load(root)
    path = tmp_path / digests.DEVCONTAINER
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    digests.follow(tmp_path, held)
    assert path.read_text(encoding="utf-8") == text

    base = held.images["cuda-devel"]._replace(digest="sha256:" + "34" * 32)
    digests.follow(tmp_path, held._replace(images=held.images | {"cuda-devel": base}))
    pairs = zip(text.splitlines(), path.read_text(encoding="utf-8").splitlines(), strict=True)
    assert [(after.strip()) for before, after in pairs if before != after] == [f'"BASE_IMAGE": "{base.exact}",']

    path.write_text(text.replace('"PYTHON_URL"', '"PYTHON"'), encoding="utf-8")
    with pytest.raises(errors.ManifestError, match='has 0 lines "PYTHON_URL"'):
        digests.follow(tmp_path, held)


@pytest.mark.parametrize("runs", [False, True])
def test_a_container_trusts_no_stranger_at_the_port_of_the_cache(root: Path, tmp_path: Path, runs: bool) -> None:
    """Whatever listens on this machine, Bazel gets what ``start-cache.sh`` wrote: an address with its password."""
    caches = tmp_path / "caches"
    (caches / "bazel").mkdir(parents=True)
    if runs:
        (caches / "bazel" / "reading.bazelrc").write_text("build --remote_cache=http://multimesh:x@127.0.0.1:1\n")
    script = (root / ".devcontainer" / "start.sh").read_text(encoding="utf-8").replace("/caches", str(caches))
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        script = script.replace("9090", str(stranger.getsockname()[1]))
        for _ in range(2):
            done = subprocess.run(
                ["bash", "-c", script],
                env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                check=True,
            )
    assert done.stdout.startswith("Bazel reads the remote cache" if runs else "no remote Bazel cache")
    assert (tmp_path / ".bazelrc").read_text() == f"try-import {caches}/remote.bazelrc\n"
    written = (caches / "remote.bazelrc").read_text()
    assert "remote_cache" not in written
    assert f"try-import {caches}/bazel/reading.bazelrc\n" in written
