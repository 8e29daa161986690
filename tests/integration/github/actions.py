"""What the actions of our workflows read on a runner and leave there; an action's own code where it can be had.

An action is a program that others wrote. What stands for it reads what it reads: the variables and the home of its
job, its permissions, files of the workspace, artifacts of the same run. docs/workflows.md has the table.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stand_ins import git

from tests.integration.parts import packages

# The last for Node 18; its reader of logins is, byte for byte, that of 0.6.0, which actions/attest v4.2.2 has.
OCI = "@sigstore/oci@0.5.0"
# Of its action.yml at the commit that the workflows pin, v4.2.2.
ATTEST = {
    *("subject-path", "subject-digest", "subject-name", "subject-checksums", "subject-version", "sbom-path"),
    *("predicate-type", "predicate", "predicate-path", "push-to-registry", "create-storage-record", "show-summary"),
    "github-token",
}


@dataclass(frozen=True)
class Runner:
    """The machine and the job that an action finds itself in.

    ``source`` is the repository on GitHub, ``workspace`` the folder of the job, ``artifacts`` those of this run.
    ``env`` has the variables that the job's steps see, ``rights`` what its token may do.
    """

    source: Path
    workspace: Path
    artifacts: Path
    github: Mapping[str, Any]
    env: Mapping[str, str]
    rights: Mapping[str, str]
    attested: list[dict[str, Any]]

    def files(self, patterns: str) -> list[Path]:
        """Return what patterns of the workspace find. Hidden files are left out, as actions/upload-artifact does."""
        found = [path for each in patterns.split() for path in sorted(self.workspace.glob(each.rstrip("/")))]
        return [path for path in found if not path.name.startswith(".")]

    def needs(self, **rights: str) -> None:
        lacking = {name: right for name, right in rights.items() if self.rights.get(name.replace("_", "-")) != right}
        assert not lacking, f"the job's token lacks {lacking}"


def checkout(runner: Runner, given: Mapping[str, str]) -> None:
    """One commit, unless ``fetch-depth`` is 0: then all branches and tags."""
    assert "contents" in runner.rights, "the job's token cannot read the repository"
    shutil.rmtree(runner.workspace)
    ref, url = given.get("ref") or runner.github["ref_name"], f"file://{runner.source}"
    depth = [] if given.get("fetch-depth") == "0" else ["--depth=1"]
    git(runner.workspace.parent, "clone", "-q", *depth, "--branch", ref, url, str(runner.workspace))
    address = f"{runner.github['server_url']}/{runner.github['repository']}"
    git(runner.workspace, "remote", "set-url", "origin", address)


def upload_artifact(runner: Runner, given: Mapping[str, str]) -> None:
    target, found = runner.artifacts / given["name"], runner.files(given["path"])
    assert found or given.get("if-no-files-found") != "error", f"nothing to upload at {given['path']}"
    assert not target.exists() or given.get("overwrite") == "true", f"this run has an artifact {given['name']} already"
    shutil.rmtree(target, ignore_errors=True)
    for path in found:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copytree(path, target, dirs_exist_ok=True) if path.is_dir() else shutil.copy(path, target)


def download_artifact(runner: Runner, given: Mapping[str, str]) -> None:
    found = sorted(runner.artifacts.glob(given.get("name") or given["pattern"]))
    assert found or "pattern" in given, f"this run has no artifact {given['name']}"
    merged = "name" in given or given.get("merge-multiple") == "true"
    for path in found:
        shutil.copytree(path, runner.workspace / given["path"] / ("" if merged else path.name), dirs_exist_ok=True)


def attest(runner: Runner, given: Mapping[str, str]) -> None:
    """Sign nothing; read the login and push to the registry with the action's own code."""
    assert given.keys() <= ATTEST, f"actions/attest has no input {given.keys() - ATTEST}"
    runner.needs(id_token="write", attestations="write")
    for name in ("subject-path", "predicate-path"):
        assert name not in given or runner.files(given[name]), f"{name}: no file {given.get(name)}"
    told = dict(given)
    if given.get("push-to-registry") == "true":
        runner.needs(packages="write")
        script = Path(__file__).with_name("attest.js")
        argv = [packages.need("node", "nodejs"), script, package(), given["subject-name"], given["subject-digest"]]
        done = subprocess.run(argv, env=dict(runner.env), cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, f"actions/attest: {done.stderr}"
        told["pushed"] = done.stdout.strip()
    runner.attested.append(told)


@functools.cache
def package() -> Path:
    """Return @sigstore/oci, as npm has it."""
    folder = Path(tempfile.gettempdir()) / f"multimesh-{OCI.replace('/', '-')}"
    place = folder / "node_modules" / "@sigstore" / "oci"
    if not (place / "package.json").is_file():
        npm = [
            packages.need("npm", "npm"),
            "install",
            "--silent",
            "--no-audit",
            "--ignore-scripts",
            "--prefix",
            folder,
            OCI,
        ]
        subprocess.run(npm, check=True)
    return place


def upload_pages(runner: Runner, given: Mapping[str, str]) -> None:
    assert (runner.workspace / given["path"] / "index.html").is_file(), f"no site at {given['path']}"


def deploy_pages(runner: Runner, given: Mapping[str, str]) -> None:
    runner.needs(pages="write", id_token="write")


def nothing(runner: Runner, given: Mapping[str, str]) -> None:
    """This Python and an empty cache stand for them."""


ACTIONS: dict[str, Callable[[Runner, Mapping[str, str]], None]] = {
    "actions/attest": attest,
    "actions/cache": nothing,
    "actions/checkout": checkout,
    "actions/deploy-pages": deploy_pages,
    "actions/download-artifact": download_artifact,
    "actions/setup-python": nothing,
    "actions/upload-artifact": upload_artifact,
    "actions/upload-pages-artifact": upload_pages,
}
