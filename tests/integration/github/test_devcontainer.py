"""The devcontainer by its real command line against the real engine; a Debian base stands for the CUDA image."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from stand_ins import ROOT, git

from tests.integration.parts import packages

CLI = "@devcontainers/cli@0.89.0"
USER = 1000  # of the image


def read(path: Path) -> dict[str, Any]:
    """Read JSON with comments of their own lines."""
    return json.loads(re.sub(r"^\s*//.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_it_is_built_from_the_pinned_images() -> None:
    args = read(ROOT / ".devcontainer" / "devcontainer.json")["build"]["args"]
    lock = json.loads((ROOT / "images.lock").read_text(encoding="utf-8"))
    base, python = lock["images"]["cuda-devel"], lock["files"]["python linux/amd64"]
    assert args["BASE_IMAGE"] == base["reference"] + (f"@{base['digest']}" if base["digest"] else "")
    assert (args["PYTHON_URL"], args["PYTHON_SHA256"]) == (python["url"], python["sha256"])


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


@pytest.mark.timeout(1800)
@pytest.mark.promise(
    "The devcontainer builds, comes up, and runs the unit tests inside", stand_in="a Debian 12 base for the CUDA image"
)
def test_build_up_and_run_the_unit_tests(bookworm: str, tmp_path: Path) -> None:
    clone, home = tmp_path / "clone", tmp_path / "home"
    git(ROOT, "clone", "-q", str(ROOT), str(clone))
    config = read(clone / ".devcontainer" / "devcontainer.json")
    config["build"]["args"]["BASE_IMAGE"] = bookworm
    config["build"]["options"] = ["--network=host"]
    (clone / ".devcontainer" / "devcontainer.json").write_text(json.dumps(config))
    (home / ".cache" / "multimesh-jax").mkdir(parents=True)
    npm = [
        packages.need("npm", "npm"),
        "install",
        "--silent",
        "--no-audit",
        "--ignore-scripts",
        "--prefix",
        str(tmp_path),
        CLI,
    ]
    subprocess.run(npm, check=True)
    cli = tmp_path / "node_modules" / ".bin" / "devcontainer"
    env = os.environ | {"HOME": str(home), "DOCKER_CONFIG": os.environ.get("DOCKER_CONFIG") or f"{Path.home()}/.docker"}

    def call(verb: str, *args: str) -> subprocess.CompletedProcess[str]:
        argv = [str(cli), verb, "--workspace-folder", str(clone), *args]
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    call("build")
    subprocess.run([str(clone / ".devcontainer" / "initialize.sh")], env=env, check=True)
    subprocess.run(["chown", "-R", f"{USER}:{USER}", str(clone), str(home)], check=True)  # as a laptop's owner has them
    try:
        up = call("up")
        assert "caches of Bazel, ccache, pip and JAX" in up.stderr
        assert "largest difference" in up.stderr or "ready: .venv/bin/pytest" in up.stderr
        # What README may claim depends on the outcome of this test among others.
        unit = ".venv/bin/pytest -q tests/unit -k 'not test_readme_claims_only_what_was_run'"
        tests = ["bash", "-c", f"git config --global safe.directory '*' && {unit}"]
        assert re.search(r"\d+ passed", call("exec", *tests).stdout)
        again = call("up")  # the second open finds the container
        assert "requirements/run.txt: installing" not in again.stderr
    finally:
        mine = ["docker", "ps", "-aq", "--filter", f"label=devcontainer.local_folder={clone}"]
        for container in subprocess.run(mine, capture_output=True, text=True).stdout.split():
            subprocess.run(["docker", "rm", "-f", container], check=False, capture_output=True)
