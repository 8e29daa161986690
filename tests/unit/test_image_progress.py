from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from workflows import errors
from workflows.image import progress
from workflows.image.progress import Display, Step, Steps


def fed(*lines: str) -> tuple[Steps, list[Step]]:
    steps = Steps()
    return steps, [step for line in lines if (step := steps.feed(line)) is not None]


def test_steps_have_a_stage_a_time_and_a_title_without_mounts() -> None:
    name = "[linux/arm64 locked 1/2] RUN --mount=type=secret,id=pip.conf     /opt/pip.sh -r /run.txt"
    steps, (ended,) = fed(f"#7 {name}", "#7 0.512 Collecting jax", "#7 ...", "#7 DONE 2.5s", "#7 DONE 2.5s")
    assert (ended.title, ended.state) == ("locked 1/2: RUN /opt/pip.sh -r /run.txt", "2.5 s")
    assert list(ended.said) == ["Collecting jax"]
    assert steps.failed is None


def test_cache_hits_are_counted_over_the_steps_of_the_dockerfile() -> None:
    steps, ended = fed(
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
    assert [step.title for step in ended] == ["python 1/2: FROM docker.io/library/base", "python 2/2: RUN a",
                                              "runtime 1/1: COPY b"]  # fmt: skip


def test_the_steps_of_podman_are_counted() -> None:
    steps, ended = fed(
        "[1/2] STEP 1/2: FROM a AS b", "--> 1f2e3d4c5b6", "[1/2] STEP 2/2: RUN c", "STEP 1/2: COPY d",
        "--> Using cache 1f2e3d4c5b6", "STEP 2/2: RUN e", "error: no luck", "Error: building at STEP",
    )  # fmt: skip
    assert steps.counted == (1, 3)
    assert [step.title for step in ended[1:]] == ["1 2/2: RUN c", "step 1/2: COPY d", "step 2/2: RUN e"]
    assert str(progress.explain(steps, 1, "a")) == "step `step 2/2: RUN e` failed: no luck"


def test_a_step_of_podman_says_more_than_the_line_that_repeats_it() -> None:
    repeated = 'Error: building at STEP "RUN make all": while running runtime: exit status 2'
    hybrid = "error running container: from /usr/bin/crun creating container for [make]: cgroups in hybrid mode"
    for said, wanted in (
        (("make: *** [all] Error 2",), "make: *** [all] Error 2"),
        ((hybrid, ": exit status 1", "time=now level=error msg=EOF"), hybrid),
        ((), repeated.removeprefix("Error: ")),
    ):
        steps, _ = fed("STEP 1/1: RUN make all", *said, repeated)
        assert str(progress.explain(steps, 2, "a")) == f"step `step 1/1: RUN make all` failed: {wanted}"


def broken(*lines: str) -> Steps:
    said = [f"#1 0.{number}00 {line}" for number, line in enumerate(lines)]
    command = "executor failed running [/bin/sh -c pip]: exit code: 1"
    metadata = ("#9 [internal] load metadata for docker.io/x/y", "#9 DONE 0.1s")
    return fed(
        *metadata, "#1 [locked 1/1] RUN pip", *said, f"#1 ERROR: {command}", "#2 [other 1/1] RUN x", "#2 CANCELED",
        "------", " > [locked 1/1] RUN pip:", *lines, "------", f"ERROR: failed to solve: {command}",
    )[0]  # fmt: skip


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
def test_a_failed_step_is_explained(line: str, kind: type[errors.WorkflowsError], words: str) -> None:
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
        ("[1/2] STEP 1/2: FROM docker.io/x/y AS python", "Error: creating build container: manifest unknown"),
    ],
)
def test_a_base_that_cannot_be_pulled_is_named(lines: tuple[str, ...]) -> None:
    error = progress.explain(fed(*lines)[0], 1, "docker.io/x/y")
    assert isinstance(error, errors.NetworkError)
    assert str(error).startswith("docker.io/x/y: the base image cannot be fetched")
    assert "--base-image" in str(error)


def test_the_table_keeps_its_times_on_a_narrow_terminal() -> None:
    display = Display()
    for line in (
        "#1 [locked 1/2] RUN " + "pip " * 40,
        "#1 DONE 12.5s",
        "#2 [locked 2/2] RUN x",
        "#2 0.100 " + "y" * 90,
    ):
        display.steps.feed(line)
    console = Console(width=40, file=io.StringIO(), force_terminal=False)
    console.print(display.table())
    first, second, last = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first.startswith("  12.5 s  locked 1/2: RUN pip")
    assert re.match(r" +\d+ s  locked 2/2: RUN x  yy", second)
    assert "0 of 2 steps" in last
    assert max(map(len, (first, second, last))) <= 40
