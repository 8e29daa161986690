"""Paths, links and urls: what is let through, and what never is."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tooling.sources import git
from tooling.sources.paths import link_fault, path_fault

parts = st.sampled_from(["..", ".", "", "a", "b", ".git", ".GIT", "git~1", "c:d", "\u200c.git"])
paths = st.lists(parts, min_size=1, max_size=6).map("/".join)


@given(paths)
def test_accepted_path_stays_inside_and_out_of_git(path: str) -> None:
    if path_fault(path) is None:
        assert posixpath.normpath(path) == path
        assert not path.startswith(("/", ".."))
        assert "git" not in path.lower()


@given(st.lists(st.sampled_from(["a", "b"]), max_size=3), paths)
def test_accepted_link_points_inside(folders: list[str], target: str) -> None:
    path = "/".join([*folders, "link"])
    if link_fault(path, target) is None:
        end = posixpath.normpath(posixpath.join("/root", *folders, target))
        assert (end + "/").startswith("/root/")


@pytest.mark.parametrize("path", ["src", "src/maxtext", "a.git/b", ".github/workflows", ".gitignore", "a b", "ünicode"])
def test_ordinary_paths_pass(path: str) -> None:
    assert path_fault(path) is None


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/jax-ml/jax.git",
        "https://example.org:8443/a/b.git",
        "http://127.0.0.1:8000/a.git",
        "http://[::1]:8000/a.git",
        "ssh://git@example.org/a.git",
        "git://example.org/a.git",
        "file:///srv/with blank/a.git",
    ],
)
def test_ordinary_urls_pass(url: str) -> None:
    assert git.url_fault(url) is None


@given(st.text(alphabet="-uox:/@.=e ext[]\n\\", max_size=20))
def test_accepted_url_is_no_option_and_no_helper(url: str) -> None:
    if git.url_fault(url) is None:
        assert url.startswith(tuple(f"{scheme}://" for scheme in git.SCHEMES))
