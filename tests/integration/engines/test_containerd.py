"""An engine that keeps its images in containerd: it names them by their manifest, and pushes them as they are."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.image.conftest import copy_repository
from tests.integration.parts import engine as engines

BASE = "localhost/multimesh-tiny-base:1"
# As the real one it shows a step files and a secret, makes a file at the time of the build, and passes the same check.
DOCKERFILE = """\
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS runtime
RUN --mount=type=bind,source=requirements,target=/opt/locks --mount=type=secret,id=pip.conf \\
    cat /opt/locks/run.txt /run/secrets/pip.conf | head -n 1 >/first
COPY . /sources
USER 1000:1000
ENTRYPOINT ["/opt/entrypoint.sh"]
"""


@pytest.mark.full
@pytest.mark.stand_in("a Dockerfile of the same features, and a registry on this machine")
def test_two_builds_of_a_commit_have_one_digest(
    root: Path, registry: str, docker: Callable[..., str], parts_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tiny = copy_repository(root, tmp_path / "tiny")
    (tiny.path / "docker" / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "pip.conf").write_text("[global]\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    (parts_folder / "store").mkdir()
    with engines.with_containerd_store(parts_folder / "store") as host:
        engines.with_buildx(parts_folder / "store")
        monkeypatch.setenv("DOCKER_HOST", host)
        content = engines.archive(*engines.checkable("echo ok: ran"))
        subprocess.run(["docker", "import", "-", BASE], input=content, check=True, capture_output=True)
        options = ["--accelerator", "cpu", "--base-image", BASE, "--repo", f"{registry}/team/tiny", "--tag", "T"]
        options += ["--no-docker-build-cache", "--upload", "--allow-dirty"]
        first, second = (tiny.answer(*options) for _ in range(2))
        assert first["check"]["verdict"] == "ok: ran"
        assert first["id"] == second["id"]
        image = second["pushed"]["image"]
        assert image["tags"] == [{"tag": "T", "before": image["digest"], "digest": image["digest"]}]
        pull = image["pull"].split()[-1]
        docker("rmi", "--force", first["id"])
        docker("pull", pull)
        assert docker("run", "--rm", "--network", "none", pull, "cat", "/first").startswith("absl-py==")
