"""A copy of this repository whose Dockerfile is small, and a busybox to build it from.

It asks of a builder what the real one asks (stages chosen by an argument, files of the sources, of a stage and of a
cache in a step, secrets, an ignore file) and passes the same check, in a few seconds and megabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.image.conftest import Repository, copy_repository
from tests.integration.parts import engine as engine_parts
from tests.integration.parts import packages

BASE = "localhost/multimesh-tiny-base:1"
INDEX = "http://user:hunter2-hunter2@127.0.0.1:9/simple"
_DOCKERFILE = """\
ARG BASE_IMAGE
ARG ACCELERATOR=cuda12

FROM ${BASE_IMAGE} AS python
RUN printf 'home = /usr/bin\\nversion = 3.13.5\\n' >/pyvenv.cfg

FROM scratch AS facts
COPY --from=python /pyvenv.cfg /

FROM ${BASE_IMAGE} AS tools
COPY requirements/run.txt /opt/tools/run.txt

FROM ${BASE_IMAGE} AS never
RUN echo this stage is not asked for && exit 1

FROM ${BASE_IMAGE} AS accelerator-cpu
SHELL ["/bin/sh", "-euc"]
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \\
    --mount=type=bind,source=requirements,target=/opt/requirements \\
    --mount=type=secret,id=pip.conf \\
    --mount=type=cache,id=multimesh-tiny,target=/cache \\
    cp /opt/tools/run.txt /from-a-stage.txt; \\
    cp /opt/requirements/run.txt /from-the-sources.txt; \\
    test -n "$(cat /run/secrets/pip.conf)"; \\
    mkdir -p /opt/inventory /tmp; \\
    chmod 1777 /tmp; \\
    echo stub >/opt/inventory/sbom.cdx.json; \\
    echo stub >/opt/inventory/licences.txt; \\
    echo stub >/opt/inventory/THIRD-PARTY-NOTICES

FROM accelerator-${ACCELERATOR} AS runtime
USER 1000:1000
ENTRYPOINT ["/opt/entrypoint.sh"]
COPY maxtext /opt/maxtext
COPY docker/entrypoint.sh docker/hardware.py docker/images.lock LICENSE sources.lock /opt/
COPY . /sources
"""
_JOB = '#!/bin/sh\necho "ok: ran on $(uname -m)"\n'


@pytest.fixture
def tiny(root: Path, tmp_path: Path) -> Repository:
    """The repository; it has a file that no image may hold."""
    clone = copy_repository(root, tmp_path / "tiny")
    (clone.path / "docker" / "Dockerfile").write_text(_DOCKERFILE)
    (clone.path / "maxtext" / "validate-cpu.sh").write_text(_JOB)
    (clone.path / ".env").write_text("API_TOKEN=hunter2\n")
    return clone


@pytest.fixture
def upload(tiny: Repository, registry: str, request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """Give the options of a build that is pushed, under a name of this test alone."""
    name = request.node.name.partition("[")[0].replace("_", "-")

    def options(*more: str) -> list[str]:
        place = ["--repo", f"{registry}/team", "--name", name, "--tag", "T", "--upload", "--allow-dirty", "--json"]
        return ["--accelerator", "cpu", "--base-image", BASE, *place, *more]

    return options


@pytest.fixture
def company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller whose pip has an index with a password."""
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {INDEX}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))


@pytest.fixture(scope="session")
def base() -> bytes:
    """A busybox of this machine, as a tar for ``import``."""
    return busybox(Path(packages.need("busybox", "busybox-static")))


def busybox(program: Path) -> bytes:
    """Return a tar with a busybox and links to it."""
    applets = (
        "sh",
        "cat",
        "chmod",
        "cp",
        "env",
        "find",
        "head",
        "id",
        "ls",
        "mkdir",
        "mktemp",
        "printf",
        "test",
        "uname",
    )
    files = {"bin/busybox": (program.read_bytes(), 0o755)}
    return engine_parts.archive(files, {f"bin/{name}": "busybox" for name in applets})
