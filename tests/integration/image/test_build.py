"""One image, built and checked for real on a minimal Debian in place of the CUDA base, and what changes rebuild."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docker import DockerClient
from tests.integration.image.conftest import CPU, NAME, Repository
from tests.repositories import git
from tooling.core import errors
from tooling.image import build
from tooling.image import engine as engines

Docker = Callable[..., str]
Asks = Callable[..., Namespace]
pytestmark = pytest.mark.stand_in("a debootstrapped Debian 13 in place of the CUDA base")


def layers(docker: Docker, image: str) -> list[str]:
    return list(json.loads(docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", image)))


def test_an_image_is_built_checked_and_named(image: dict[str, Any], docker: Docker) -> None:
    assert image["image"] == f"{NAME}:T"
    assert docker("image", "inspect", "--format", "{{.Id}}", f"{NAME}:T") == image["id"]
    assert image["check"]["job"] == "small"
    assert image["check"]["verdict"].startswith("ok: 3 steps")
    assert image["bytes"] == int(docker("image", "inspect", "--format", "{{.Size}}", f"{NAME}:T"))


def test_it_runs_as_a_user_and_holds_only_what_runs(image: dict[str, Any], docker: Docker) -> None:
    assert docker("run", "--rm", image["id"], "id", "-u") == "1000"
    find = ("--user", "0", "--entrypoint", "find", image["id"], "/", "-xdev", "-type", "f")
    paths = docker("run", "--rm", *find).splitlines()
    names = {Path(path).name for path in paths}
    assert not names & {"gcc", "cc", "g++", "clang", "nvcc", "ld", "make", "bazel", "pip.conf", ".netrc"}
    assert not [path for path in paths if "/.cache/" in path or path.startswith(("/var/lib/apt/lists", "/run/secrets"))]


def test_labels_say_where_it_comes_from(image: dict[str, Any], docker: Docker, repository: Repository) -> None:
    labels = json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", image["id"]))
    assert labels["org.opencontainers.image.revision"] == git(repository.path, "rev-parse", "HEAD")
    assert labels["io.github.multimesh-jax.python"].startswith("of the base, or standalone sha256:")
    assert labels["org.opencontainers.image.base.digest"] == "unpinned"
    inside = docker("run", "--rm", image["id"], "python3", "-c", "import jax; print(jax.__version__)")
    assert labels["io.github.multimesh-jax.jax"] == inside


def test_the_inventory_names_every_package(image: dict[str, Any], docker: Docker) -> None:
    sbom = json.loads(docker("run", "--rm", image["id"], "cat", "/opt/inventory/sbom.cdx.json"))
    ask = "import importlib.metadata as m, json; d = m.distributions(); "
    ask += "print(json.dumps([[dist.metadata['Name'], dist.version] for dist in d]))"
    packages = {tuple(pair) for pair in json.loads(docker("run", "--rm", image["id"], "python3", "-c", ask))}
    inventory = {(part["name"], part["version"]) for part in sbom["components"] if part["purl"].startswith("pkg:pypi/")}
    assert inventory == packages
    assert {"jax", "multimesh-jax"} <= {name for name, _ in inventory}
    licences = docker("run", "--rm", image["id"], "cat", "/opt/inventory/licences.txt").splitlines()
    assert len(licences) == len(sbom["components"])
    assert not [line for line in licences if line.endswith("not declared")]
    assert [part for part in sbom["components"] if part["purl"].startswith("pkg:deb/debian/libc6@")]
    notices = docker("run", "--rm", image["id"], "cat", "/opt/inventory/THIRD-PARTY-NOTICES")
    assert "\njaxlib-" in notices
    assert "Apache License" in notices


def test_it_says_what_hardware_it_finds(image: dict[str, Any]) -> None:
    run = ["docker", "run", "--rm", "--env", "MULTIMESH_HARDWARE=1", image["id"], "echo", "and then"]
    process = subprocess.run(run, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "and then\n")
    titles = {line[:12].strip() for line in process.stderr.splitlines()} - {""}
    assert titles == {"GPUs", "packages", "NCCL", "verbs", "UCX", "InfiniBand", "container", "JAX sees"}
    assert all(line[12:].strip() for line in process.stderr.splitlines())
    assert "no nvidia-smi; start with --gpus all" in process.stderr
    assert "JAX sees    cpu 0" in process.stderr


@pytest.mark.parametrize(
    ("flags", "last"),
    [(["--dry-run"], '#   dtype: "float32"'), pytest.param([], "ok: 3 steps", marks=pytest.mark.full)],
    ids=["as far as its job", "to its end"],
)
def test_the_documented_docker_run_line_is_anybodys(
    image: dict[str, Any], docker: Docker, repository: Repository, flags: list[str], last: str
) -> None:
    """With the scripts of a folder, by a user whom the image does not know. The check trained by the same script."""
    scripts = repository.path / "docker" / "workspace" / "maxtext-scripts"
    mount = f"type=bind,source={scripts},target=/workspace,readonly"
    options = ["--entrypoint", "/opt/entrypoint.sh", "--mount", mount, "-w", "/workspace", "--user", "12345:12345"]
    lines = docker("run", "--rm", *options, image["image"], "./validate-cpu.sh", *flags).splitlines()
    assert lines[-1].startswith(last)


def test_a_rebuild_without_changes_does_nothing(image: dict[str, Any], repository: Repository, trixie: str) -> None:
    for options in (("--base-image", trixie), ("--no-build",)):
        answer = repository.answer(*CPU, "--tag", "T", *options)
        assert (answer["id"], answer["check"]) == (image["id"], image["check"])
    process = repository.build(*CPU, "--no-build", "--tag", "never-built", code=errors.EngineError.exit_code)
    assert f"{NAME}:never-built" in process.stderr


@pytest.mark.parametrize(
    ("package", "folder", "last"),
    [
        ("multimesh", "multimesh/src", 1),
        # It, the launcher, the files of /opt, the inventory, the planner, numerics, MultiMesh.
        ("maxtext", "third_party/maxtext/src", 7),
    ],
)
def test_a_change_of_a_package_rebuilds_the_layers_from_there_on(
    image: dict[str, Any], copy: Repository, engine: DockerClient, docker: Docker, ask: Asks,
    package: str, folder: str, last: int,
) -> None:  # fmt: skip
    file = copy.path / folder / package / "__init__.py"
    file.write_text(file.read_text(encoding="utf-8") + "\nA_LINE = 1\n", encoding="utf-8")
    built = build.run(copy.path, engine, ask("runtime"))
    before, after = layers(docker, image["id"]), layers(docker, built.id)
    assert (before[:-last], before[-last] == after[-last]) == (after[:-last], False)
    label = "io.github.multimesh-jax.maxtext.revision" if package == "maxtext" else "org.opencontainers.image.revision"
    assert built.labels[label].endswith("-dirty")
    assert docker("run", "--rm", built.id, "python3", "-c", f"import {package}; print({package}.A_LINE)") == "1"


def test_an_image_that_breaks_its_promise_gets_no_name(
    image: dict[str, Any], repository: Repository, docker: Docker
) -> None:
    text = f"FROM {image['image']}\nUSER 0\nRUN cp /bin/true /usr/bin/gcc && echo s >/etc/pip.conf\n"
    text += "RUN touch /srv/libcublasLt.so.12\nENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/srv\n"
    # As JAX's plugin for CUDA says that a library is older than its table of versions allows.
    text += "WORKDIR /opt/.venv/lib/python3.13/site-packages\n"
    text += "RUN echo 'def initialize(): raise RuntimeError(\"Outdated cuDNN\")' >old.py && mkdir old-1.dist-info && "
    text += "echo 'Name: old' >old-1.dist-info/METADATA && echo '[jax_plugins]' >old-1.dist-info/entry_points.txt && "
    text += "echo 'cuda = old' >>old-1.dist-info/entry_points.txt\nUSER 1000\n"
    docker("build", "-q", "--tag", f"{NAME}:bad", "-", stdin=text)
    process = repository.build(*CPU, "--no-build", "--tag", "bad", "--latest", code=errors.SmokeError.exit_code)
    for fault in ("/usr/bin/gcc", "/etc/pip.conf", "CUDA of another than JAX's own, in /srv of LD_LIBRARY_PATH",
                  "a plugin of JAX that cannot be used, cuda: Outdated cuDNN"):  # fmt: skip
        assert fault in process.stderr
    assert docker("image", "ls", "-q", f"{NAME}:latest") == ""


def test_an_image_of_root_or_with_a_label_that_is_not_true_is_refused(
    image: dict[str, Any], repository: Repository, engine: DockerClient, docker: Docker
) -> None:
    label = 'LABEL io.github.multimesh-jax.python="standalone sha256:12"'
    for line, job, fault in (
        ("USER 0", "small", "runs as root"),
        (label, "none", "the Python of its base, and the label names the standalone one"),
    ):
        other = docker("build", "-q", "-", stdin=f"FROM {image['image']}\n{line}\n")
        with pytest.raises(errors.SmokeError, match=fault):
            engines.check(repository.path, engine.images.get(other), "runtime", job)
