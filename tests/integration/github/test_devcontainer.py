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

ROOT = Path(__file__).resolve().parents[3]
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


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.stand_in("scripts in place of jax, xla and Bazel")
def test_native(tmp_path: Path) -> None:
    script = tmp_path / ".devcontainer" / "native.sh"
    executable(script, (ROOT / ".devcontainer" / "native.sh").read_text())

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, *words], cwd="/", capture_output=True, text=True)

    assert "./bootstrap.sh --group source brings them" in run().stderr
    jax, xla = tmp_path / "third_party" / "jax", tmp_path / "third_party" / "xla"
    executable(jax / "build" / "build.py", "import sys\nopen('arguments', 'w').write(' '.join(sys.argv[1:]))\n")
    executable(jax / "bazel-7.7.0-linux-x86_64", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    executable(xla / "configure.py", "import sys\nopen('xla_configure.bazelrc', 'w').write(' '.join(sys.argv[1:]))\n")
    tool = "import sys\nopen('compile_commands.json', 'w').write(sys.stdin.read())\n"
    executable(xla / "build_tools" / "lint" / "generate_compile_commands.py", tool)
    assert run().returncode == 0
    assert (jax / "arguments").read_text() == f"build --wheels=jaxlib --local_xla_path={xla} --configure_only"
    words = (xla / "compile_commands.json").read_text().splitlines()
    assert words == ["aquery", "mnemonic(CppCompile, //xla/...)", "--output=jsonproto"]
    assert run("test-xla", "//xla/hlo/...").stdout.splitlines() == ["test", "--test_output=errors", "//xla/hlo/..."]
    assert "none of commands build test-xla test-jax" in run("nosuch").stderr


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    npm = [packages.need("npm", "npm"), "install", "--silent", "--no-audit", "--ignore-scripts", "--prefix"]
    subprocess.run([*npm, folder, CLI], check=True)
    return folder / "node_modules" / ".bin" / "devcontainer"


@pytest.mark.timeout(600)
@pytest.mark.stand_in("a registry on this machine, a bare Debian 13 in place of the image")
def test_the_published_one_is_pulled(cli: Path, trixie: str, registry: str, tmp_path: Path) -> None:
    """As docs/releasing.md says it: the image in place of the build."""
    name = f"{registry}/some-lab/multimesh-jax:devcontainer-v0.1.0"
    registries.push(trixie, name)
    clone, home = tmp_path / "clone", tmp_path / "home"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    (home / ".cache" / "multimesh-jax").mkdir(parents=True)
    config = read(clone / ".devcontainer/devcontainer.json")
    del config["build"]
    path = clone / ".devcontainer" / "prebuilt" / "devcontainer.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config | {"image": name}))
    settings = {"DOCKER_CONFIG": os.environ.get("DOCKER_CONFIG") or f"{Path.home()}/.docker", "HOME": str(home)}
    settings["MULTIMESH_DEVCONTAINER_USER"] = "root"  # a bare image has no other

    def call(verb: str, *words: str) -> str:
        argv = [cli, verb, "--workspace-folder", clone, "--config", path, *words]
        done = subprocess.run(argv, env=os.environ | settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    try:
        call("up", "--skip-post-create")
        assert call("exec", "cat", "/etc/debian_version").startswith("13.")
    finally:
        remove_containers(clone)


def remove_containers(clone: Path) -> None:
    """Remove the containers of a clone."""
    ours = ["docker", "ps", "-aq", "--filter", f"label=devcontainer.local_folder={clone}"]
    for container in subprocess.run(ours, capture_output=True, text=True).stdout.split():
        subprocess.run(["docker", "rm", "-f", container], check=False, capture_output=True)


class Person(NamedTuple):
    """Somebody of this machine who may use the engine: the owner of a clone."""

    uid: int

    @contextmanager
    def account(self) -> Iterator[None]:
        """Have a user of this id; the command line asks for its name."""
        name = f"multimesh-{self.uid}"
        add = packages.as_root("useradd", "--uid", str(self.uid), "--no-create-home", name)
        if new := self.uid not in (user.pw_uid for user in pwd.getpwall()):
            subprocess.run(add, check=True)
        try:
            yield
        finally:
            if new:
                subprocess.run(packages.as_root("userdel", name), check=True)

    def owns(self, *places: Path) -> None:
        subprocess.run(packages.as_root("chown", "-R", f"{self.uid}:{self.uid}", *places), check=True)

    def command(self, env: Mapping[str, str], *argv: str | Path) -> list[str]:
        group = Path(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")).stat().st_gid
        me = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", f"--groups={group}"]
        return packages.as_root(*(me if self.uid else []), *argv, env=env)


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.stand_in("a Debian 13 base for the CUDA image")
@pytest.mark.parametrize("uid", [2345, 0, 1000])
def test_it_comes_up_for_everybody_and_leaves_the_machines_packages_alone(
    cli: Path, docker_engine: None, trixie: str, uid: int
) -> None:
    person = Person(uid)
    with tempfile.TemporaryDirectory(prefix="mm-devcontainer-") as folder, person.account():
        place = Path(folder)
        place.chmod(0o755)
        clone, home = place / "clone", place / "home"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        changed = read(clone / ".devcontainer/devcontainer.json")
        changed["build"]["args"]["BASE_IMAGE"] = trixie
        changed["build"] |= {"dockerfile": "../../docker/Dockerfile", "context": "../..", "options": ["--network=host"]}
        path = clone / ".devcontainer" / "trixie" / "devcontainer.json"
        path.parent.mkdir()
        path.write_text(json.dumps(changed))
        executable(clone / ".venv" / "bin" / "pytest", "#!/of/this/machine\n")
        plugins = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "cli-plugins"
        (home / ".docker").mkdir(parents=True)
        if plugins.exists():
            shutil.copytree(plugins, home / ".docker" / "cli-plugins")
        shutil.copytree(cli.parents[1], place / "cli", symlinks=True)  # root's folders are not for everybody
        person.owns(place)
        settings = {
            name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "DOCKER_HOST"))
        }
        env = settings | {"HOME": str(home), "PATH": os.environ["PATH"]}

        def call(verb: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
            options = ["--workspace-folder", clone, "--config", path]
            argv = person.command(env | more, place / "cli/.bin/devcontainer", verb, *options, *words)
            return subprocess.run(argv, capture_output=True, text=True)

        if uid == 0:
            refused = call("up")
            assert refused.returncode != 0
            assert "export MULTIMESH_DEVCONTAINER_USER=root" in refused.stdout + refused.stderr
            env["MULTIMESH_DEVCONTAINER_USER"] = "root"
        try:
            up = call("up")
            assert up.returncode == 0, up.stdout[-3000:] + up.stderr[-3000:]
            assert "ready: .venv/bin/pytest" in up.stderr
            assert call("exec", "id", "-u").stdout == f"{uid}\n"
            assert re.search(r"\d+ passed", call("exec", ".venv/bin/pytest", "-q", "-n0", "tests/unit/cache").stdout)
            built = call("exec", "sh", "-c", CMAKE)
            assert re.search(r"Hits: +1 /", built.stdout), built.stdout + built.stderr
            again = call("up")  # the second open finds the container
            assert again.returncode == 0, again.stderr[-3000:]
            assert "requirements/run.txt: installing" not in again.stderr
        finally:
            remove_containers(clone)
            strangers = subprocess.run(
                packages.as_root("find", clone, home, "!", "-user", str(uid)), capture_output=True, text=True
            )
            command = person.command(env, "cat", clone / ".venv" / "bin" / "pytest")
            program = subprocess.run(command, capture_output=True, text=True).stdout
            subprocess.run(packages.as_root("chown", "-R", str(os.geteuid()), place), check=True)
        assert strangers.stdout == ""
        assert program == "#!/of/this/machine\n"
