"""Pins of ``devcontainer.json``, and what a container trusts."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest

from tooling.image import reference

DEVCONTAINER = ".devcontainer/devcontainer.json"


def test_it_has_the_pins_of_the_lock_and_renovate_reads_both(root: Path) -> None:
    lock, text = reference.load_lock(root), (root / DEVCONTAINER).read_text(encoding="utf-8")
    base, python = lock.images["cuda-devel"], lock.files["python linux/amd64"]
    for name, value in (("BASE_IMAGE", base.exact), ("PYTHON_URL", python["url"]), ("PYTHON_SHA256", python["sha256"])):
        assert f'"{name}": "{value}"' in text
    [manager] = json.loads((root / "renovate.json").read_text(encoding="utf-8"))["customManagers"]
    matches = []
    for file in (reference.LOCK, DEVCONTAINER):
        assert [pattern for pattern in manager["managerFilePatterns"] if re.search(pattern.strip("/"), file)]
        for pattern in manager["matchStrings"]:
            in_python = pattern.replace("(?<", "(?P<")
            matches += re.finditer(in_python, (root / file).read_text(encoding="utf-8"))
    names = ["{depName}:{currentValue}@{currentDigest}".format(**match.groupdict()) for match in matches]
    assert names == [*(pin.exact for pin in lock.images.values()), base.exact]


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
