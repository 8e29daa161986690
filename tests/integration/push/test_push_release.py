"""The whole way of `docker/build.py --upload`, with images that are small enough to wait for."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tooling.core import files
from tooling.image import release
from tooling.image.reference import LABEL, OCI, Reference
from tooling.image.registry import Registry

from .conftest import PINNED, VERSION, tooling

pytestmark = pytest.mark.stand_in("a registry on this machine")


def test_upload(make_tiny, upload, target: Reference, there: Registry, tmp_path: Path) -> None:
    done = upload(make_tiny("words"))

    assert done.returncode == 0, done.stderr
    document = files.read_document(tmp_path / "release.json", release.SCHEMA)
    digest = document["image"]["digest"]
    assert f"digest  {digest}" in done.stdout
    assert re.search(r"^pushed  \d+\.\d MB to pull$", done.stdout, re.MULTILINE)
    pull = re.search(r"^pull    (docker pull .*)$", done.stdout, re.MULTILINE)[1]
    assert pull == f"docker pull {target.at(digest)}"
    assert there.digest("v1") == there.digest(document["image"]["candidate"]) == digest


def test_a_dirty_tree_is_pushed_only_where_that_is_meant(make_tiny, there: Registry, target: Reference) -> None:
    for labels, code in ((PINNED | {f"{OCI}.revision": "ab" * 20 + "-dirty"}, 3), (PINNED, 0)):
        image = make_tiny(labels=labels)
        image.tag(*target)
        options = ("--no-build", "--upload", "--repo", target.repository, "--tag", "v1")
        done = tooling("image", *options)
        assert done.returncode == code, done.stderr
        assert code == 0 or "this repository: has changes that are not committed" in done.stderr
        assert code == 0 or "--allow-dirty" in done.stderr
        assert (there.digest("v1") is None) == (code != 0)


def test_push_now_promote_later(make_tiny, upload, target: Reference, there: Registry, faulty, tmp_path: Path) -> None:
    done = upload(make_tiny("words"), "--no-promote", "--json")
    assert done.returncode == 0, done.stderr
    image = json.loads(done.stdout)["pushed"]["image"]
    assert image["tags"] == []
    assert there.digest("v1") is None
    faulty.requests.clear()

    name = target.at(image["digest"])
    promoted = tooling("promote", name, "--tag", "main", "--latest", "--release", f"v{VERSION}")

    assert promoted.returncode == 0, promoted.stderr
    tags = {line.partition(":")[0] for line in promoted.stdout.splitlines()}
    assert tags == {"main", f"v{VERSION}", f"v{VERSION.rpartition('.')[0]}", "latest"}
    assert {there.digest(tag) for tag in tags} == {image["digest"]}
    assert image["candidate"] == f"sha-abababababab-{image['id'][7:19]}"
    assert there.digest(image["candidate"]) == image["digest"]


@pytest.mark.parametrize(
    ("labels", "code", "line"),
    [
        ({f"{OCI}.base.digest": "unpinned"}, 3, "has no digest"),
        ({f"{LABEL}.target": "devcontainer"}, 2, f"add --tag devcontainer-v{VERSION}"),
    ],
)
def test_release_conditions(
    make_tiny, upload, target: Reference, there: Registry, faulty, labels, code: int, line: str
) -> None:
    done = upload(make_tiny(labels=PINNED | labels), "--release", f"v{VERSION}")
    assert done.returncode == code, done.stderr
    assert line in done.stderr
    assert faulty.count("(POST|PUT|PATCH) ") == 0, "nothing was sent"
    pushed = upload(make_tiny(labels=PINNED | labels), "--no-promote", "--json", "--allow-dirty")
    name = target.at(json.loads(pushed.stdout)["pushed"]["image"]["digest"])
    assert tooling("promote", name, "--tag", "main", "--release", f"v{VERSION}").returncode == code
    assert there.digest("main") is None


def test_a_record_that_cannot_be_written_stops_before_anything_is_pushed(
    make_tiny, upload, there: Registry, tmp_path
) -> None:
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("no folder")
        place = tmp_path / "file" / "release.json"
    else:
        (tmp_path / "folder").mkdir(mode=0o500)
        place = tmp_path / "folder" / "release.json"
    done = upload(make_tiny(), "--release-file", str(place))
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert str(place.parent) in done.stderr
    assert there.digest("v1") is None


def test_release(make_tiny, upload, target: Reference, there: Registry, tmp_path: Path) -> None:
    done = upload(make_tiny(), "--release", f"v{VERSION}", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "release.json").read_text())
    assert json.loads(done.stdout)["pushed"] == document
    assert document["labels"] == PINNED
    assert [move["tag"] for move in document["image"]["tags"]] == [
        "v1",
        f"v{VERSION}",
        f"v{VERSION.rpartition('.')[0]}",
    ]
