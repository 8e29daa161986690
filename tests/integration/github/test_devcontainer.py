"""The devcontainer by its real command line against the real engine; a Debian base stands for the CUDA image."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.parts import packages
from tests.integration.parts import registry as registries
from tests.integration.parts.processes import write_program
from tooling.core.files import ROOT

# A program of one file, configured and built twice: the second time its object comes from the cache.
CMAKE = """
set -e; cd "$(mktemp -d)"; echo 'int main() { return 0; }' >a.cc
printf 'cmake_minimum_required(VERSION 3.16)\\nproject(a CXX)\\nadd_executable(a a.cc)\\n' >CMakeLists.txt
for each in one two; do cmake -S . -B $each; ccache --zero-stats >/dev/null; cmake --build $each; done; ccache -s
"""
CLI = "@devcontainers/cli@0.89.0"


def read(path: Path) -> dict[str, Any]:
    """Read JSON with comments of their own lines."""
    return json.loads(re.sub(r"^\s*//.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_it_asks_for_nothing_that_a_laptop_lacks() -> None:
    config = read(ROOT / ".devcontainer" / "devcontainer.json")
    assert config["hostRequirements"] == {"gpu": "optional"}
    assert not [arg for arg in config["runArgs"] if re.search(r"gpus|cap-add|privileged=|SYS_ADMIN", arg)]
    assert "privileged" not in config


def test_every_folder_and_command_of_the_workspace_exists() -> None:
    workspace = read(ROOT / "multimesh-jax.code-workspace")
    fetched = {"third_party/maxtext", "third_party/jax", "third_party/xla"}
    assert {item["name"] for item in workspace["folders"]} >= {"multimesh", "maxtext", "jax", "xla", "tooling"}
    assert all((ROOT / item["path"]).is_dir() for item in workspace["folders"] if item["path"] not in fetched)
    commands = {task["command"] for task in workspace["tasks"]["tasks"]}
    assert all((ROOT / command).is_file() for command in commands if not command.startswith(".venv/"))


@pytest.mark.stand_in("scripts in place of jax, xla and Bazel")
def test_native(tmp_path: Path) -> None:
    script = tmp_path / ".devcontainer" / "native.sh"
    write_program(script, (ROOT / ".devcontainer" / "native.sh").read_text())

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, *words], cwd="/", capture_output=True, text=True)

    assert "./bootstrap.sh --group source brings them" in run().stderr
    jax, xla = tmp_path / "third_party" / "jax", tmp_path / "third_party" / "xla"
    note = "import sys\nopen('{}', 'w').write(' '.join(sys.argv[1:]))\n"
    write_program(jax / "build" / "build.py", note.format("arguments"))
    write_program(jax / "bazel-7.7.0-linux-x86_64", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    write_program(xla / "configure.py", note.format("xla_configure.bazelrc"))
    tool = "import sys\nopen('compile_commands.json', 'w').write(sys.stdin.read())\n"
    write_program(xla / "build_tools" / "lint" / "generate_compile_commands.py", tool)
    assert run().returncode == 0
    assert (jax / "arguments").read_text() == f"build --wheels=jaxlib --local_xla_path={xla} --configure_only"
    words = (xla / "compile_commands.json").read_text().splitlines()
    assert words == ["aquery", "mnemonic(CppCompile, //xla/...)", "--output=jsonproto"]
    assert run("test-xla", "//xla/hlo/...").stdout.splitlines() == ["test", "--test_output=errors", "//xla/hlo/..."]
    assert "none of commands build test-xla test-jax" in run("nosuch").stderr


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    options = ["--silent", "--no-audit", "--ignore-scripts", "--prefix", folder]
    subprocess.run([packages.need("npm", "npm"), "install", *options, CLI], check=True)
    return folder / "node_modules" / ".bin" / "devcontainer"


class Person(NamedTuple):
    """Somebody of this machine who may use the engine, with a clone and an empty home in a folder of theirs."""

    uid: int
    place: Path
    env: dict[str, str]

    def command(self, *argv: str | Path) -> subprocess.CompletedProcess[str]:
        group = Path(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")).stat().st_gid
        me = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", f"--groups={group}"] if self.uid else []
        return subprocess.run(packages.as_root(*me, *argv, env=self.env), capture_output=True, text=True)

    def call(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        clone = self.place / "clone"
        options = ["--workspace-folder", clone, "--config", clone / ".devcontainer/changed/devcontainer.json"]
        return self.command(self.place / "cli/.bin/devcontainer", verb, *options, *words)

    def must(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        done = self.call(verb, *words)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done


@contextmanager
def somebody(uid: int, cli: Path, config: Mapping[str, Any]) -> Iterator[Person]:
    """Have a user of this id, whose clone has another configuration; their containers and account go at the end."""
    name = f"multimesh-{uid}"  # the command line asks for it
    if new := uid not in (user.pw_uid for user in pwd.getpwall()):
        subprocess.run(packages.as_root("useradd", "--uid", str(uid), "--no-create-home", name), check=True)
    with tempfile.TemporaryDirectory(prefix="mm-devcontainer-") as folder:
        place = Path(folder)
        place.chmod(0o755)
        clone, docker = place / "clone", place / "home" / ".docker"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        (clone / ".devcontainer" / "changed").mkdir()
        (clone / ".devcontainer" / "changed" / "devcontainer.json").write_text(json.dumps(config))
        plugins = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "cli-plugins"
        docker.mkdir(parents=True)
        if plugins.exists():
            shutil.copytree(plugins, docker / "cli-plugins")
        shutil.copytree(cli.parents[1], place / "cli", symlinks=True)  # root's folders are not for everybody
        write_program(clone / ".venv" / "bin" / "pytest", "#!/of/this/machine\n")
        subprocess.run(packages.as_root("chown", "-R", f"{uid}:{uid}", place), check=True)
        env = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_", "DOCKER_HOST"))}
        try:
            yield Person(uid, place, env | {"HOME": str(place / "home"), "PATH": os.environ["PATH"]})
        finally:
            ours = ["docker", "ps", "-aq", "--filter", f"label=devcontainer.local_folder={clone}"]
            for container in subprocess.run(ours, capture_output=True, text=True).stdout.split():
                subprocess.run(["docker", "rm", "-f", container], check=False, capture_output=True)
            subprocess.run(packages.as_root("chown", "-R", str(os.geteuid()), place), check=True)
            if new:
                subprocess.run(packages.as_root("userdel", name), check=True)


@pytest.mark.stand_in("a registry on this machine, a bare Debian 13 in place of the image")
def test_the_published_one_is_pulled(cli: Path, docker_engine: None, trixie: str, registry: str) -> None:
    """As docs/releasing.md says it: the image in place of the build."""
    name = f"{registry}/some-lab/multimesh-jax:devcontainer-v0.1.0"
    registries.push(trixie, name)
    config = read(ROOT / ".devcontainer/devcontainer.json")
    del config["build"]
    with somebody(0, cli, config | {"image": name}) as person:
        person.env["MULTIMESH_DEVCONTAINER_USER"] = "root"  # a bare image has no other
        person.must("up", "--skip-post-create")
        assert person.must("exec", "cat", "/etc/debian_version").stdout.startswith("13.")


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.stand_in("a Debian 13 base for the CUDA image")
@pytest.mark.parametrize("uid", [2345, 0, 1000])
def test_it_comes_up_for_everybody_and_leaves_the_machines_packages_alone(
    cli: Path, docker_engine: None, trixie: str, uid: int
) -> None:
    config = read(ROOT / ".devcontainer/devcontainer.json")
    config["build"]["args"]["BASE_IMAGE"] = trixie
    config["build"] |= {"dockerfile": "../../docker/Dockerfile", "context": "../..", "options": ["--network=host"]}
    with somebody(uid, cli, config) as person:
        if uid == 0:
            refused = person.call("up")
            assert refused.returncode != 0
            assert "export MULTIMESH_DEVCONTAINER_USER=root" in refused.stdout + refused.stderr
            person.env["MULTIMESH_DEVCONTAINER_USER"] = "root"
        assert "ready: .venv/bin/pytest" in person.must("up").stderr
        assert person.call("exec", "id", "-u").stdout == f"{uid}\n"
        tests = person.call("exec", ".venv/bin/pytest", "-q", "-n0", "tests/unit/cache").stdout
        assert re.search(r"\d+ passed", tests)
        built = person.call("exec", "sh", "-c", CMAKE)
        assert re.search(r"Hits: +1 /", built.stdout), built.stdout + built.stderr
        again = person.must("up")  # the second open finds the container
        assert "requirements/run.txt: installing" not in again.stderr
        find = packages.as_root("find", person.place, "!", "-user", str(uid))
        assert subprocess.run(find, capture_output=True, text=True).stdout == ""
        assert person.command("cat", person.place / "clone/.venv/bin/pytest").stdout == "#!/of/this/machine\n"
