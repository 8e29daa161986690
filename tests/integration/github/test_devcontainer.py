"""The devcontainer by its real command line against the real engine; a Debian base stands for the CUDA image."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parts import packages
from tests.integration.parts import registry as registries
from tests.integration.parts.person import Person, somebody
from tests.integration.parts.processes import write_program
from tests.pages import read_commented
from tooling.core.files import ROOT

# A program of one file, configured and built twice: the second time its object comes from the cache.
CMAKE = """
set -e; cd "$(mktemp -d)"; echo 'int main() { return 0; }' >a.cc
printf 'cmake_minimum_required(VERSION 3.16)\\nproject(a CXX)\\nadd_executable(a a.cc)\\n' >CMakeLists.txt
for each in one two; do cmake -S . -B $each; ccache --zero-stats >/dev/null; cmake --build $each; done; ccache -s
"""
CLI = "@devcontainers/cli@0.89.0"


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    options = ["--silent", "--no-audit", "--ignore-scripts", "--prefix", folder]
    subprocess.run([packages.need("npm", "npm"), "install", *options, CLI], check=True)
    return folder / "node_modules" / ".bin" / "devcontainer"


def furnish(cli: Path, config: Mapping[str, Any], place: Path) -> None:
    """Have a clone with another configuration, and the command line."""
    subprocess.run(["git", "clone", "-q", ROOT, place / "clone"], check=True)
    (place / "clone/.devcontainer/changed").mkdir()
    (place / "clone/.devcontainer/changed/devcontainer.json").write_text(json.dumps(config))
    shutil.copytree(cli.parents[1], place / "cli", symlinks=True)  # root's folders are not for everybody
    write_program(place / "clone/.venv/bin/pytest", "#!/of/this/machine\n")


def call(person: Person, verb: str, *words: str, works: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line as somebody."""
    clone = person.place / "clone"
    options = ["--workspace-folder", clone, "--config", clone / ".devcontainer/changed/devcontainer.json"]
    process = person.command(person.place / "cli/.bin/devcontainer", verb, *options, *words)
    assert (process.returncode == 0) == works, process.stdout[-3000:] + process.stderr[-3000:]
    return process


@pytest.mark.stand_in("a registry on this machine, a bare Debian 13 in place of the image")
def test_the_published_one_is_pulled(cli: Path, docker_engine: None, trixie: str, registry: str) -> None:
    """As docs/releasing.md says it: the image in place of the build."""
    name = f"{registry}/some-lab/multimesh-jax:devcontainer-v0.1.0"
    registries.push(trixie, name)
    config = read_commented(ROOT / ".devcontainer/devcontainer.json")
    del config["build"]
    with somebody(0, partial(furnish, cli, config | {"image": name})) as person:
        person.env["MULTIMESH_DEVCONTAINER_USER"] = "root"  # a bare image has no other
        call(person, "up", "--skip-post-create")
        assert call(person, "exec", "cat", "/etc/debian_version").stdout.startswith("13.")


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.stand_in("a Debian 13 base for the CUDA image")
@pytest.mark.parametrize("uid", [2345, 0, 1000])
def test_it_comes_up_for_everybody_and_leaves_the_machines_packages_alone(
    cli: Path, docker_engine: None, trixie: str, uid: int
) -> None:
    config = read_commented(ROOT / ".devcontainer/devcontainer.json")
    config["build"]["args"]["BASE_IMAGE"] = trixie
    config["build"] |= {"dockerfile": "../../docker/Dockerfile", "context": "../..", "options": ["--network=host"]}
    with somebody(uid, partial(furnish, cli, config)) as person:
        if uid == 0:
            refusal = call(person, "up", works=False)
            assert "export MULTIMESH_DEVCONTAINER_USER=root" in refusal.stdout + refusal.stderr
            person.env["MULTIMESH_DEVCONTAINER_USER"] = "root"
        assert "ready: .venv/bin/pytest" in call(person, "up").stderr
        assert call(person, "exec", "id", "-u").stdout == f"{uid}\n"
        tests = call(person, "exec", ".venv/bin/pytest", "-q", "-n0", "tests/unit/cache").stdout
        assert re.search(r"\d+ passed", tests)
        built = call(person, "exec", "sh", "-c", CMAKE)
        assert re.search(r"Hits: +1 /", built.stdout), built.stdout + built.stderr
        second = call(person, "up")  # the second open finds the container
        assert "requirements/run.txt: installing" not in second.stderr
        find = packages.as_root("find", person.place, "!", "-user", str(uid))
        assert subprocess.run(find, capture_output=True, text=True).stdout == ""
        assert person.command("cat", person.place / "clone/.venv/bin/pytest").stdout == "#!/of/this/machine\n"
