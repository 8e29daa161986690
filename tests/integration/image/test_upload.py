"""The real image on its whole way: built, checked, pushed, pulled by digest, and at work."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.image.conftest import NAME, Repository
from tests.integration.parts import packages
from tooling.image.reference import make


@pytest.mark.stand_in("a debootstrapped Debian 13 for the CUDA base, and a registry on this machine")
def test_from_the_build_to_a_pulled_image(
    image: dict[str, Any], repository: Repository, registry: str, docker: Callable[..., str], tmp_path: Path
) -> None:
    target = make(f"{registry}/team", "multimesh-jax", "T")
    docker("tag", f"{NAME}:T", str(target))
    options = ["--accelerator", "cpu", "--repo", f"{registry}/team", "--name", "multimesh-jax", "--tag", "T"]
    record = tmp_path / "release.json"

    done = repository.build(
        *options, "--no-build", "--upload", "--allow-dirty", "--json", "--release-file", str(record)
    )

    document = json.loads(record.read_text())
    assert json.loads(done.stdout)["pushed"] == document
    assert document["image"]["id"] == image["id"]
    assert document["check"]["verdict"].startswith("ok: 3 steps")
    assert document["labels"] == image["labels"]
    digest = document["image"]["digest"]
    skopeo = [packages.need("skopeo", "skopeo"), "inspect", "--tls-verify=false", f"docker://{target.tagged('T')}"]
    assert json.loads(subprocess.run(skopeo, capture_output=True, check=True).stdout)["Digest"] == digest
    docker("rmi", "--force", str(target))
    docker("pull", target.at(digest))
    ran = docker(
        "run", "--rm", "--network", "none", target.at(digest), "python3", "-c", "import multimesh, maxtext; print(7)"
    )
    assert ran == "7"
    docker("rmi", "--force", target.at(digest))
