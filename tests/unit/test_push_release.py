"""What a release must not be made of, and what its notes say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tooling.ci import steps
from tooling.core import errors, files
from tooling.image import release
from tooling.image.reference import LABEL, OCI, ImageLock
from tooling.sources.manifest import Pin

GOOD = {
    f"{OCI}.revision": "ab" * 20,
    f"{OCI}.version": "0.3.0",
    f"{OCI}.base.digest": "sha256:" + "cd" * 32,
    f"{LABEL}.maxtext.revision": "ef" * 20,
    f"{LABEL}.python": f"standalone sha256:{'ab' * 32}",
    f"{LABEL}.target": "runtime",
    f"{LABEL}.accelerator": "cuda12 12.8.90",
}
FULL = Pin("1", "a" * 40, "b" * 40, patched_commit="c" * 40)
BAZELS = {f"bazel linux/{machine}": {"url": "https://example.org/b", "sha256": None} for machine in ("amd64", "arm64")}
IMAGES = ImageLock({}, BAZELS | {"python linux/amd64": {"url": "https://example.org/python", "sha256": "ab" * 32}})


def check(labels: dict[str, str], pins: dict[str, Pin], images: ImageLock = IMAGES, **changes: Any) -> None:
    options = {"version": "v0.3.0", "tag": "main", "latest": False} | changes
    release.check_release(options.pop("version"), labels, (pins, images), **options)


def get_refusals(labels: dict[str, str], pins: dict[str, Pin], images: ImageLock = IMAGES, **changes: Any) -> list[str]:
    with pytest.raises(ExceptionGroup) as error:
        check(labels, pins, images, **changes)
    return list(map(str, error.value.exceptions))


def test_faults_of_a_release() -> None:
    check(GOOD, {"maxtext": FULL})
    check(GOOD | {f"{LABEL}.python": "3.13.5 of the base"}, {"maxtext": FULL})
    # Bytes count, not the name of a commit: a tree is its bytes, and a commit fixes its tree.
    for pin in (Pin("1", None, "b" * 40), Pin("1", "a" * 40, None)):
        check(GOOD, {"maxtext": pin})
    (line,) = get_refusals(GOOD, {"maxtext": Pin("1", None, None)})
    assert "neither commit nor tree; run `.venv/bin/python -m tooling lock maxtext 1`" in line
    jax = {"jax": Pin("1", None, None)}
    check(GOOD, jax)  # wheels need no sources of jaxlib, and no Bazel
    line, bazel = get_refusals(GOOD | {f"{LABEL}.jaxlib": "source Release"}, jax)
    assert line.startswith("no release: jax:")
    assert "bazel linux/amd64: images.lock has no sha256" in bazel
    base = {f"{OCI}.base.name": "docker.io/nvidia/cuda:12.8.1", f"{OCI}.base.digest": "unpinned"}
    (line,) = get_refusals(GOOD | base, {})
    assert "has no digest; write the one that `docker buildx imagetools inspect docker.io/nvidia/cuda:12.8.1`" in line
    (line,) = get_refusals(GOOD | {f"{OCI}.revision": "ab" * 20 + "-dirty"}, {})
    assert "this repository: has changes that are not committed" in line
    (line,) = get_refusals(GOOD, {}, version="v0.4.0")
    assert "the library says 0.3.0; make them agree" in line
    (line,) = get_refusals(GOOD | {f"{LABEL}.python": f"standalone sha256:{'cd' * 32}"}, {})
    assert line.startswith(f"no release: Python: sha256 {'cd' * 32} of the standalone one is not in images.lock; leave")
    assert len(get_refusals({}, {"maxtext": Pin("1", None, None)})) == 5


def test_tags_of_a_release_promise_an_image() -> None:
    """``latest`` was an image for CPUs, and ``v0.3.0`` a devcontainer."""
    check(GOOD, {}, latest=True)
    cpu, tools = {f"{LABEL}.accelerator": "cpu"}, {f"{LABEL}.target": "devcontainer"}
    check(GOOD | cpu, {})
    (line,) = get_refusals(GOOD | cpu, {}, latest=True)
    assert "--latest is the image for GPUs that runs, and this is runtime, cpu" in line
    check(GOOD | tools, {}, tag="devcontainer-v0.3.0")
    (line,) = get_refusals(GOOD | tools, {})
    assert line.endswith("this is devcontainer; add --tag devcontainer-v0.3.0")


@pytest.mark.parametrize("jaxlib", ["wheel", "source Release"])
@pytest.mark.parametrize("platform", ["amd64", "arm64"])
def test_everything_that_this_repository_releases_is_pinned(root: Path, jaxlib: str, platform: str) -> None:
    """A Bazel alone is not: no file that was read has its checksum."""
    pins, images = release.load_locks(root)
    assert all(pin.digest for pin in images.images.values())
    python = f"standalone sha256:{images.files[f'python linux/{platform}']['sha256']}"
    labels = GOOD | {f"{LABEL}.jaxlib": jaxlib, f"{LABEL}.python": python}
    if (jaxlib, platform) == ("source Release", "arm64"):
        (line,) = get_refusals(labels, pins, images)
        assert line == "no release: bazel linux/arm64: images.lock has no sha256; write it there"
    else:
        check(labels, pins, images)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', '{"format": 4, "colour": 1}', "{"])
def test_a_record_that_no_upload_wrote_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "release.json").write_text(text)
    with pytest.raises(errors.SourceError, match=r"^release\.json: .*; docker/build\.py --upload writes it$"):
        files.read_document(tmp_path / "release.json", release.SCHEMA, "docker/build.py --upload writes it")


def test_notes_say_how_to_begin_and_which_commits_nobody_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labels, digest = {f"{OCI}.version": "0.1.0", f"{LABEL}.accelerator": "cpu"}, "sha256:" + "ab" * 32
    image = {"repository": "ghcr.io/some-lab/multimesh-jax", "pull": "docker pull it", "digest": digest, "id": digest,
             "bytes": 1, "candidate": "sha-x", "tags": []}  # fmt: skip
    check = {"job": "small", "verdict": "ok"}
    document = {"format": 4, "created": "2026-01-01", "image": image, "check": check, "labels": labels}
    (tmp_path / "release.json").write_text(json.dumps(document))
    pin = {"version": "0.2.5", "commit": None, "tree": "f" * 40}
    (tmp_path / "sources.lock").write_text(json.dumps({"components": {"maxtext": pin}}))
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    steps.run_notes(argparse.Namespace(tag="v0.1.0", file=tmp_path / "release.json", gpu=False))
    text = capsys.readouterr().out
    assert f"maxtext 0.2.5 is pinned by its bytes (tree {'f' * 40}); the commit of its tag was read nowhere." in text
    assert text.startswith("```console\ndocker pull it\ndocker run --rm ghcr.io/some-lab/multimesh-jax:v0.1.0 /opt/")
