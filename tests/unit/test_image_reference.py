from __future__ import annotations

import pytest

from tooling.core import errors
from tooling.image import reference


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
    ],
)
def test_repo_name_and_tag_make_a_name(repo: str | None, name: str | None, tag: str, expected: str) -> None:
    assert str(reference.make(repo, name, tag)) == expected


def test_a_repository_is_lower_cased_and_a_tag_is_not() -> None:
    assert str(reference.make("GHCR.io/Owner/MultiMesh-JAX", None, "RC1")) == "ghcr.io/owner/multimesh-jax:RC1"


@pytest.mark.parametrize(
    "tag",
    [
        "",
        "-rf",
        ".hidden",
        "a b",
        "a;reboot",
        "$(id)",
        "`id`",
        "a:b",
        "a/b",
        "a@sha256:0",
        "t\n",
        "é",
        "x" * 129,
        "--tag",
    ],
)
def test_poisoned_tags_are_refused(tag: str) -> None:
    with pytest.raises(errors.UsageError, match="choose another --tag"):
        reference.make("ghcr.io/o/i", None, tag)


@pytest.mark.parametrize(
    "repo",
    [
        "",
        "https://ghcr.io/o/i",
        "user:pass@host.example/i",
        "ghcr.io//i",
        "ghcr.io/o/../i",
        "/etc/passwd",
        "o/i/",
        "o/i:tag",
        "o/i@sha256:0",
        "o/i;reboot",
        "o/$(id)",
        "o/ i",
        "o/i\n",
        "-o/i",
        "o/-i",
        "o/i-",
        "o/a..b",
        "host.example:port/i",
        "o/" + "i" * 300,
    ],
)
def test_poisoned_repositories_are_refused(repo: str) -> None:
    with pytest.raises(errors.UsageError):
        reference.make(repo, None, "T")


def test_an_image_is_named_by_its_digest() -> None:
    made, digest = reference.make("ghcr.io/o/i", None, "1"), "sha256:" + "0" * 64
    assert made.at(digest) == f"ghcr.io/o/i@{digest}"
    with pytest.raises(errors.UsageError, match="is not a digest"):
        made.at("latest")
