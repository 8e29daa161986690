from __future__ import annotations

import pytest

from tooling.core import errors
from tooling.image import progress
from tooling.image.progress import Steps


def fed(*lines: str) -> Steps:
    steps = Steps()
    for line in lines:
        steps.feed(line)
    return steps


def test_steps_have_a_title_without_mounts() -> None:
    name = "[linux/arm64 locked 1/2] RUN --mount=type=secret,id=pip.conf     /opt/pip.sh -r /run.txt"
    steps = fed(f"#7 {name}", "#7 0.512 Collecting jax", "#7 ...", "#7 DONE 2.5s")
    assert steps.titles == {"7": "locked 1/2: RUN /opt/pip.sh -r /run.txt"}
    assert list(steps.said["7"]) == ["Collecting jax"]
    assert steps.failed is None


def test_cache_hits_are_counted_over_the_steps_of_the_dockerfile() -> None:
    steps = fed(
        "#0 building with default instance using docker driver",
        "#1 [internal] load .dockerignore",
        "#1 DONE 0.0s",
        "#2 [internal] load metadata for docker.io/library/base",
        "#3 [python 1/2] FROM docker.io/library/base",
        "#3 CACHED",
        "#5 [python 2/2] RUN a",
        "#5 CACHED",
        "#6 [runtime 1/1] COPY b",
        "#6 DONE 0.1s",
    )
    assert steps.counted == (1, 2)


def test_what_buildkit_says_is_shown_as_it_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    Steps().show("#5 0.1 a line")
    assert capsys.readouterr() == ("", "#5 0.1 a line\n")


def broken(*lines: str) -> Steps:
    said = [f"#1 0.{number}00 {line}" for number, line in enumerate(lines)]
    command = "executor failed running [/bin/sh -c pip]: exit code: 1"
    metadata = ("#9 [internal] load metadata for docker.io/x/y", "#9 DONE 0.1s")
    return fed(
        *metadata, "#1 [locked 1/1] RUN pip", *said, f"#1 ERROR: {command}", "#2 [other 1/1] RUN x", "#2 CANCELED",
        "------", " > [locked 1/1] RUN pip:", *lines, "------", f"ERROR: failed to solve: {command}",
    )  # fmt: skip


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
        ("error: this base has no Python >= 3.11", errors.BuildError, "failed: this base has no Python >= 3.11"),
        ("something else", errors.BuildError, "something else"),
        (f"error: {'x' * 500} and {'y' * 500} the reason", errors.BuildError, "the reason"),
    ],
)
def test_a_failed_step_is_explained(line: str, kind: type[errors.ToolingError], words: str) -> None:
    error = progress.explain(broken("before", line), 1, "base:1")
    assert type(error) is kind
    assert words in str(error)
    assert "locked 1/1: RUN pip" in str(error)


def test_of_a_long_complaint_the_line_that_says_why_is_told() -> None:
    curl = (
        "curl: (60) SSL certificate problem: unable to get local issuer certificate",
        "More details here: https://curl.example/docs/sslcerts.html",
        "how to fix it, please visit the web page mentioned above.",
    )
    error = progress.explain(broken(*curl), 1, "base:1")
    assert isinstance(error, errors.NetworkError)
    assert "unable to get local issuer certificate" in str(error)
    assert "--ca-bundle" in str(error)


def test_of_pips_complaints_the_exception_is_told() -> None:
    pip = (
        "error: subprocess-exited-with-error",
        "    OSError: no such file: x.py",
        "error: metadata-generation-failed",
        "hint:",
    )
    assert str(progress.explain(broken(*pip), 1, "b")).endswith("failed: OSError: no such file: x.py")


def test_of_apts_complaints_the_cause_is_told() -> None:
    apt = (
        "E: Failed to fetch http://a.example/x.deb  Certificate verification failed",
        "E: Unable to fetch some archives",
    )
    error = progress.explain(broken("Get:1", *apt), 1, "base:1")
    assert isinstance(error, errors.NetworkError)
    assert "(E: Failed to fetch http://a.example/x.deb" in str(error)


@pytest.mark.parametrize(
    "lines",
    [
        ("#3 [internal] load metadata for docker.io/x/y", "#3 ERROR: pull access denied for x/y"),
        ("#3 [python 1/2] FROM docker.io/x/y", "#3 ERROR: failed to copy: connection reset by peer"),
    ],
)
def test_a_base_that_cannot_be_pulled_is_named(lines: tuple[str, ...]) -> None:
    error = progress.explain(fed(*lines), 1, "docker.io/x/y")
    assert isinstance(error, errors.NetworkError)
    assert str(error).startswith("docker.io/x/y: the base image cannot be fetched")
    assert "--base-image" in str(error)
