"""What BuildKit's display tells. The transcripts are in the form that buildx 0.29 and BuildKit of engine 20.10 gave."""

from __future__ import annotations

import pytest

from tooling.core import errors, proc
from tooling.image import build


def result(said: str) -> proc.Result:
    return proc.Result(("docker",), 1, b"", said.encode())


def broken(*lines: str) -> str:
    """What is said where a step fails while another runs; of its lines the last ten come again."""
    step = "[locked 1/1] RUN --mount=type=secret,id=pip.conf     /opt/pip.sh -r /run.txt"
    command = "executor failed running [/bin/sh -c pip]: exit code: 1"
    said = [f"0.{number}00 {line}" for number, line in enumerate(lines)]
    return "\n".join([
        "#9 [internal] load metadata for docker.io/x/y", "#9 DONE 0.1s", "",
        f"#1 {step}", *(f"#1 {line}" for line in said), f"#1 ERROR: {command}", "",
        "#2 [other 1/1] RUN x", "#2 CANCELED",
        "------", f" > {step}:", *said[-10:], "------", f"ERROR: failed to build: failed to solve: {command}", "",
    ])  # fmt: skip


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
    error = build.explain(result(broken("before", line)), "base:1")
    assert type(error) is kind
    assert words in str(error)
    assert str(error).startswith("step `[locked 1/1] RUN /opt/pip.sh -r /run.txt`")


def test_of_a_long_complaint_the_line_that_says_why_is_told() -> None:
    curl = (
        "curl: (60) SSL certificate problem: unable to get local issuer certificate",
        "More details here: https://curl.example/docs/sslcerts.html",
        "how to fix it, please visit the web page mentioned above.",
    )
    error = build.explain(result(broken(*curl)), "base:1")
    assert isinstance(error, errors.NetworkError)
    assert "unable to get local issuer certificate" in str(error)
    assert "--ca-bundle" in str(error)


def test_a_python_that_cannot_be_fetched_may_be_given() -> None:
    said = broken("before", "curl: (6) Could not resolve host: github.com").replace("/opt/pip.sh", "/opt/python.sh")
    error = build.explain(result(said), "base:1")
    assert isinstance(error, errors.NetworkError)
    assert str(error).endswith("; give that Python with --python-archive, or check --ca-bundle and --network")


def test_of_pips_complaints_the_exception_is_told() -> None:
    pip = (
        "error: subprocess-exited-with-error",
        "    OSError: no such file: x.py",
        "error: metadata-generation-failed",
        "hint:",
    )
    assert str(build.explain(result(broken(*pip)), "b")).endswith("failed: OSError: no such file: x.py")


def test_of_apts_complaints_the_cause_is_told() -> None:
    apt = (
        "E: Failed to fetch http://a.example/x.deb  Certificate verification failed",
        "E: Unable to fetch some archives",
    )
    error = build.explain(result(broken("Get:1", *apt)), "base:1")
    assert isinstance(error, errors.NetworkError)
    assert "(E: Failed to fetch http://a.example/x.deb" in str(error)


@pytest.mark.parametrize(
    "step", ["[internal] load metadata for docker.io/x/y:latest", "[linux/arm64 python 1/2] FROM docker.io/x/y"]
)
def test_a_base_that_cannot_be_pulled_is_named(step: str) -> None:
    reason = "failed to do request: connection refused"
    said = f"#3 {step}\n#3 ERROR: {reason}\n------\n > {step}:\n------\nERROR: failed to solve: {reason}\n"
    error = build.explain(result(said), "docker.io/x/y")
    assert isinstance(error, errors.NetworkError)
    assert str(error).startswith(f"docker.io/x/y: the base image cannot be fetched ({reason}); log in")
    assert "--base-image" in str(error)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", "exit status 1, no message"),
        ('ERROR: no builder "x" found\n', 'no builder "x" found'),
        ("something\nunknown flag: --x\n", "something / unknown flag: --x"),
    ],
)
def test_what_fails_before_any_step_is_told(said: str, told: str) -> None:
    error = build.explain(result(said), "base:1")
    assert (type(error), str(error)) == (errors.BuildError, f"the build failed: {told}")
