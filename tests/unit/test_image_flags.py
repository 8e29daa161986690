"""Options of ``docker/build.py``, where no engine answers."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tooling import cli
from tooling.core import errors
from tooling.image import pipeline

RELEASE = ("--release", "v1.0.0", "--upload", "--repo", "r.example/x")


def build(root: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the door where no engine answers."""
    no_engine = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    command = [root / "docker" / "build.py", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | no_engine | env)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("", "target", "runtime"),
        ("", "accelerator", "cuda12"),
        ("", "cuda_version", "12.8.1"),
        ("--image dev", "target", "dev"),
        ("--image opt", "target", "runtime"),
        ("--stage devcontainer", "target", "devcontainer"),
        ("--stage final_image", "target", "runtime"),
        ("--tag T --repo R.example/x --upload", "upload", True),
        ("--repo r.example/x --latest", "latest", True),
        ("--repo r.example --name n --tag T", "reference", ("r.example/n", "T")),
        ("--no-docker-build-cache", "layer_cache", False),
        ("--cuda-version 12.6.3", "cuda_version", "12.6.3"),
        ("--jaxlib source --cudnn-version 9.8.0", "cudnn_version", "9.8.0"),
        ("--jaxlib source --build-type Debug", "build_type", "Debug"),
        ("--jaxlib source --cache-addr [::1]:9090", "bazel_cache", "[::1]:9090"),
        ("--jaxlib source --cache-addr 172.17.0.1", "bazel_cache", "172.17.0.1:9090"),
        ("--jaxlib source --no-cache", "use_bazel_cache", False),
        ("--jaxlib source --cache", "use_bazel_cache", True),
        ("--upload --repo r.example/x --release v1.0.0", "use_bazel_cache", False),
        ("--cache --no-upload --no-latest", "upload", False),
        ("--validate none", "validate", "none"),
        ("--validate medium", "validate", "medium"),
        ("--no-build", "build", False),
        ("--build", "build", True),
        ("--dry-run", "dry_run", True),
        *((f"--base-image {image}", "base_image", image) for image in ("ubuntu:24.04", "localhost:5000/x", "my.base")),
        (f"--base-image r.example/a/b:c@sha256:{'0' * 64}", "base_image", f"r.example/a/b:c@sha256:{'0' * 64}"),
    ],
)
def test_the_options_of_the_original_are_taken(words: str, name: str, value: object) -> None:
    assert getattr(pipeline.parse(words.split()), name) == value


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--cudnn-version", "9.8.0"], "cuDNN comes with the locked wheels"),
        (["--build-type", "Debug"], "the locked wheels are Release"),
        (["--jaxlib", "source", "--no-cache", "--cache-addr", "localhost:9"], "contradict each other"),
        (["--accelerator", "cpu", "--cuda-version", "12.8.1"], "an image for the CPU has no CUDA"),
        (["--base-image", "debian:12", "--cuda-version", "12.8.1"], "--base-image replaces it"),
        (["--upload"], "where to"),
        (["--latest"], "add --repo"),
        (["--allow-dirty"], "add --upload"),
        ([*RELEASE, "--bazel-cache-write"], "a release uses no Bazel cache"),
        ([*RELEASE, "--validate", "none"], "checked by a job"),
        (["--image", "dev", "--stage", "runtime"], "give one"),
        (["--python-archive", "/nonexistent.tar.gz"], "there is no such file"),
        (["--repo", "ghcr.io"], "--repo ghcr.io: names no image"),
        (["--repo", "ghcr.io/owner"], "--repo ghcr.io/owner: names no image"),
        (["--base-image", "user:hunter2@host.example/x"], "without a user or a password"),
        (["--base-image", "x@sha256:12"], "without a user or a password"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_reason(argv: list[str], reason: str) -> None:
    with pytest.raises(errors.OptionError, match=reason):
        pipeline.parse(argv)


def test_dry_run_prints_the_commands_and_touches_nothing(root: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (root / "docker").rglob("*")}
    process = build(root, "--accelerator", "cpu", "--tag", "T", "--dry-run", HOME=str(tmp_path))
    assert process.returncode == 0, process.stderr
    (command,) = (shlex.split(line) for line in process.stdout.splitlines())
    assert command[:3] == ["docker", "buildx", "build"]
    assert command[-2:] == ["runtime", str(root / "build/image/context")]
    assert {path: path.stat().st_mtime_ns for path in (root / "docker").rglob("*")} == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--tag", "v1.2.3"], "is the tag of a release; add --release"),
        (["--tag", "v0.1"], "is the tag of a release; add --release"),
        (["--tag", "sha-0123"], "names the commit of an image"),
        (["--latest"], "--tag latest: is the tag of a release; add --release"),
        (["--validate", "medium"], "nvidia-smi lists no GPU here"),
        (["--release", "v99.0.0"], "the library says"),
        (["--release", "v0.1.0", "--latest", "--accelerator", "cpu"], "--latest is the image for GPUs"),
    ],
)
def test_dry_run_refuses_what_a_run_refuses(root: Path, tmp_path: Path, options: list[str], line: str) -> None:
    for name in ("sh", "dirname", "git"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    child = build(root, "--upload", "--repo", "r.example/x", "--dry-run", "--allow-dirty", *options, PATH=str(tmp_path))
    assert (child.returncode != 0, child.stdout) == (True, "")
    assert line in child.stderr


def test_dry_run_speaks_json_and_says_what_would_be_pushed(root: Path) -> None:
    options = ["--dry-run", "--json", "--no-build", "--upload", "--repo", "r.example/x", "--tag", "v1.2.3"]
    commands = json.loads(build(root, *options, "--release", "v1.2.3", "--latest").stdout)["commands"]
    assert {command[1] for command in commands} == {"push"}
    tags = ["sha-COMMIT-ID", "v1.2.3", "v1.2", "latest"]
    assert [command[2] for command in commands] == [f"r.example/x:{tag}" for tag in tags]


def test_without_an_engine_it_says_so_and_what_to_do(root: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = build(root, "--accelerator", "cpu")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of a processor, not of the clock: this machine may have more to do.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    assert process.returncode == errors.EngineError.exit_code
    assert process.stderr.startswith("error: no engine answers at unix:///nonexistent/docker.sock (")
    assert "start one, or install docker.io and docker-buildx" in process.stderr
    assert "maxtext/validate-cpu.sh" in process.stderr
    assert process.stderr.count("\n") == 1


def test_a_refusal_is_one_line_of_the_door_and_its_exit_code_says_usage(root: Path, capsys) -> None:
    process = build(root, "--tag", "$(touch x)")
    assert (process.returncode, process.stderr.count("\n"), process.stdout) == (2, 1, "")
    for words in (["image"], ["ci", "preflight"], ["promote"]):
        for place in ("user:hunter2@r.example/i", "https://user:hunter2@r.example/i", "user:hunter2@r.example/i@x"):
            argv = [*words, *(["--repo", place] if words == ["image"] else [place, "--tag", "T"])]
            assert cli.main(argv) == 2
            assert "hunter2" not in "".join(capsys.readouterr())
    process = build(root, "--bogus")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines()[-1] == "docker/build.py: error: unrecognized arguments: --bogus"
