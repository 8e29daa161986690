"""The whole way of `docker/build.py --upload`, with images that are small enough to wait for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.integration.parts.proxy import Fault
from workflows.image.reference import Reference

from .conftest import ROOT, digest_of, workflows

OCI = "org.opencontainers.image"
VERSION = tomllib.loads((ROOT / "multimesh" / "pyproject.toml").read_text())["project"]["version"]
PINNED = {
    f"{OCI}.revision": "ab" * 20,
    f"{OCI}.version": VERSION,
    f"{OCI}.base.digest": "sha256:" + "cd" * 32,
    "io.github.multimesh-jax.maxtext.revision": "ef" * 20,
}


@pytest.mark.stand_in("a registry on this machine")
def test_upload(make_tiny, upload, target: Reference, tmp_path: Path) -> None:
    done = upload(make_tiny("words"), "--latest")

    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "release.json").read_text())
    digest = document["image"]["digest"]
    assert f"digest  {digest}" in done.stdout
    assert re.search(r"^pushed  \d+\.\d MB to pull, in \d+\.\d s$", done.stdout, re.MULTILINE)
    pull = re.search(r"^pull    (docker pull .*)$", done.stdout, re.MULTILINE)[1]
    assert pull == f"docker pull {target.at(digest)}"
    assert digest_of(target, "v1") == digest_of(target, "latest") == digest
    assert "attestations: none made: they come with a build" in done.stderr
    assert digest_of(target, target.staging.tag) is None  # promoted, so not needed any more
    staging = subprocess.run(["docker", "images", "--quiet", str(target.staging)], capture_output=True, text=True)
    assert staging.stdout == ""


@pytest.mark.stand_in("a registry on this machine")
def test_push_now_promote_later(make_tiny, upload, target: Reference, faulty, tmp_path: Path) -> None:
    done = upload(make_tiny("words", labels=PINNED), "--no-promote", "--json")
    assert done.returncode == 0, done.stderr
    image = json.loads(done.stdout)["pushed"]["image"]
    assert image["tags"] == []
    assert digest_of(target, "v1") is None
    faulty.seen.clear()

    name = target.at(image["digest"])
    promoted = workflows("promote", name, "--tag", "main", "--latest", "--release", f"v{VERSION}", "--json")

    assert promoted.returncode == 0, promoted.stderr
    tags = {each["tag"] for each in json.loads(promoted.stdout)["tags"]}
    assert tags == {"main", f"v{VERSION}", f"v{VERSION.rpartition('.')[0]}", "latest"}
    assert {digest_of(target, tag) for tag in tags} == {image["digest"]}
    assert faulty.count("(POST|PATCH) ") == 0
    assert digest_of(target, "staging-v1") == image["digest"]  # it was promoted as main: v1 may come yet

    record = tmp_path / "release.json"
    more = ("--release", f"v{VERSION}", "--release-file", str(record))
    assert workflows("promote", name, "--tag", "devel", *more).returncode == 0
    assert digest_of(target, "staging-v1") is None  # whatever it is promoted as
    told = json.loads(record.read_text())
    assert told["version"] == f"v{VERSION}"
    assert {each["tag"] for each in told["image"]["tags"]} == tags - {"main", "latest"} | {"devel"}
    assert digest_of(target, "devel") == digest_of(target, "main") == image["digest"]
    record.write_text('{"image": {}}')
    done = workflows("promote", name, "--tag", "devel", *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{record}: is no release.json (" in done.stderr


@pytest.mark.stand_in("a registry on this machine")
def test_a_registry_that_removes_no_tags_keeps_the_staging_tag(make_tiny, upload, target: Reference, faulty) -> None:
    faulty.faults = [Fault("DELETE .*/manifests/", 9, status=405)]
    done = upload(make_tiny("words"))
    assert done.returncode == 0, done.stderr
    assert f"removes no tags; {target.staging.tag} stays" in done.stderr
    assert digest_of(target, target.staging.tag) == digest_of(target, "v1") is not None
    assert faulty.count("PUT .*/manifests/") == 2  # the engine's and the promotion's: no image is left without a tag


@pytest.mark.stand_in("a registry on this machine")
@pytest.mark.parametrize(
    ("labels", "code", "said"),
    [
        ({f"{OCI}.base.digest": "unpinned"}, 4, "has no digest"),
        ({f"{OCI}.revision": "ab" * 20 + "-dirty"}, 5, "changes that are not committed"),
        ({f"{OCI}.version": "99.0.0"}, 2, "the library says 99.0.0"),
    ],
)
def test_release_conditions(make_tiny, upload, target: Reference, faulty, labels, code: int, said: str) -> None:
    done = upload(make_tiny(labels=PINNED | labels), "--release", f"v{VERSION}")
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert faulty.seen == []
    pushed = upload(make_tiny(labels=PINNED | labels), "--no-promote", "--json")
    name = target.at(json.loads(pushed.stdout)["pushed"]["image"]["digest"])
    assert workflows("promote", name, "--tag", "main", "--release", f"v{VERSION}").returncode == code
    assert digest_of(target, "main") is None


def test_a_record_that_cannot_be_written_stops_before_anything_is_pushed(make_tiny, upload, target, tmp_path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("no folder")
        place = tmp_path / "file" / "release.json"
    else:
        (tmp_path / "folder").mkdir(mode=0o500)
        place = tmp_path / "folder" / "release.json"
    done = upload(make_tiny(), "--release-file", str(place))
    assert (done.returncode, done.stdout) in ((10, ""), (1, "")), done.stderr
    assert str(place.parent) in done.stderr
    assert digest_of(target, "v1") is None


def test_release(make_tiny, upload, target: Reference, tmp_path: Path) -> None:
    done = upload(make_tiny(labels=PINNED), "--release", f"v{VERSION}")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "release.json").read_text())
    assert document["version"] == f"v{VERSION}"
    assert document["labels"] == PINNED
    assert [each["tag"] for each in document["image"]["tags"]] == [
        "v1",
        f"v{VERSION}",
        f"v{VERSION.rpartition('.')[0]}",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--release", "v1.0.0"), "add --upload"),
        (("--no-promote",), "add --upload"),
        (("--sign-key", "x.key"), "add --upload"),
        (("--upload", "--repo", "r.example/x", "--no-promote", "--latest"), "python -m workflows promote"),
        (("--upload", "--repo", "r.example/x", "--release", "newest"), "three numbers"),
        (("--upload", "--repo", "r.example/x", "--sign-key", "x.key"), "no such file"),
        (("--validate", "large"), "--validate large: no sbatch here"),
        (("--validate", "medium"), "--validate medium: nvidia-smi lists no GPU here"),
    ],
)
def test_options_that_cannot_be_meant(docker_engine, options: tuple[str, ...], said: str, monkeypatch) -> None:
    # Without Slurm's and NVIDIA's programs, wherever the test runs.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/nonexistent")
    done = workflows("image", "--accelerator", "cpu", *options)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
