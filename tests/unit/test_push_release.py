"""What a release must not be made of, and what ``release.json`` says."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tooling.core import errors
from tooling.image import reference, registry, release
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
    (said,) = refused(GOOD, {"maxtext": Pin("1", "a" * 40, None, patched_commit="c", patched_tree="d")})
    assert "maxtext: sources.lock has no tree" in said
    xla = {"xla": Pin("1", "a" * 40, None)}
    release.check_release("v0.3.0", GOOD, (xla, IMAGES), ())  # wheels need no sources of jaxlib, and no Bazel
    said, bazel = refused(GOOD | {"io.github.multimesh-jax.jaxlib": "source Release"}, xla)
    assert said.startswith("no release: xla:")
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


def test_image_tells_whether_its_base_was_pinned() -> None:
    assert release.unpinned(GOOD) == ()
    assert release.unpinned({f"{OCI}.base.digest": "unpinned", f"{OCI}.base.name": "debian:12"}) == ("debian:12",)
    assert release.unpinned({}) == ("base",)


def document(tmp_path: Path) -> dict[str, Any]:
    name = reference.make("r.example/team", "image", "main")
    spec = ImageSpec(name, "runtime", "cpu", "wheel", "12.8.1", None, "Release", None, None, None)
    built = Built(spec, DIGEST, 10, GOOD, DIGEST, (), 61.27, 3, 4)
    pushed = Pushed(DIGEST, "application/x", 12, 2.0)
    (tmp_path / "sources.lock").write_text("lock")
    return release.record(tmp_path, built, Check("small", 9.5, "ok"), pushed, "sha-abababababab", "v0.3.0")


def test_record_is_what_its_schema_says(tmp_path: Path) -> None:
    said, place = document(tmp_path), tmp_path / "build" / "release.json"
    release.write(place, said)
    assert release.read(place)["image"]["tags"] == [], "before the first tag moves"
    release.telling(place, said)([Moved("main", None, DIGEST)])
    read = json.loads((tmp_path / "build" / "release.json").read_text())
    assert read == said
    assert read["image"]["pull"] == f"docker pull r.example/team/image@{read['image']['digest']}"
    assert read["image"]["tags"] == [{"tag": "main", "before": None, "digest": read["image"]["digest"]}]
    assert list(read["locks"]) == ["sources.lock"]
    assert read["seconds"] == {"build": 61.3, "check": 9.5, "push": 2.0}


def test_the_digest_before_a_move_outlives_a_repetition(tmp_path: Path) -> None:
    """A later tag fails, and the same command runs again: the first tag then has our digest already."""
    said, place = document(tmp_path), tmp_path / "release.json"
    assert release.earlier(place, said) == []
    first = Moved("main", "sha256:" + "34" * 32, DIGEST)
    release.telling(place, said)([first])
    again = document(tmp_path)
    assert again["image"]["tags"] == []
    assert release.earlier(place, again) == [first]
    again["image"]["digest"] = "sha256:" + "56" * 32
    assert release.earlier(place, again) == [], "of another image"


@pytest.mark.parametrize("wrong", [{"format": 2}, {"extra": 1}, {"version": "newest"}, {"locks": {}}, {"created": 5}])
def test_wrong_record_is_not_written(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        release.write(tmp_path / "release.json", document(tmp_path) | wrong)
    assert not (tmp_path / "release.json").exists()


@pytest.mark.parametrize(
    ("host", "found"), [("ghcr.io", ("owner", "one")), ("docker.io", ("hub", "three")), ("quay.io", None)]
)
def test_logins_are_found_as_docker_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, found: tuple[str, str] | None
) -> None:
    def entry(user: str, secret: str) -> dict[str, str]:
        return {"auth": base64.b64encode(f"{user}:{secret}".encode()).decode()}

    auths = {"ghcr.io": entry("owner", "one"), "https://index.docker.io/v1/": entry("hub", "three")}
    (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    login = registry.find_login(host)
    assert (login and (login.username, login.password)) == found
    assert login is None or login.password not in f"{login} {login!r}"
