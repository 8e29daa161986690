"""The image with CUDA, whole, on a machine without a GPU: NVIDIA's packages are real, the base is not."""

from __future__ import annotations

import json
import re
import subprocess
from argparse import Namespace
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from docker import DockerClient
from tests.integration.image.conftest import Repository
from tests.integration.parts import engine as engines
from tooling.core import errors
from tooling.image import build

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
LARGEST = 2_000_000_000  # an upload of more has to begin again too often


@pytest.mark.stand_in("Ubuntu 22.04 made with debootstrap, a Python put together from Debian 13, no GPU")
def test_it_is_built_pushed_pulled_and_used(
    copy: Repository, archive: Path, registry: str, docker_engine: None, parts_folder: Path,
    docker: Callable[..., str],
) -> None:  # fmt: skip
    lock = copy.path / "docker" / "images.lock"
    pins = json.loads(lock.read_text())
    pins["files"]["python linux/amd64"]["sha256"] = sha256(archive.read_bytes()).hexdigest()
    lock.write_text(json.dumps(pins))
    place = ["--repo", f"{registry}/team", "--name", "cuda"]
    base = ["--base-image", engines.base_image("jammy", parts_folder), "--python-archive", str(archive)]
    run = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "some-lab/multimesh-jax"}
    answer = copy.answer(*base, *place, "--tag", "T", "--upload", "--allow-dirty", **run)
    assert answer["check"]["verdict"].startswith("ok: 3 steps")
    history = docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", answer["id"])
    layers = [(int(size), step) for size, _, step in (line.partition(" ") for line in history.splitlines())]
    assert max(layers)[0] < LARGEST
    assert [size > LARGEST // 2 for size, step in layers if "cuda.sh" in step] == [True] * 4
    pull = answer["pushed"]["image"]["pull"].split()[-1]
    docker("rmi", "--force", answer["id"])
    docker("pull", "-q", pull)
    try:
        labels = json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", pull))
        assert labels["io.github.multimesh-jax.accelerator"].startswith("cuda12 12.")
        assert labels["org.opencontainers.image.source"] == "https://github.com/some-lab/multimesh-jax"
        output = docker("run", "--rm", pull, "/opt/hardware.py")
        assert "no nvidia-smi; start with --gpus all" in output
        assert ", jax-cuda12-plugin " in output
        assert "libibverbs.so.1 loads" in output
        assert re.search(r"^NCCL +2\.\d+", output, re.MULTILINE)
        assert re.search(r"^UCX +1\.\d+.*: .*tcp$", output, re.MULTILINE)
        lines = docker("run", "--rm", pull, "cat", "/opt/inventory/licences.txt").splitlines()
        assert [line for line in lines if line.startswith("pkg:deb libucx0 ")]
        assert [line for line in lines if line.startswith("pkg:pypi nvidia-cudnn-cu12 9.")]
        assert [line for line in lines if line.startswith("pkg:generic python-build-standalone 3.13")]
        # JAX would leave the GPUs alone and say so in a line of its log.
        site = "/opt/.venv/lib/python3.13/site-packages/nvidia/cudnn/lib"
        text = f"FROM {pull}\nUSER 0\nRUN rm {site}/libcudnn.so.9\nUSER 1000\n"
        docker("build", "-q", "--tag", f"{registry}/team/cuda:bad", "-", stdin=text)
        process = copy.build("--no-build", *place, "--tag", "bad", code=errors.SmokeError.exit_code)
        assert "a plugin of JAX that cannot be used, xla_cuda12: Unable to load cuDNN" in process.stderr
    finally:
        ids = docker("image", "ls", "-q", f"{registry}/team/cuda").split()
        subprocess.run(["docker", "rmi", "--force", *ids], capture_output=True)


def test_another_python_than_the_pinned_one_is_refused(
    repository: Repository, parts_folder: Path, archive: Path, engine: DockerClient, ask: Callable[..., Namespace],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make, base = build.make_arguments, engines.base_image("jammy", parts_folder)
    monkeypatch.setattr(build, "make_arguments", lambda *a, **k: make(*a, **k) | {"PYTHON_SHA256": "0" * 64})
    with pytest.raises(errors.EngineError, match="the standalone Python is not the pinned one"):
        build.run(repository.path, engine, ask("python", base_image=base, python_archive=archive))
