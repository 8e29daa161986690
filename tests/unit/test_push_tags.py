"""The one rule for tags, and which faults of a push pass."""

from __future__ import annotations

import pytest

from tooling.core import errors
from tooling.image import engine, reference
from tooling.image.reference import name_candidate

NAME = reference.make("r.example/team", "image", "main")


def test_a_candidate_is_named_by_its_commit_and_its_difference_from_the_usual_image() -> None:
    commit, image_id = "0123456789ab" + "c" * 28, "sha256:" + "d" * 64
    labels = {"org.opencontainers.image.revision": commit}
    assert name_candidate(labels, image_id, checked=True) == "sha-0123456789ab-dddddddddddd"
    assert name_candidate(labels, image_id, checked=False).endswith("-unchecked")
    more = {"target": "dev", "accelerator": "cpu", "jaxlib": "source Release"}
    odd = {f"io.github.multimesh-jax.{key}": value for key, value in more.items()}
    odd["org.opencontainers.image.revision"] = f"{commit}-dirty"
    assert name_candidate(odd, image_id, checked=True) == "sha-0123456789ab-dirty-dev-cpu-source-dddddddddddd"


@pytest.mark.parametrize(
    ("complaint", "passes"),
    [
        ("received unexpected HTTP status: 503 Service Unavailable", True),
        ("toomanyrequests: You have reached your pull rate limit", True),
        ('Put "https://r.example/v2/x/blobs/uploads/1": EOF', True),
        ("write tcp 10.0.0.1:1->10.0.0.2:443: write: connection reset by peer", True),
        ('Put "https://r.example.org/v2/a": write tcp 10.0.0.1:1: use of closed network connection', True),
        ('Get "https://r.example/v2/": net/http: TLS handshake timeout', True),
        ("dial tcp: lookup r: no such host", True),
        ("unauthorized: authentication required", False),
        ("denied: requested access to the resource is denied", False),
        ('Get "https://r.example/v2/": http: server gave HTTP response to HTTPS client', False),
        ("tls: failed to verify certificate: x509: certificate signed by unknown authority", False),
    ],
)
def test_complaints_of_engines(complaint: str, passes: bool) -> None:
    assert bool(engine._PASSES.search(complaint)) == passes


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
