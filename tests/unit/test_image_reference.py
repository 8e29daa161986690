from __future__ import annotations

import pytest

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
