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


TAGS = ["", "-rf", ".hidden", "a b", "a;reboot", "$(id)", "`id`", "a:b", "a/b", "a@sha256:0", "t\n", "é", "x" * 129]
REPOSITORIES = [
    "", "https://ghcr.io/o/i", "user:pass@host.example/i", "ghcr.io//i", "ghcr.io/o/../i", "/etc/passwd", "o/i/",
    "o/i:tag", "o/i@sha256:0", "o/i;reboot", "o/$(id)", "o/ i", "o/i\n", "-o/i", "o/-i", "o/i-", "o/a..b",
    "host.example:port/i", "o/" + "i" * 300,
]  # fmt: skip


@pytest.mark.parametrize(
    ("repo", "tag"), [*(("ghcr.io/o/i", tag) for tag in TAGS), *((repo, "T") for repo in REPOSITORIES)]
)
def test_poisoned_names_are_refused(repo: str, tag: str) -> None:
    with pytest.raises(errors.OptionError):
        reference.make(repo, None, tag)


def test_an_image_is_named_by_its_digest() -> None:
    name, digest = reference.make("ghcr.io/o/i", None, "1"), "sha256:" + "0" * 64
    assert name.at(digest) == f"ghcr.io/o/i@{digest}"
    with pytest.raises(errors.OptionError, match="is not a digest"):
        name.at("latest")
