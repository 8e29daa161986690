"""A base whose own Python is too old, as Ubuntu 22.04's: the image with CUDA is built on it in test_cuda.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from docker import DockerClient
from tests.integration.image.conftest import Repository
from tests.integration.parts import engine as engines
from tooling.core import errors
from tooling.image import build, buildx
from tooling.image.request import Request

pytestmark = pytest.mark.full


def test_another_python_than_the_pinned_one_is_refused(
    repository: Repository, docker_engine: None, parts_folder: Path, archive: Path, engine: DockerClient,
    ask: Callable[..., Request], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make, base = buildx.make_arguments, engines.base_image("jammy", parts_folder)
    monkeypatch.setattr(buildx, "make_arguments", lambda *a, **k: make(*a, **k) | {"PYTHON_SHA256": "0" * 64})
    with pytest.raises(errors.EngineError, match="the standalone Python is not the pinned one"):
        build.run(repository.path, engine, ask("python", base_image=base, python_archive=archive))
