from __future__ import annotations

import base64
import json

import pytest

from workflows import errors
from workflows.image import failure
from workflows.image.progress import Steps

BEGIN, END = "2026-01-01T00:00:00.5Z", "2026-01-01T00:00:03Z"


def vertex(digest: str, name: str, **fields: object) -> str:
    return json.dumps({"vertexes": [{"digest": digest, "name": name, **fields}]})


def said(digest: str, text: str) -> str:
    return json.dumps({"logs": [{"vertex": digest, "data": base64.b64encode(text.encode()).decode()}]})


def test_steps_have_a_stage_a_time_and_a_title_without_mounts() -> None:
    steps = Steps()
    name = "[locked 1/2] RUN --mount=type=secret,id=pip.conf     /opt/pip.sh -r /run.txt"
    assert steps.feed(vertex("d1", name)) == []
    (ended,) = steps.feed(vertex("d1", name, started=BEGIN, completed=END))
    assert (ended.title, ended.state) == ("locked 1/2: RUN /opt/pip.sh -r /run.txt", "2.5 s")


def test_cache_hits_are_counted_over_the_steps_of_the_dockerfile() -> None:
    steps = Steps()
    steps.feed(vertex("d0", "[internal] load .dockerignore", started=BEGIN, completed=END))
    steps.feed(vertex("d1", "[python 1/2] FROM docker.io/library/base", started=BEGIN, completed=END))
    steps.feed(vertex("d2", "[python 2/2] RUN a", cached=True))
    steps.feed(vertex("d3", "[runtime 1/1] COPY b", started=BEGIN, completed=END))
    assert steps.counted == (1, 2)


def test_the_builder_of_an_old_client_is_counted_by_its_lines() -> None:
    steps = Steps()
    for line in ("#5 [python 2/2] RUN a", "#5 CACHED", "#6 [runtime 1/1] COPY b", "#6 DONE 0.1s"):
        steps.feed(line)
    assert steps.counted == (1, 2)


def test_the_steps_of_podman_are_counted() -> None:
    steps = Steps()
    for line in ("[1/2] STEP 1/2: FROM a AS b", "--> 1f2e3d4c5b6", "[1/2] STEP 2/2: RUN c", "STEP 1/1: COPY d"):
        steps.feed(line)
    assert steps.counted == (0, 3)


def broken(*lines: str, error: str = "exit code: 1") -> Steps:
    steps = Steps()
    steps.feed(vertex("d1", "[locked 1/1] RUN pip", started=BEGIN))
    for line in lines:
        steps.feed(said("d1", line + "\n"))
    steps.feed(vertex("d1", "[locked 1/1] RUN pip", started=BEGIN, completed=END, error=error))
    steps.feed(vertex("d2", "[other 1/1] RUN x", started=BEGIN, completed=END, error="context canceled"))
    return steps


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", errors.DiskError, "free some space"),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
            errors.IntegrityError,
            "do not use",
        ),
        ("Temporary failure resolving 'archive.example'", errors.NetworkError, "--network"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", errors.NetworkError, "--ca-bundle"),
        ("exec /bin/sh: exec format error", errors.EngineError, "register QEMU"),
        ("error: this base has no Python >= 3.11", errors.BuildError, "this base has no Python >= 3.11"),
        ("something else", errors.BuildError, "something else"),
    ],
)
def test_a_failed_step_is_explained(line: str, kind: type[errors.WorkflowsError], words: str) -> None:
    error = failure.explain(broken("before", line), 1, "base:1")
    assert type(error) is kind
    assert words in str(error)
    assert "locked 1/1: RUN pip" in str(error)


def test_a_base_that_cannot_be_pulled_is_named() -> None:
    steps = Steps()
    steps.feed(vertex("d1", "[python 1/2] FROM docker.io/x/y", error="pull access denied for x/y"))
    error = failure.explain(steps, 1, "docker.io/x/y")
    assert isinstance(error, errors.NetworkError)
    assert str(error).startswith("docker.io/x/y: the base image cannot be fetched")
    assert "--base-image" in str(error)
