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

LINE = f"v{VERSION.rpartition('.')[0]}"
pytestmark = pytest.mark.stand_in("a registry on this machine")


def test_upload_of_a_clean_tree(make_tiny, uploading, target: Reference, remote: Registry, tmp_path: Path) -> None:
    dirty = make_tiny(labels=PINNED | {f"{OCI}.revision": "ab" * 20 + "-dirty"})
    refusal = tooling(*uploading(dirty), code=3).stderr
    assert "this repository: has changes that are not committed" in refusal
    assert "--allow-dirty" in refusal
    assert remote.digest("v1") is None
    output = tooling(*uploading(make_tiny("words"))).stdout
    document = files.read_document(tmp_path / "release.json", release.SCHEMA)
    digest = document["image"]["digest"]
    assert f"digest  {digest}" in output
    assert re.search(r"^pushed  \d+\.\d MB to pull$", output, re.MULTILINE)
    assert re.search(r"^pull    (.*)$", output, re.MULTILINE)[1] == f"docker pull {target.at(digest)}"
    assert remote.digest("v1") == remote.digest(document["image"]["candidate"]) == digest


def test_push_now_promote_later(make_tiny, uploading, target: Reference, remote: Registry) -> None:
    image = json.loads(tooling(*uploading(make_tiny("words"), "--no-promote", "--json")).stdout)["pushed"]["image"]
    assert image["tags"] == []
    assert remote.digest("v1") is None

    name = target.at(image["digest"])
    promotion = tooling("promote", name, "--tag", "main", "--latest", "--release", f"v{VERSION}")

    tags = {line.partition(":")[0] for line in promotion.stdout.splitlines()}
    assert tags == {"main", f"v{VERSION}", LINE, "latest"}
    assert {remote.digest(tag) for tag in tags} == {image["digest"]}
    assert image["candidate"] == f"sha-abababababab-{image['id'][7:19]}"
    assert remote.digest(image["candidate"]) == image["digest"]


@pytest.mark.parametrize(
    ("labels", "code", "line"),
    [
        ({f"{OCI}.base.digest": "unpinned"}, 3, "has no digest"),
        ({f"{LABEL}.target": "devcontainer"}, 2, f"add --tag devcontainer-v{VERSION}"),
    ],
)
def test_release_conditions(
    make_tiny, uploading, target: Reference, remote: Registry, faulty, labels, code: int, line: str
) -> None:
    image, of_it = make_tiny(labels=PINNED | labels), ("--release", f"v{VERSION}")
    assert line in tooling(*uploading(image, *of_it), code=code).stderr
    assert faulty.count("(POST|PUT|PATCH) ") == 0, "nothing was sent"
    document = tooling(*uploading(image, "--no-promote", "--json", "--allow-dirty")).stdout
    name = target.at(json.loads(document)["pushed"]["image"]["digest"])
    tooling("promote", name, "--tag", "main", *of_it, code=code)
    assert remote.digest("main") is None


def test_a_record_that_cannot_be_written_stops_before_anything_is_pushed(
    make_tiny, uploading, remote: Registry, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("no folder") if os.geteuid() == 0 else folder.mkdir(mode=0o500)
    process = tooling(*uploading(make_tiny(), "--release-file", str(folder / "release.json")), code=1)
    assert str(folder) in process.stderr
    assert remote.digest("v1") is None


def test_release(make_tiny, uploading, tmp_path: Path) -> None:
    record = json.loads(tooling(*uploading(make_tiny(), "--release", f"v{VERSION}", "--json")).stdout)["pushed"]
    assert record == json.loads((tmp_path / "release.json").read_text())
    assert record["labels"] == PINNED
    assert [move["tag"] for move in record["image"]["tags"]] == ["v1", f"v{VERSION}", LINE]
