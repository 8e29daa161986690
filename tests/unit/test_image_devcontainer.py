"""Pins and wishes of ``devcontainer.json``, what a container trusts, and the script that builds in one."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.integration.parts.processes import write_program
from tests.pages import ROOT, read_commented
from tooling.image import reference

DEVCONTAINER = ".devcontainer/devcontainer.json"


def test_it_has_the_pins_of_the_lock_and_renovate_reads_both(root: Path) -> None:
    lock, text = reference.load_lock(root), (root / DEVCONTAINER).read_text(encoding="utf-8")
    base, python = lock.images["cuda-devel"], lock.files["python linux/amd64"]
    for name, value in (("BASE_IMAGE", base.exact), ("PYTHON_URL", python["url"]), ("PYTHON_SHA256", python["sha256"])):
        assert f'"{name}": "{value}"' in text
    [manager] = json.loads((root / "renovate.json").read_text(encoding="utf-8"))["customManagers"]
    matches = []
    for file in (reference.LOCK, DEVCONTAINER):
        assert [pattern for pattern in manager["managerFilePatterns"] if re.search(pattern.strip("/"), file)]
        for pattern in manager["matchStrings"]:
            in_python = pattern.replace("(?<", "(?P<")
            matches += re.finditer(in_python, (root / file).read_text(encoding="utf-8"))
    names = ["{depName}:{currentValue}@{currentDigest}".format(**match.groupdict()) for match in matches]
    assert names == [*(pin.exact for pin in lock.images.values()), base.exact]


@pytest.mark.parametrize("runs", [False, True])
def test_a_container_trusts_no_stranger_at_the_port_of_the_cache(root: Path, tmp_path: Path, runs: bool) -> None:
    """Whatever listens on this machine, Bazel gets what ``start-cache.sh`` wrote: an address with its password."""
    caches = tmp_path / "caches"
    (caches / "bazel").mkdir(parents=True)
    if runs:
        (caches / "bazel" / "reading.bazelrc").write_text("build --remote_cache=http://multimesh:x@127.0.0.1:1\n")
    script = (root / ".devcontainer" / "start.sh").read_text(encoding="utf-8").replace("/caches", str(caches))
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        script = script.replace("9090", str(stranger.getsockname()[1]))
        for _ in range(2):
            process = subprocess.run(
                ["bash", "-c", script],
                env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                check=True,
            )
    assert process.stdout.startswith("Bazel reads the remote cache" if runs else "no remote Bazel cache")
    assert (tmp_path / ".bazelrc").read_text() == f"try-import {caches}/remote.bazelrc\n"
    text = (caches / "remote.bazelrc").read_text()
    assert "remote_cache" not in text
    assert f"try-import {caches}/bazel/reading.bazelrc\n" in text


def test_it_asks_for_nothing_that_a_laptop_lacks() -> None:
    config = read_commented(ROOT / ".devcontainer" / "devcontainer.json")
    assert config["hostRequirements"] == {"gpu": "optional"}
    assert not [arg for arg in config["runArgs"] if re.search(r"gpus|cap-add|privileged=|SYS_ADMIN", arg)]
    assert "privileged" not in config


def test_every_folder_and_command_of_the_workspace_exists() -> None:
    workspace = read_commented(ROOT / "multimesh-jax.code-workspace")
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
