"""What is tried again, how often and after how long; and what a complaint of an engine means."""

from __future__ import annotations

import pytest

from tooling.core import errors
from tooling.image import reference, tags
from tooling.image.tags import Transient


class Flaky:
    """Fails some times, then returns its name."""

    def __init__(self, *faults: Exception) -> None:
        self.faults, self.calls = list(faults), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.faults:
            raise self.faults.pop(0)
        return "done"


def test_waits_grow() -> None:
    waits: list[float] = []
    action = Flaky(*[Transient("answer 503")] * 4)
    assert tags.retrying(action, "x", waits.append) == "done"
    assert action.calls == 5
    for wait, longest in zip(waits, (1, 2, 4, 8), strict=True):
        assert longest * 2 / 3 <= wait <= longest


def test_the_last_failure_is_an_error() -> None:
    action = Flaky(*[Transient("answer 503")] * 9)
    with pytest.raises(errors.RegistryError, match="x: answer 503, 6 times; try again later"):
        tags.retrying(action, "x", lambda wait: None)
    assert action.calls == 6


def test_other_errors_are_not_waited_for() -> None:
    action = Flaky(errors.RegistryError("no"))
    with pytest.raises(errors.RegistryError, match="no"):
        tags.retrying(action, "x", lambda wait: pytest.fail("waited"))
    assert action.calls == 1


def test_a_candidate_is_named_by_its_commit_and_what_is_unusual() -> None:
    name, commit = reference.make("r.example/team", "image", "main"), "0123456789ab" + "c" * 28
    labels = {"org.opencontainers.image.revision": commit}
    assert tags.candidate(name, labels, "sha256:" + "d" * 64).tag == "sha-0123456789ab"
    assert tags.candidate(name, {}, "sha256:" + "d" * 64).tag == "sha-dddddddddddd"
    more = {"target": "dev", "accelerator": "cpu", "jaxlib": "source Release"}
    odd = {f"io.github.multimesh-jax.{key}": value for key, value in more.items()}
    odd["org.opencontainers.image.revision"] = f"{commit}-dirty"
    assert tags.candidate(name, odd, "").tag == "sha-0123456789ab-dirty-dev-cpu-source"


@pytest.mark.parametrize(
    ("said", "again"),
    [
        ("received unexpected HTTP status: 503 Service Unavailable", True),
        ("toomanyrequests: You have reached your pull rate limit", True),
        ('error parsing HTTP 429 response body: unexpected end of JSON input: ""', True),
        ("unexpected status from PUT request to http://r.example/v2/x/manifests/sha256:12: 503 Busy", True),
        ("unexpected status from PUT request to http://r.example/v2/503/x: 403 Forbidden", False),
        ('Put "https://r.example/v2/x/blobs/uploads/1": EOF', True),
        ("write tcp 10.0.0.1:1->10.0.0.2:443: write: connection reset by peer", True),
        (
            'Put "https://registry.example.org/v2/a": write tcp 10.0.0.1:1: use of closed network connection',
            True,
        ),
        ('Get "https://r.example/v2/": net/http: TLS handshake timeout', True),
        ("dial tcp: lookup r: no such host", True),
        ("blob upload unknown", True),
        ("unauthorized: authentication required", False),
        ("denied: requested access to the resource is denied", False),
        ('error parsing HTTP 403 response body: unexpected end of JSON input: ""', False),
        ("name unknown: repository not found", False),
        ("An image does not exist locally with the tag: x", False),
        ("something that no list has", False),
    ],
)
def test_complaints_of_engines(said: str, again: bool) -> None:
    fault = tags.fault(f"a line before\n{said}\n", "r/x:t")
    assert isinstance(fault, Transient if again else errors.RegistryError)
    assert said in str(fault)


def test_tags_of_a_release_end_with_latest() -> None:
    name = reference.make("r.example/team", "image", "main")
    assert tags.tags(name, latest=False, version=None) == ("main",)
    assert tags.tags(name, latest=True, version="v1.20.3") == ("main", "v1.20.3", "v1.20", "latest")
    assert tags.tags(name.tagged("1.2.3"), latest=False, version="1.2.3") == ("1.2.3", "1.2")
    of_a_target = name.tagged("devcontainer-v1.2.3")
    assert tags.tags(of_a_target, latest=False, version="v1.2.3") == (of_a_target.tag, "devcontainer-v1.2")
    for tag, version in (("v1.2.3", None), ("1.2.3", "v1.2.3"), (of_a_target.tag, None), ("v1.2.4", "v1.2.3")):
        with pytest.raises(errors.UsageError, match=f"--tag {tag}: is the tag of a release; add --release"):
            tags.tags(name.tagged(tag), latest=False, version=version)
    for tag, latest in (("my-branch", True), ("latest", False)):
        with pytest.raises(errors.UsageError, match="latest: comes with a release; add --release"):
            tags.tags(name.tagged(tag), latest=latest, version=None)
    for version in ("1.2", "v1.2.3-rc1", "latest", "v1.2.3\n", ""):
        with pytest.raises(errors.UsageError, match="three numbers"):
            tags.tags(name, latest=False, version=version)
