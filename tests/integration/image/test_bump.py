"""``bump images`` against a registry on this machine that gets a newer base image, and beside one that is not there."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.parts import registry as registries
from tooling.ci import bump
from tooling.image import digests

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def repository(root: Path, tmp_path: Path, registry: str) -> Path:
    """Only what a bump touches: two bases in the registry, all else where nothing listens."""
    text = (root / digests.FILE).read_text(encoding="utf-8").replace("https://github.com", f"https://{NOWHERE}")
    raw = json.loads(text)
    for name in raw["images"]:
        there = registry if name in ("cuda-devel", "ubuntu") else NOWHERE
        raw["images"][name] = {"reference": f"{there}/{name}:1", "digest": None}
    (tmp_path / digests.FILE).parent.mkdir()
    (tmp_path / digests.FILE).write_text(json.dumps(raw), encoding="utf-8")
    (tmp_path / ".devcontainer").mkdir()
    shutil.copy(root / digests.DEVCONTAINER, tmp_path / digests.DEVCONTAINER)
    return tmp_path


@pytest.mark.stand_in("a registry on this machine")
def test_a_newer_base_image(repository: Path, registry: str, trixie: str) -> None:
    first = {name: registries.push(trixie, f"{registry}/{name}:1") for name in ("cuda-devel", "ubuntu")}
    answers = {answer.name: answer for answer in bump.images(repository)}
    assert {name: move.new for name, move in answers.items() if not move.fault} == first
    assert answers.keys() - first == {"cuda-base", "bazel-remote"}
    assert NOWHERE in str(answers["cuda-base"].fault)

    second = registries.push(registries.labelled(trixie, {"built": "later"}), f"{registry}/cuda-devel:1")
    answers = {answer.name: answer for answer in bump.images(repository)}
    assert answers["ubuntu"].new == answers["ubuntu"].old == first["ubuntu"]
    assert (answers["cuda-devel"].old, answers["cuda-devel"].new) == (first["cuda-devel"], second)
    held = digests.load(repository)
    assert held.images["cuda-devel"].digest == second
    assert held.images["cuda-base"].digest is None  # nobody said
    text = (repository / digests.DEVCONTAINER).read_text(encoding="utf-8")
    assert f'"BASE_IMAGE": "{registry}/cuda-devel:1@{second}"' in text
    # The name that is written pulls.
    subprocess.run(["docker", "pull", "-q", held.images["cuda-devel"].exact], check=True, capture_output=True)
