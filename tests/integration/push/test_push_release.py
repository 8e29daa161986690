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

from tooling.image.reference import Reference

from .conftest import ROOT, digest_of, tooling

OCI = "org.opencontainers.image"
VERSION = tomllib.loads((ROOT / "multimesh" / "pyproject.toml").read_text())["project"]["version"]
PINNED = {
    f"{OCI}.revision": "ab" * 20,
    f"{OCI}.version": VERSION,
    f"{OCI}.base.digest": "sha256:" + "cd" * 32,
    "io.github.multimesh-jax.maxtext.revision": "ef" * 20,
    "io.github.multimesh-jax.python": json.loads((ROOT / "docker" / "images.lock").read_text())["files"][
        "python linux/amd64"
    ]["sha256"],
}


@pytest.mark.stand_in("a registry on this machine")
def test_upload(make_tiny, upload, target: Reference, tmp_path: Path) -> None:
    done = upload(make_tiny("words"))

    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "release.json").read_text())
    digest = document["image"]["digest"]
    assert f"digest  {digest}" in done.stdout
    assert re.search(r"^pushed  \d+\.\d MB to pull, in \d+\.\d s$", done.stdout, re.MULTILINE)
    pull = re.search(r"^pull    (docker pull .*)$", done.stdout, re.MULTILINE)[1]
    assert pull == f"docker pull {target.at(digest)}"
    assert digest_of(target, "v1") == digest_of(target, document["image"]["candidate"]) == digest


@pytest.mark.stand_in("a registry on this machine")
def test_a_dirty_tree_is_pushed_only_where_that_is_meant(make_tiny, upload, target: Reference) -> None:
    for labels, code in ((PINNED | {f"{OCI}.revision": "ab" * 20 + "-dirty"}, 25), (PINNED, 0)):
        image = make_tiny(labels=labels)
        subprocess.run(["docker", "tag", image.id, str(target)], check=True)
        options = ("--no-build", "--upload", "--repo", target.repository, "--tag", "v1")
        done = tooling("image", *options)
        assert done.returncode == code, done.stderr
        assert code == 0 or "this repository: has changes that are not committed" in done.stderr
        assert code == 0 or "--allow-dirty" in done.stderr
        assert (digest_of(target, "v1") is None) == (code != 0)


@pytest.mark.stand_in("a registry on this machine")
def test_push_now_promote_later(make_tiny, upload, target: Reference, faulty, tmp_path: Path) -> None:
    done = upload(make_tiny("words", labels=PINNED), "--no-promote", "--json")
    assert done.returncode == 0, done.stderr
    image = json.loads(done.stdout)["pushed"]["image"]
    assert image["tags"] == []
    assert digest_of(target, "v1") is None
    faulty.seen.clear()

    name = target.at(image["digest"])
    promoted = tooling("promote", name, "--tag", "main", "--latest", "--release", f"v{VERSION}")

    assert promoted.returncode == 0, promoted.stderr
    tags = {line.partition(":")[0] for line in promoted.stdout.splitlines()}
    assert tags == {"main", f"v{VERSION}", f"v{VERSION.rpartition('.')[0]}", "latest"}
    assert {digest_of(target, tag) for tag in tags} == {image["digest"]}
    assert image["candidate"] == "sha-abababababab"
    assert digest_of(target, image["candidate"]) == image["digest"]

    record = tmp_path / "release.json"
    more = ("--release", f"v{VERSION}", "--release-file", str(record))
    assert tooling("promote", name, "--tag", "devel", *more).returncode == 0
    told = json.loads(record.read_text())
    assert told["version"] == f"v{VERSION}"
    assert {each["tag"] for each in told["image"]["tags"]} == tags - {"main", "latest"} | {"devel"}
    assert digest_of(target, "devel") == digest_of(target, "main") == image["digest"]
    for key, value in (("digest", "sha256:" + "12" * 32), ("repository", "r.example/other")):
        record.write_text(json.dumps(told | {"image": told["image"] | {key: value}}))
        done = tooling("promote", name, "--tag", "devel", *more)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"--release-file {record}: is about " in done.stderr
    record.write_text('{"image": {}}')
    done = tooling("promote", name, "--tag", "devel", *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{record}: is no release.json (" in done.stderr


@pytest.mark.stand_in("a registry on this machine")
@pytest.mark.parametrize(
    ("labels", "code", "said"),
    [
        ({f"{OCI}.base.digest": "unpinned"}, 24, "has no digest"),
        ({f"{OCI}.revision": "ab" * 20 + "-dirty"}, 25, "changes that are not committed"),
        ({f"{OCI}.version": "99.0.0"}, 2, "the library says 99.0.0"),
        ({"io.github.multimesh-jax.python": "12" * 32}, 24, "leave out --python-archive"),
    ],
)
def test_release_conditions(make_tiny, upload, target: Reference, faulty, labels, code: int, said: str) -> None:
    done = upload(make_tiny(labels=PINNED | labels), "--release", f"v{VERSION}")
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert faulty.count("(PUT|PATCH) ") == 0, "nothing was sent"
    pushed = upload(make_tiny(labels=PINNED | labels), "--no-promote", "--json")
    name = target.at(json.loads(pushed.stdout)["pushed"]["image"]["digest"])
    assert tooling("promote", name, "--tag", "main", "--release", f"v{VERSION}").returncode == code
    assert digest_of(target, "main") is None


def test_a_record_that_cannot_be_written_stops_before_anything_is_pushed(make_tiny, upload, target, tmp_path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("no folder")
        place = tmp_path / "file" / "release.json"
    else:
        (tmp_path / "folder").mkdir(mode=0o500)
        place = tmp_path / "folder" / "release.json"
    done = upload(make_tiny(), "--release-file", str(place))
    assert (done.returncode, done.stdout) in ((30, ""), (1, "")), done.stderr
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
        (("--upload", "--repo", "r.example/x", "--no-promote", "--latest"), "python -m tooling promote"),
        (("--upload", "--repo", "r.example/x", "--latest"), "comes with a release"),
        (("--upload", "--repo", "r.example/x", "--release", "newest"), "three numbers"),
        (("--validate", "medium"), "--validate medium: nvidia-smi lists no GPU here"),
    ],
)
def test_options_that_cannot_be_meant(docker_engine, options: tuple[str, ...], said: str, monkeypatch) -> None:
    # Without NVIDIA's programs, wherever the test runs.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/nonexistent")
    done = tooling("image", "--accelerator", "cpu", *options)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
