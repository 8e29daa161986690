"""What a push attests: provenance and an SBOM in the registry beside the image, found by its digest."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.integration.attest.conftest import SECRET, Bench
from tests.integration.parts import packages, proxy
from workflows.image import reference
from workflows.image.registry import Registry

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
VERSION = tomllib.loads((ROOT / "multimesh" / "pyproject.toml").read_text())["project"]["version"]
PROVENANCE, SPDX = "https://slsa.dev/provenance/v0.2", "https://spdx.dev/Document"


def statements(bench: Bench, repository: str, manifest: str) -> dict[str, dict[str, Any]]:
    """Return the in-toto statements of an attestation manifest by their type."""
    inspect = ("buildx", "imagetools", "inspect", "--raw")
    layers = json.loads(bench.docker(*inspect, f"{repository}@{manifest}"))["layers"]
    found = {}
    for layer in layers:
        blob = ["curl", "-sf", f"http://{repository.replace('/', '/v2/', 1)}/blobs/{layer['digest']}"]
        said = json.loads(subprocess.run(blob, capture_output=True, check=True).stdout)
        found[layer["annotations"]["in-toto.io/predicate-type"]] = said
    return found


@pytest.mark.stand_in("a small image, a registry on this machine, a scanner that lists files")
def test_a_release_with_attestations(attesting: Bench, registry: str, tmp_path: Path) -> None:
    name, record = f"{registry}/team/{attesting.way}", tmp_path / "r.json"
    options = ["--upload", "--latest", "--release", f"v{VERSION}", "--sbom-scanner", attesting.scanner]

    done = attesting.build("--repo", name, "--tag", "main", *options, "--release-file", str(record))

    assert done.returncode == 0, done.stderr[-3000:]
    assert "attestations: SLSA provenance, mode=max; SPDX SBOM by " in done.stderr
    document = json.loads(record.read_text())
    digest, (attested,) = document["image"]["digest"], document["attestations"]["manifests"]
    assert set(attested["kinds"]) == {"provenance", "sbom"}
    assert f"attests {attested['digest']}: " in done.stdout
    with Registry(reference.make(name, None, "main")) as answers:
        tags = ("main", "latest", f"v{VERSION}", f"v{VERSION.rpartition('.')[0]}")
        assert {answers.digest(tag) for tag in tags} == {digest}
    shown = attesting.docker("buildx", "imagetools", "inspect", f"{name}:latest")
    assert "attestation-manifest" in shown
    assert {f"@{each}" in shown for each in (attested["digest"], attested["image"])} == {True}
    attesting.docker("pull", f"{name}@{digest}")
    assert attesting.docker("run", "--rm", f"{name}@{digest}", "cat", "/made") == "made by a step"

    said = statements(attesting, name, attested["digest"])

    assert {subject["digest"]["sha256"] for each in said.values() for subject in each["subject"]} == {
        attested["image"].removeprefix("sha256:")
    }
    provenance = said[PROVENANCE]["predicate"]
    assert "id" in provenance["builder"]
    materials = {each["uri"].partition("?")[0]: each["digest"]["sha256"] for each in provenance["materials"]}
    assert attesting.base.rpartition(":")[2] in materials.values(), materials
    assert provenance["invocation"]["parameters"]["args"]["build-arg:ACCELERATOR"] == "cpu"
    files = {each["fileName"] for each in said[SPDX]["predicate"]["files"]}
    assert {"made", "opt/maxtext/validate-cpu.sh"} <= files
    assert SECRET not in json.dumps(said)


@pytest.mark.stand_in("a small image and a registry on this machine")
def test_provenance_keeps_proxies_to_itself(bench: Bench, registry: str, tmp_path: Path) -> None:
    record, near = tmp_path / "r.json", {"NO_PROXY": "127.0.0.1"}
    options = ["--upload", "--attest", "provenance", "--release-file", str(record)]

    done = bench.build(
        "--repo",
        f"{registry}/team/proxied",
        *options,
        HTTP_PROXY="http://me:hunter2-hunter2@proxy.example:3128",
        **near,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "mode=min (max would publish your proxies)" in done.stderr
    (attested,) = json.loads(record.read_text())["attestations"]["manifests"]
    said = json.dumps(statements(bench, f"{registry}/team/proxied", attested["digest"]))
    assert attested["kinds"] == ["provenance"]
    assert [word for word in (SECRET, "proxy.example") if word in said] == []
    assert "git.example/team/code.git" in said


def test_the_check_knows_the_image_behind_new_attestations(bench: Bench, registry: str, tmp_path: Path) -> None:
    options = ["--repo", f"{registry}/team/again", "--upload", "--attest", "provenance", "--json"]
    first, second = (json.loads(bench.build(*options).stdout) for _ in range(2))
    assert first["id"] != second["id"]
    assert second["check"] == first["check"]
    assert second["check"]["verdict"] == "ok: stub"


def test_an_image_that_stays_here_has_no_attestations(attesting: Bench) -> None:
    first, second = (json.loads(attesting.build("--tag", "stays", "--json").stdout) for _ in range(2))
    assert first["id"] == second["id"] == attesting.docker("inspect", "--format", "{{.Id}}", "multimesh-jax:stays")
    assert first["check"] == second["check"]
    assert second["cached"] == second["steps"] > 0
    busybox = Path(packages.need("busybox", "busybox-static")).stat().st_size
    assert first["bytes"] >= busybox  # unpacked


@pytest.mark.stand_in("a second engine on this machine, a small image and a registry on this machine")
def test_an_image_is_brought_from_a_remote_engine(
    docker_engine: None, bench: Bench, registry: str, tmp_path: Path
) -> None:
    here, name, record = Bench(bench.repository, bench.base, bench.scanner), f"{registry}/team/brought", tmp_path / "r"
    here.docker("context", "create", "mm-far", "--docker", f"host={bench.env['DOCKER_HOST']}")
    try:
        options = ["--remote", "mm-far", "--upload", "--release-file", str(record)]
        done = here.build("--repo", name, "--tag", "main", *options)
    finally:
        here.docker("context", "rm", "--force", "mm-far")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "attestations: none made" in done.stderr
    known = here.docker("image", "inspect", "--format", "{{.Id}}", f"{name}:main")
    image = json.loads(record.read_text())["image"]
    assert image["id"] == known != bench.docker("image", "inspect", "--format", "{{.Id}}", f"{name}:main")
    assert here.docker("run", "--rm", f"{name}@{image['digest']}", "cat", "/made") == "made by a step"


def test_dry_run_shows_how_attestations_are_made(attesting: Bench) -> None:
    options = ["--repo", "r.example/team/x", "--upload", "--dry-run", "--json", "--sbom-scanner", "r.example/s:1"]
    commands = json.loads(attesting.build(*options).stdout)["commands"]
    builds = [command for command in commands if "--metadata-file" in command]
    wanted = ["--attest=type=provenance,mode=max", "--attest=type=sbom,generator=r.example/s:1"]
    assert [word for word in builds[-1] if word.startswith("--attest")] == wanted
    pushes = [command for command in commands if "push" in command]
    if attesting.way == "builder":
        assert [word for word in builds[0] if word.startswith("--attest")] == []
        assert "type=image,name=r.example/team/x:staging-local,push=true" in builds[1]
        assert pushes == []
    else:
        assert len(builds) == len(pushes) == 1


def test_a_release_wants_a_pinned_scanner(bench: Bench, registry: str) -> None:
    options = ["--repo", f"{registry}/team/unpinned", "--upload", "--release", f"v{VERSION}"]
    done = bench.build(*options, "--sbom-scanner", "r.example/scanner:1")
    assert (done.returncode, done.stdout) == (4, "")
    assert "no release: r.example/scanner:1: has no digest" in done.stderr


def test_asking_an_engine_that_cannot(docker_engine: None, bench: Bench) -> None:
    plain = Bench(bench.repository, bench.base, bench.scanner)
    done = plain.build("--repo", "r.example/team/x", "--upload", "--attest", "sbom")
    assert (done.returncode, done.stdout) == (13, "")
    assert "--attest sbom: this engine keeps no image index" in done.stderr


@pytest.mark.stand_in("a small image and a registry on this machine")
def test_a_push_with_attestations_meets_faults(attesting: Bench, registry: str, tmp_path: Path) -> None:
    options = ["--upload", "--attest", "provenance", "--release-file", str(tmp_path / "r.json")]
    with proxy.running(registry) as faulty:
        name = f"{faulty.address}/team/faulty-{attesting.way}"
        faulty.faults = [proxy.Fault("PUT .*/manifests/", 100, status=403)]
        refused = attesting.build("--repo", name, "--tag", "main", *options)
        assert refused.returncode == 16, refused.stderr[-3000:]
        assert "refused (" in refused.stderr
        assert faulty.count("PUT .*/manifests/") <= 2
        with Registry(reference.make(name, None, "main")) as answers:
            assert answers.digest("main") is None
        faulty.faults = [proxy.Fault("PUT .*/manifests/", 4, status=503)]
        done = attesting.build("--repo", name, "--tag", "main", *options)
        assert done.returncode == 0, done.stderr[-3000:]
        assert faulty.count("PUT .*/manifests/") >= 5  # builder and engine themselves try again, too
