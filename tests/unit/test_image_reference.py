"""Names of images, and the one rule for their tags."""

from __future__ import annotations

import pytest

from tooling.core import errors
from tooling.image import reference

NAME = reference.make("r.example/team", "image", "main")


@pytest.mark.parametrize(
    ("repo", "name", "tag", "expected"),
    [
        ("ghcr.io/nv-legate/multimesh-jax", None, "v0.2", "ghcr.io/nv-legate/multimesh-jax:v0.2"),
        ("ghcr.io/nv-legate", "multimesh-jax", "v0.2", "ghcr.io/nv-legate/multimesh-jax:v0.2"),
        ("localhost:5000/a/b", None, "T", "localhost:5000/a/b:T"),
        ("127.0.0.1:5001", "a__b.c-d", "T", "127.0.0.1:5001/a__b.c-d:T"),
        (None, None, "local", "multimesh-jax:local"),
        (None, "mine", "local", "mine:local"),
        ("owner/image", None, "1", "owner/image:1"),
        ("GHCR.io/Owner/MultiMesh-JAX", None, "RC1", "ghcr.io/owner/multimesh-jax:RC1"),
    ],
)
def test_repo_name_and_tag_make_a_name(repo: str | None, name: str | None, tag: str, expected: str) -> None:
    assert str(reference.make(repo, name, tag)) == expected


def test_a_candidate_is_named_by_its_commit_and_its_id() -> None:
    commit, image_id = "0123456789ab" + "c" * 28, "sha256:" + "d" * 64
    labels = {"org.opencontainers.image.revision": commit}
    assert reference.name_candidate(labels, image_id, checked=True) == "sha-0123456789ab-dddddddddddd"
    assert reference.name_candidate(labels, image_id, checked=False).endswith("-unchecked")
    dirty = {"org.opencontainers.image.revision": f"{commit}-dirty"}
    assert reference.name_candidate(dirty, image_id, checked=True) == "sha-0123456789ab-dirty-dddddddddddd"


def test_tags_of_a_release_end_with_latest() -> None:
    assert reference.list_tags(NAME, latest=False, version=None) == ("main",)
    assert reference.list_tags(NAME, latest=True, version="v1.20.3") == ("main", "v1.20.3", "v1.20", "latest")
    assert reference.list_tags(NAME.tagged("1.2.3"), latest=False, version="1.2.3") == ("1.2.3", "1.2")
    of_a_target = NAME.tagged("devcontainer-v1.2.3")
    assert reference.list_tags(of_a_target, latest=False, version="v1.2.3") == (of_a_target.tag, "devcontainer-v1.2")
    for tag in ("1.2.3-rc1", "main", "v1", "py3.13"):
        assert reference.list_tags(NAME.tagged(tag), latest=False, version=None) == (tag,)


@pytest.mark.parametrize(
    ("tag", "latest", "version"),
    [
        *((tag, False, None) for tag in ("v1.2.3", "1.2.3", "devcontainer-v1.2.3", "v0.1", "dev-v0.1", "latest")),
        *((tag, False, "v1.2.3") for tag in ("v1.2.4", "1.2.3", "v1.3", "dev-v1.3", "sha-0123")),
        *(("main", False, version) for version in ("1.2", "v1.2.3-rc1", "latest", "v1.2.3\n", "")),
        ("my-branch", True, None),
        ("sha-0123", False, None),
    ],
)
def test_only_a_release_or_a_push_gives_the_tags_of_one(tag: str, latest: bool, version: str | None) -> None:
    with pytest.raises(errors.OptionError, match=r"add --release|names the commit|three numbers"):
        reference.list_tags(NAME.tagged(tag), latest=latest, version=version)
