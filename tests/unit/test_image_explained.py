"""What BuildKit's display tells. The transcripts are in the form that buildx 0.29 and BuildKit of engine 20.10 gave."""

from __future__ import annotations

import pytest

from tooling.core import errors, proc
from tooling.image import build


def result(output: str) -> proc.Result:
    return proc.Result(("docker",), 1, b"", output.encode())


def broken(*lines: str) -> str:
    """What is output where a step fails while another runs; of its lines the last ten come again."""
    step = "[locked 1/1] RUN --mount=type=secret,id=pip.conf     /opt/pip.sh -r /run.txt"
    command = "executor failed running [/bin/sh -c pip]: exit code: 1"
    output = [f"0.{number}00 {line}" for number, line in enumerate(lines)]
    return "\n".join([
        "#9 [internal] load metadata for docker.io/x/y", "#9 DONE 0.1s", "",
        f"#1 {step}", *(f"#1 {line}" for line in output), f"#1 ERROR: {command}", "",
        "#2 [other 1/1] RUN x", "#2 CANCELED",
        "------", f" > {step}:", *output[-10:], "------", f"ERROR: failed to build: failed to solve: {command}", "",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", errors.ToolingError, "free some space"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", errors.SourceError, "do not us"),
        ("Temporary failure resolving 'archive.example'", errors.NotThereError, "--network"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", errors.NotThereError, "--ca-bundle"),
        ("exec /bin/sh: exec format error", errors.EngineError, "register QEMU"),
        ("error: this base has no Python >= 3.11", errors.EngineError, "error: this base has no Python >= 3.11"),
        ("something else", errors.EngineError, "something else"),
        (f"error: {'x' * 500} and {'y' * 500} the reason", errors.EngineError, "the reason"),
    ],
)
def test_a_failed_step_is_explained(line: str, kind: type[errors.ToolingError], words: str) -> None:
    error = build.explain(result(broken("before", line)))
    assert type(error) is kind
    assert words in str(error)
    assert str(error).startswith("step `[locked 1/1] RUN /opt/pip.sh -r /run.txt`")
    assert "before / " in str(error), "the last lines are told, whatever the cause"


@pytest.mark.parametrize(
    "step", ["[internal] load metadata for docker.io/x/y:latest", "[linux/arm64 python 1/2] FROM docker.io/x/y"]
)
def test_a_base_that_cannot_be_pulled_is_named(step: str) -> None:
    reason = "failed to do request: connection refused"
    output = f"#3 {step}\n#3 ERROR: {reason}\n------\n > {step}:\n------\nERROR: failed to solve: {reason}\n"
    error = build.explain(result(output))
    assert isinstance(error, errors.NotThereError)
    assert str(error).startswith(f"step `{step}`: the base image cannot be fetched; log in to its registry, give")
    assert str(error).endswith(f"`docker buildx imagetools inspect NAME` prints into docker/images.lock ({reason})")


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", "exit status 1, no message"),
        ('ERROR: no builder "x" found\n', 'no builder "x" found'),
        ("something\nunknown flag: --x\n", "something / unknown flag: --x"),
    ],
)
def test_what_fails_before_any_step_is_told(output: str, line: str) -> None:
    error = build.explain(result(output))
    assert (type(error), str(error)) == (errors.EngineError, f"the build failed: {line}")
