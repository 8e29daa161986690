"""The command that builds an image, its labels, its pins, what reaches it of the caller's settings, and how it fails.

Transcripts are in the form that buildx 0.29 and BuildKit of engine 20.10 gave.
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest

from tests import locks
from tooling.core import errors, proc
from tooling.image import build, pipeline, reference
from tooling.image.reference import LABEL, OCI
from tooling.image.snapshot import Snapshot

DIGEST = "sha256:" + "a" * 64
SNAPSHOT = Snapshot("c0ffee", "beef")


def ask(*words: str) -> Namespace:
    return pipeline.parse(words)


@pytest.fixture
def pinned(root: Path) -> reference.ImageLock:
    """The repository's lock, with a digest for every image."""
    lock = reference.load_lock(root)
    images = {name: reference.ImagePin(pin.reference, DIGEST) for name, pin in lock.images.items()}
    return lock._replace(images=images)


@pytest.mark.parametrize(
    ("words", "tools", "result"),
    [
        ("", f"cuda:12.8.1-cudnn-devel-ubuntu22.04@{DIGEST}", f"cuda:12.8.1-base-ubuntu22.04@{DIGEST}"),
        ("--accelerator cpu", f"library/ubuntu:22.04@{DIGEST}", f"library/ubuntu:22.04@{DIGEST}"),
        ("--cuda-version 12.6.3", "cuda:12.6.3-cudnn-devel-ubuntu22.04", "cuda:12.6.3-base-ubuntu22.04"),
        (f"--base-image debian@{DIGEST}", f"debian@{DIGEST}", f"debian@{DIGEST}"),
        ("--base-image debian:12", "debian:12", "debian:12"),
    ],
)
def test_the_base_is_cuda_on_ubuntu_by_digest(
    root: Path, pinned: reference.ImageLock, words: str, tools: str, result: str
) -> None:
    """Nobody pinned it for another version than the locked one."""
    request = ask(*words.split())
    bases = build.choose_bases(request, pinned)
    assert [pin.exact.removeprefix("docker.io/").removeprefix("nvidia/") for pin in bases] == [tools, result]
    label = build.make_labels(root, request, bases, SNAPSHOT, "")[f"{OCI}.base.digest"]
    assert label == (DIGEST if "@" in tools else "unpinned")


def test_each_platform_has_its_python_and_a_file_is_held_against_its_own_checksum(
    pinned: reference.ImageLock, tmp_path: Path
) -> None:
    def arguments(*words: str) -> dict[str, str]:
        return build.make_arguments(ask(*words), pinned, build.choose_bases(ask(), pinned))

    for platform, word in (("linux/amd64", "x86_64"), ("linux/arm64", "aarch64")):
        assert word in arguments("--platform", platform)["PYTHON_URL"]
        assert len(arguments("--platform", platform)["PYTHON_SHA256"]) == 64
    (tmp_path / "python.tar.gz").write_bytes(b"python")
    archived = arguments("--python-archive", str(tmp_path / "python.tar.gz"))
    assert (archived["PYTHON_URL"], archived["PYTHON_SHA256"][:12]) == ("", "11a4a60b518b")


def test_labels_name_revision_lock_and_versions(
    root: Path, pinned: reference.ImageLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)

    def labels(*words: str) -> dict[str, str]:
        return build.make_labels(root, ask(*words), build.choose_bases(ask(*words), pinned), SNAPSHOT, "ab")

    default = labels()
    assert default[f"{OCI}.revision"] == "c0ffee"
    assert re.fullmatch("sha256:[0-9a-f]{64}", default[f"{LABEL}.lock"])
    assert default[f"{LABEL}.maxtext.revision"] == "beef"
    assert default[f"{LABEL}.python"] == "standalone sha256:ab"
    assert labels("--base-image", "debian:13")[f"{LABEL}.python"] == "of the base, or standalone sha256:ab"
    assert default[f"{LABEL}.jax"] == locks.locked_versions(root / "requirements" / "run.txt", "3.13.0")["jax"]
    # The installed version, not the one that the base image is named after.
    assert default[f"{LABEL}.accelerator"] == "cuda12 12.8.90"
    assert labels("--jaxlib", "source")[f"{LABEL}.accelerator"] == "cuda12 12.8.1"
    assert "unknown" not in default.values()
    assert f"{OCI}.source" not in default
    for name, value in (("GITHUB_SERVER_URL", "https://github.com"), ("GITHUB_REPOSITORY", "some-lab/x")):
        monkeypatch.setenv(name, value)
    assert labels()[f"{OCI}.source"] == "https://github.com/some-lab/x"


def test_what_reaches_a_build_is_named_and_a_password_is_not(tmp_path: Path) -> None:
    config = tmp_path / 'a, "b"'
    config.write_text("[global]\nindex-url = https://user:hunter2@index.example/simple\n")
    secret = ["--secret", f'id=pip.conf,"src={tmp_path}/a, ""b"""']
    assert build.find_access(ask("--pip-config", str(config)), {}) == secret
    assert build.find_access(ask(), {"PIP_CONFIG_FILE": str(config)}) == secret
    assert build.find_access(ask("--pip-config", str(config)), {"PIP_CONFIG_FILE": str(tmp_path)}) == secret
    for variable in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE"):
        assert build.find_access(ask(), {variable: str(config)})[1].startswith("id=ca.pem,")
        assert build.find_access(ask(), {variable: str(tmp_path / "none")}) == []
    assert build.find_access(ask(), {"HTTPS_PROXY": "http://u:hunter2@p.example"}) == ["--build-arg", "HTTPS_PROXY"]
    words = ("--network", "host", "--platform", "linux/arm64")
    options = ["--platform", "linux/arm64", "--no-cache", "--network", "host"]
    assert build.find_access(ask(*words, "--no-docker-build-cache"), {}) == options


def test_images_with_cuda_ask_for_the_driver_and_for_no_toolkit(root: Path) -> None:
    """JAX finds its libraries by their wheels. A toolkit on its path would give it another cuBLASLt."""
    stages = (root / "docker/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").split("\nFROM ")
    askers = [stage.split(None, 3)[2] for stage in stages if "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in stage]
    assert askers == ["accelerator-cuda12", "toolbox"]
    assert not [stage for stage in stages if re.search("LD_LIBRARY_PATH=[^ ]*/usr/local/cuda", stage)]


def result(output: str) -> proc.Result:
    return proc.Result(("docker",), 1, b"", output.encode())


def broken(*lines: str) -> str:
    """Return the output of a build in which a step fails while another runs; its last ten lines come again."""
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
