"""What a release must not be made of, and what ``release.json`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tooling.core import errors
from tooling.image import reference, release
from tooling.image.digests import FilePin, ImageLock
from tooling.image.request import Built, ImageSpec
from tooling.image.smoke import Check
from tooling.image.tags import Moved, Pushed
from tooling.sources.manifest import Pin

OCI = "org.opencontainers.image"
GOOD = {
    f"{OCI}.revision": "ab" * 20,
    f"{OCI}.version": "0.3.0",
    f"{OCI}.base.digest": "sha256:" + "cd" * 32,
    "io.github.multimesh-jax.maxtext.revision": "ef" * 20,
    "io.github.multimesh-jax.python": "ab" * 32,
}
FULL = Pin("1", "a" * 40, "b" * 40, patched_commit="c" * 40, patched_tree="d" * 40)
IMAGES = ImageLock(
    {},
    {
        "bazel linux/amd64": FilePin("https://example.org/bazel", None),
        "bazel linux/arm64": FilePin("https://example.org/bazel", None),
        "python linux/amd64": FilePin("https://example.org/python", "ab" * 32),
    },
)
DIGEST = "sha256:" + "12" * 32


def refused(labels: dict[str, str], pins: dict[str, Pin], *unpinned: str, version: str = "v0.3.0") -> list[str]:
    with pytest.raises(errors.SeveralErrors) as caught:
        release.check_release(version, labels, (pins, IMAGES), unpinned)
    return list(caught.value.messages)


def test_what_stands_against_a_release() -> None:
    release.check_release("v0.3.0", GOOD, ({"maxtext": FULL}, IMAGES), ())
    # Bytes count, not the name of a commit: a tree is its bytes, and a commit fixes its tree.
    for pin in (Pin("1", None, "b" * 40), Pin("1", "a" * 40, None)):
        release.check_release("v0.3.0", GOOD, ({"maxtext": pin}, IMAGES), ())
    (said,) = refused(GOOD, {"maxtext": Pin("1", None, None)})
    assert "maxtext: sources.lock has neither commit nor tree; run `python -m tooling bump maxtext 1`" in said
    jax = {"jax": Pin("1", None, None)}
    release.check_release("v0.3.0", GOOD, (jax, IMAGES), ())  # wheels need no sources of jaxlib, and no Bazel
    said, bazel = refused(GOOD | {"io.github.multimesh-jax.jaxlib": "source Release"}, jax)
    assert said.startswith("no release: jax:")
    assert "bazel linux/amd64: images.lock has no sha256" in bazel
    (said,) = refused(GOOD, {}, "docker.io/nvidia/cuda:12.8.1")
    assert "has no digest; run `python -m tooling bump images`" in said
    (said,) = refused(GOOD | {f"{OCI}.revision": "ab" * 20 + "-dirty"}, {})
    assert "this repository: has changes that are not committed" in said
    (said,) = refused(GOOD, {}, version="v0.4.0")
    assert "the library says 0.3.0; make them agree" in said
    (said,) = refused(GOOD | {"io.github.multimesh-jax.python": "cd" * 32}, {})
    assert said.startswith(f"no release: Python: sha256 {'cd' * 32} of the standalone one is not in images.lock; leave")
    assert len(refused({}, {"maxtext": Pin("1", None, None)}, "base")) == 6


def test_everything_that_this_repository_releases_is_pinned(root: Path) -> None:
    locks = release.load_locks(root)
    bases = [pin.reference for pin in locks[1].images.values() if pin.digest is None]
    assert release.null_pins(locks, bases, jaxlib_from_source=False) == []
    assert release.null_pins(locks, bases, jaxlib_from_source=True, platform="linux/amd64") == []
    (arm,) = release.null_pins(locks, bases, jaxlib_from_source=True)
    assert arm.startswith("bazel linux/arm64: images.lock has no sha256"), "no file that was read says it"


def test_image_tells_whether_its_base_was_pinned() -> None:
    assert release.null_base(GOOD) == ()
    assert release.null_base({f"{OCI}.base.digest": "unpinned", f"{OCI}.base.name": "debian:12"}) == ("debian:12",)
    assert release.null_base({}) == ("base",)


def document(tmp_path: Path) -> dict[str, Any]:
    name = reference.make("r.example/team", "image", "main")
    spec = ImageSpec(name, "runtime", "cpu", "wheel", "12.8.1", None, "Release", None, None, None)
    built = Built(spec, DIGEST, 10, GOOD, DIGEST, (), 61.27)
    pushed = Pushed(DIGEST, "application/x", 12, 2.0)
    (tmp_path / "sources.lock").write_text("lock")
    return release.record(tmp_path, built, Check("small", 9.5, "ok"), pushed, "sha-abababababab", "v0.3.0")


def test_record_is_what_its_schema_says(tmp_path: Path) -> None:
    said, place = document(tmp_path), tmp_path / "build" / "release.json"
    release.write(place, said)
    assert release.read(place)["image"]["tags"] == [], "before the first tag moves"
    release.note_tags(place, said, [Moved("main", None, DIGEST)])
    read = json.loads((tmp_path / "build" / "release.json").read_text())
    assert read == said
    assert read["image"]["pull"] == f"docker pull r.example/team/image@{read['image']['digest']}"
    assert read["image"]["tags"] == [{"tag": "main", "before": None, "digest": read["image"]["digest"]}]
    assert list(read["locks"]) == ["sources.lock"]
    assert read["seconds"] == {"build": 61.3, "check": 9.5, "push": 2.0}


@pytest.mark.parametrize("wrong", [{"format": 2}, {"extra": 1}, {"version": "newest"}, {"locks": {}}, {"created": 5}])
def test_wrong_record_is_not_written(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        release.write(tmp_path / "release.json", document(tmp_path) | wrong)
    assert not (tmp_path / "release.json").exists()
