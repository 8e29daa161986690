"""The devcontainer by its real command line against the real engine; a Debian base stands for the CUDA image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stand_ins import ROOT, git

from tests.integration.parts import packages
from tests.integration.parts import registry as registries
from workflows.image import devcontainer, digests

CLI = "@devcontainers/cli@0.89.0"
USER = 1000  # of the image


def read(path: Path) -> dict[str, Any]:
    """Read JSON with comments of their own lines."""
    return json.loads(re.sub(r"^\s*//.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_it_is_built_from_the_pinned_images() -> None:
    assert read(ROOT / devcontainer.FILE)["build"]["args"] == devcontainer.arguments(digests.load(ROOT))


def test_it_asks_for_nothing_that_a_laptop_lacks() -> None:
    config = read(ROOT / ".devcontainer" / "devcontainer.json")
    assert config["hostRequirements"] == {"gpu": "optional"}
    assert not [arg for arg in config["runArgs"] if re.search(r"gpus|cap-add|privileged=|SYS_ADMIN", arg)]
    assert "privileged" not in config


def test_every_folder_and_command_of_the_workspace_exists() -> None:
    workspace = read(ROOT / "multimesh-jax.code-workspace")
    fetched = {"third_party/maxtext", "third_party/jax", "third_party/xla"}
    assert {each["name"] for each in workspace["folders"]} >= {"multimesh", "maxtext", "jax", "xla", "workflows"}
    assert all((ROOT / each["path"]).is_dir() for each in workspace["folders"] if each["path"] not in fetched)
    commands = {task["command"] for task in workspace["tasks"]["tasks"]}
    assert all((ROOT / command).is_file() for command in commands if not command.startswith(".venv/"))


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.stand_in("scripts in place of jax, xla and Bazel")
@pytest.mark.parametrize("place", [".", "build"])  # where jax's program leaves the Bazel that it brings
def test_native(tmp_path: Path, place: str) -> None:
    script = tmp_path / ".devcontainer" / "native.sh"
    executable(script, (ROOT / ".devcontainer" / "native.sh").read_text())
    tools = tmp_path / "bin"  # and no bazel, which this machine may have
    tools.mkdir()
    for name, program in (
        ("python3", sys.executable),
        *((name, shutil.which(name)) for name in ("bash", "dirname", "find")),
    ):
        (tools / name).symlink_to(Path(program or name).resolve())

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([script], cwd="/", env={"PATH": str(tools)}, capture_output=True, text=True)

    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "./bootstrap.sh --group source brings them" in done.stderr

    jax, xla = tmp_path / "third_party" / "jax", tmp_path / "third_party" / "xla"
    executable(jax / "build" / "build.py", "import sys\nopen('asked', 'w').write(' '.join(sys.argv[1:]))\n")
    tool = "import sys\nopen('compile_commands.json', 'w').write(sys.stdin.read())\n"
    executable(xla / "build_tools" / "lint" / "generate_compile_commands.py", tool)
    done = run()
    assert done.returncode == 11
    assert "error: bazel: not on PATH" in done.stderr
    assert (jax / "asked").read_text() == f"build --wheels=jaxlib --local_xla_path={xla}"

    executable(jax / place / "bazel-7.7.0-linux-x86_64", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    assert run().returncode == 0
    asked = (xla / "compile_commands.json").read_text().splitlines()
    assert asked == ["aquery", "mnemonic(CppCompile, //xla/...)", "--output=jsonproto"]


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    npm = [
        packages.need("npm", "npm"),
        "install",
        "--silent",
        "--no-audit",
        "--ignore-scripts",
        "--prefix",
        folder,
        CLI,
    ]
    subprocess.run(npm, check=True)
    return folder / "node_modules" / ".bin" / "devcontainer"


@dataclass(frozen=True)
class Laptop:
    """A clone and an empty home, and the devcontainer's command line in them."""

    cli: Path
    clone: Path
    environ: dict[str, str]

    def call(self, verb: str, *args: str) -> subprocess.CompletedProcess[str]:
        argv = [str(self.cli), verb, "--workspace-folder", str(self.clone), *args]
        done = subprocess.run(argv, env=self.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done


@pytest.fixture
def laptop(cli: Path, docker_engine: None, tmp_path: Path) -> Iterator[Laptop]:
    clone, home = tmp_path / "clone", tmp_path / "home"
    git(ROOT, "clone", "-q", str(ROOT), str(clone))
    (home / ".cache" / "multimesh-jax").mkdir(parents=True)
    config = os.environ.get("DOCKER_CONFIG") or f"{Path.home()}/.docker"
    yield Laptop(cli, clone, os.environ | {"HOME": str(home), "DOCKER_CONFIG": config})
    mine = ["docker", "ps", "-aq", "--filter", f"label=devcontainer.local_folder={clone}"]
    for container in subprocess.run(mine, capture_output=True, text=True).stdout.split():
        subprocess.run(["docker", "rm", "-f", container], check=False, capture_output=True)


@pytest.mark.timeout(600)
@pytest.mark.stand_in("a registry on this machine, a bare Debian 12 in place of the image")
def test_the_published_one_is_pulled_by_digest(laptop: Laptop, bookworm: str, registry: str) -> None:
    name = f"{registry}/some-lab/multimesh-jax"
    ours = registries.labelled(bookworm, {"io.github.multimesh-jax.target": "devcontainer"})
    digest = registries.push(ours, f"{name}:devcontainer-v0.1.0")
    other = registries.push(bookworm, f"{name}:runtime")

    def write(image: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "workflows", "ci", "devcontainer", image]
        env = laptop.environ | {"PYTHONPATH": str(laptop.clone)}
        return subprocess.run(argv, cwd=laptop.clone, env=env, capture_output=True, text=True)

    for image, code, words in (
        (f"{name}:devcontainer-v0.1.0", 2, "names no digest"),
        (f"{name}@{other}", 2, "is no devcontainer"),
        (f"{name}@sha256:{'0' * 64}", 16, "push it first"),
    ):
        refused = write(image)
        assert (refused.returncode, refused.stdout) == (code, ""), refused.stderr
        assert words in refused.stderr
    assert not (laptop.clone / devcontainer.PREBUILT).exists()

    done = write(f"{name}@{digest}")
    assert (done.returncode, done.stdout) == (0, f"{devcontainer.PREBUILT}: {name}@{digest}\n"), done.stderr
    here, there = (read(laptop.clone / each) for each in (devcontainer.FILE, devcontainer.PREBUILT))
    assert there.pop("image") == f"{name}@{digest}"
    assert there.pop("name") == f"{here.pop('name')}, prebuilt"
    del here["build"]
    assert here == there
    config = ("--config", str(laptop.clone / devcontainer.PREBUILT))
    laptop.call("up", "--skip-post-create", *config)
    assert laptop.call("exec", *config, "cat", "/etc/debian_version").stdout.startswith("12.")


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.stand_in("a Debian 12 base for the CUDA image")
def test_build_up_and_run_the_unit_tests(laptop: Laptop, bookworm: str) -> None:
    clone, home = laptop.clone, laptop.environ["HOME"]
    changed = read(clone / devcontainer.FILE)
    changed["build"]["args"]["BASE_IMAGE"] = bookworm
    changed["build"] |= {"dockerfile": "../../docker/Dockerfile", "context": "../..", "options": ["--network=host"]}
    path = clone / ".devcontainer" / "bookworm" / "devcontainer.json"
    path.parent.mkdir()
    path.write_text(json.dumps(changed))
    config = ("--config", str(path))

    laptop.call("build", *config)
    subprocess.run([str(clone / ".devcontainer" / "initialize.sh")], env=laptop.environ, check=True)
    subprocess.run(["chown", "-R", f"{USER}:{USER}", str(clone), home], check=True)  # as a laptop's owner has them
    up = laptop.call("up", *config)
    assert "caches of Bazel, ccache, pip and JAX" in up.stderr
    assert "largest difference" in up.stderr or "ready: .venv/bin/pytest" in up.stderr
    unit = ".venv/bin/pytest -q tests/unit"
    tests = ["bash", "-c", f"git config --global safe.directory '*' && {unit}"]
    assert re.search(r"\d+ passed", laptop.call("exec", *config, *tests).stdout)
    again = laptop.call("up", *config)  # the second open finds the container
    assert "requirements/run.txt: installing" not in again.stderr
