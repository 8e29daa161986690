"""Urls: which are let through, and which never are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tooling.sources import git


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
