"""What a release must not be made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tooling.core import errors, files
from tooling.image import release
from tooling.image.reference import ImageLock
from tooling.sources.manifest import Pin

OCI = "org.opencontainers.image"
GOOD = {
    f"{OCI}.revision": "ab" * 20,
    f"{OCI}.version": "0.3.0",
    f"{OCI}.base.digest": "sha256:" + "cd" * 32,
    "io.github.multimesh-jax.maxtext.revision": "ef" * 20,
    "io.github.multimesh-jax.python": f"standalone sha256:{'ab' * 32}",
    "io.github.multimesh-jax.target": "runtime",
    "io.github.multimesh-jax.accelerator": "cuda12 12.8.90",
}
FULL = Pin("1", "a" * 40, "b" * 40, patched_commit="c" * 40)
BAZELS = {f"bazel linux/{machine}": {"url": "https://example.org/b", "sha256": None} for machine in ("amd64", "arm64")}
IMAGES = ImageLock({}, BAZELS | {"python linux/amd64": {"url": "https://example.org/python", "sha256": "ab" * 32}})


def check(labels: dict[str, str], pins: dict[str, Pin], images: ImageLock = IMAGES, **changes: Any) -> None:
    options = {"version": "v0.3.0", "tag": "main", "latest": False} | changes
    release.check_release(options.pop("version"), labels, (pins, images), **options)


def refused(labels: dict[str, str], pins: dict[str, Pin], images: ImageLock = IMAGES, **changes: Any) -> list[str]:
    with pytest.raises(ExceptionGroup) as caught:
        check(labels, pins, images, **changes)
    return list(map(str, caught.value.exceptions))


def test_faults_of_a_release() -> None:
    check(GOOD, {"maxtext": FULL})
    check(GOOD | {"io.github.multimesh-jax.python": "3.13.5 of the base"}, {"maxtext": FULL})
    # Bytes count, not the name of a commit: a tree is its bytes, and a commit fixes its tree.
    for pin in (Pin("1", None, "b" * 40), Pin("1", "a" * 40, None)):
        check(GOOD, {"maxtext": pin})
    (line,) = refused(GOOD, {"maxtext": Pin("1", None, None)})
    assert "neither commit nor tree; run `.venv/bin/python -m tooling lock maxtext 1`" in line
    jax = {"jax": Pin("1", None, None)}
    check(GOOD, jax)  # wheels need no sources of jaxlib, and no Bazel
    line, bazel = refused(GOOD | {"io.github.multimesh-jax.jaxlib": "source Release"}, jax)
    assert line.startswith("no release: jax:")
    assert "bazel linux/amd64: images.lock has no sha256" in bazel
    base = {f"{OCI}.base.name": "docker.io/nvidia/cuda:12.8.1", f"{OCI}.base.digest": "unpinned"}
    (line,) = refused(GOOD | base, {})
    assert "has no digest; write the one that `docker buildx imagetools inspect docker.io/nvidia/cuda:12.8.1`" in line
    (line,) = refused(GOOD | {f"{OCI}.revision": "ab" * 20 + "-dirty"}, {})
    assert "this repository: has changes that are not committed" in line
    (line,) = refused(GOOD, {}, version="v0.4.0")
    assert "the library says 0.3.0; make them agree" in line
    (line,) = refused(GOOD | {"io.github.multimesh-jax.python": f"standalone sha256:{'cd' * 32}"}, {})
    assert line.startswith(f"no release: Python: sha256 {'cd' * 32} of the standalone one is not in images.lock; leave")
    assert len(refused({}, {"maxtext": Pin("1", None, None)})) == 5


def test_tags_of_a_release_promise_an_image() -> None:
    """``latest`` was an image for CPUs, and ``v0.3.0`` a devcontainer."""
    check(GOOD, {}, latest=True)
    cpu, tools = ({f"io.github.multimesh-jax.{name}": value} for name, value in
                  (("accelerator", "cpu"), ("target", "devcontainer")))  # fmt: skip
    check(GOOD | cpu, {})
    assert (
        "--latest is the image for GPUs that runs, and this is runtime, cpu" in refused(GOOD | cpu, {}, latest=True)[0]
    )
    check(GOOD | tools, {}, tag="devcontainer-v0.3.0")
    (line,) = refused(GOOD | tools, {})
    assert line.endswith("this is devcontainer; add --tag devcontainer-v0.3.0")


@pytest.mark.parametrize("jaxlib", ["wheel", "source Release"])
@pytest.mark.parametrize("platform", ["amd64", "arm64"])
def test_everything_that_this_repository_releases_is_pinned(root: Path, jaxlib: str, platform: str) -> None:
    """But for a Bazel: no file that was read says its checksum."""
    pins, images = release.load_locks(root)
    assert all(pin.digest for pin in images.images.values())
    python = f"standalone sha256:{images.files[f'python linux/{platform}']['sha256']}"
    labels = GOOD | {"io.github.multimesh-jax.jaxlib": jaxlib, "io.github.multimesh-jax.python": python}
    if (jaxlib, platform) == ("source Release", "arm64"):
        (line,) = refused(labels, pins, images)
        assert line == "no release: bazel linux/arm64: images.lock has no sha256; write it there"
    else:
        check(labels, pins, images)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', '{"format": 4, "colour": 1}', "{"])
def test_a_record_that_no_upload_wrote_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "release.json").write_text(text)
    with pytest.raises(errors.SourceError, match=r"^release\.json: .*; docker/build\.py --upload writes it$"):
        files.read_document(tmp_path / "release.json", release.SCHEMA, "docker/build.py --upload writes it")
