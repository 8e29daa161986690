from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tooling.core import errors
from tooling.image import build as image_build
from tooling.image.engine import Engine
from tooling.image.request import Request, add_options, from_options


def ask(*argv: str) -> Request:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    return from_options(parser.parse_args(argv))


def build(root: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the door where no engine answers."""
    nowhere = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    command = [root / "docker" / "build.py", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | nowhere | env)


def test_without_options_it_is_a_cuda_image_of_what_runs() -> None:
    spec = ask().spec
    assert (spec.target, spec.accelerator, spec.jaxlib, spec.cuda_version) == ("runtime", "cuda12", "wheel", "12.8.1")
    assert spec.base_image is None


@pytest.mark.parametrize(
    ("argv", "seen"),
    [
        (["--image", "dev"], lambda r: r.spec.target == "dev"),
        (["--image", "opt"], lambda r: r.spec.target == "runtime"),
        (["--stage", "devcontainer"], lambda r: r.spec.target == "devcontainer"),
        (["--tag", "T", "--repo", "R.example/x", "--upload"], lambda r: r.actions.upload),
        (["--repo", "r.example/x", "--latest"], lambda r: r.actions.latest),
        (["--repo", "r.example", "--name", "n", "--tag", "T"], lambda r: str(r.spec.reference) == "r.example/n:T"),
        (["--no-docker-build-cache"], lambda r: not r.means.layer_cache),
        (["--cuda-version", "12.6.3"], lambda r: r.spec.cuda_version == "12.6.3"),
        (["--jaxlib", "source", "--cudnn-version", "9.8.0"], lambda r: r.spec.cudnn_version == "9.8.0"),
        (["--jaxlib", "source", "--build-type", "Debug"], lambda r: r.spec.build_type == "Debug"),
        (["--jaxlib", "source", "--cache-addr", "[::1]:9090"], lambda r: r.means.bazel_cache == "[::1]:9090"),
        (["--jaxlib", "source", "--no-cache"], lambda r: not r.means.use_bazel_cache),
        (["--jaxlib", "source", "--cache"], lambda r: r.means.use_bazel_cache),
        (["--cache", "--no-upload", "--no-latest"], lambda r: not r.actions.upload),
        (["--jaxlib", "source", "--cache-addr", "172.17.0.1"], lambda r: r.means.bazel_cache == "172.17.0.1:9090"),
        (["--stage", "final_image"], lambda r: r.spec.target == "runtime"),
        (["--validate", "none"], lambda r: r.actions.validate == "none"),
        (["--no-build"], lambda r: not r.actions.build),
        (["--build"], lambda r: r.actions.build),
        (["--dry-run"], lambda r: r.actions.dry_run),
        (["--validate", "medium"], lambda r: r.actions.validate == "medium"),
    ],
)
def test_the_options_of_the_original_are_taken(argv: list[str], seen) -> None:
    assert seen(ask(*argv))


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
        (["--upload", "--repo", "r.example/x", "--latest"], "comes with a release"),
        (["--allow-dirty"], "add --upload"),
        (
            ["--release", "v1.0.0", "--upload", "--repo", "r.example/x", "--bazel-cache-write"],
            "a release uses no Bazel cache",
        ),
        (["--image", "dev", "--stage", "runtime"], "give one"),
        (["--python-archive", "/nonexistent.tar.gz"], "there is no such file"),
        (["--repo", "ghcr.io"], "ghcr.io: is a registry alone; name an owner too"),
        (["--repo", "ghcr.io/owner"], "ghcr.io/owner: has an owner and no name, .*; add --name multimesh-jax"),
        (["--base-image", "user:hunter2@host.example/x"], "without a user or a password"),
        (["--base-image", "x@sha256:12"], "without a user or a password"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_reason(argv: list[str], reason: str) -> None:
    with pytest.raises(errors.UsageError, match=reason):
        ask(*argv)


@pytest.mark.parametrize("poison", ["12.8; reboot", "$(id)", "--privileged", "12.8.1\nRUN id", "a=b", "{{.}}"])
@pytest.mark.parametrize("flag", ["--cuda-version", "--base-image", "--bazel-cache"])
def test_evil_values_are_refused_before_an_engine_sees_them(flag: str, poison: str) -> None:
    with pytest.raises(errors.UsageError, match=f"{flag} .*: not "):
        ask(f"{flag}={poison}")


@pytest.mark.parametrize("image", ["ubuntu:24.04", "localhost:5000/x", "r.example/a/b:c@sha256:" + "0" * 64, "my.base"])
def test_names_of_base_images_are_taken(image: str) -> None:
    assert ask("--base-image", image).spec.base_image == image


def test_labels_do_not_decide_whether_an_image_is_checked_again() -> None:
    found = {
        "RootFS": {"Layers": ["a"]},
        "Config": {"User": "1000", "Labels": {"revision": "1"}},
        "Architecture": "amd64",
    }
    other = found | {"Config": {"User": "1000", "Labels": {"revision": "2"}}}
    assert image_build._content(found) == image_build._content(other)
    assert image_build._content(found) != image_build._content(found | {"RootFS": {"Layers": ["b"]}})
    assert image_build._content(found) != image_build._content(found | {"Config": {"User": "0"}})


def test_an_unknown_option_names_the_door(root: Path) -> None:
    told = build(root, "--bogus")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.splitlines()[-1] == "docker/build.py: error: unrecognized arguments: --bogus"


def test_a_jaxlib_without_its_sources_is_refused_at_once(root: Path, tmp_path: Path) -> None:
    spec = ask("--jaxlib", "source").spec
    for name in ("docker", "requirements", "multimesh", "sources.lock", "sources.yaml"):
        (tmp_path / name).symlink_to(root / name)
    (tmp_path / "third_party/maxtext/src/maxtext").mkdir(parents=True)
    engine = Engine(("docker",))
    with pytest.raises(errors.PinError, match=r"third_party/jax is not there; run \./bootstrap\.sh --group source"):
        image_build.plan(tmp_path, engine, spec, ask().means, Path("RESULT"))
    (tmp_path / "third_party/jax/.git").mkdir(parents=True)
    (tmp_path / "third_party/xla/.git").mkdir(parents=True)
    (tmp_path / "third_party/jax/.bazelversion").write_text("99.1.0\n")
    with pytest.raises(errors.PinError, match=r"third_party/jax wants Bazel 99\.1\.0, and docker/images\.lock has"):
        image_build.plan(tmp_path, engine, spec, ask().means, Path("RESULT"))
    (tmp_path / "sources.lock").unlink()
    held = json.loads((root / "sources.lock").read_text())
    held["components"]["jax"]["version"] = "0.9.9"
    (tmp_path / "sources.lock").write_text(json.dumps(held))
    with pytest.raises(errors.PinError, match=r"third_party/jax is 0\.9\.9, the packages of an image go with jax \d"):
        image_build.plan(tmp_path, engine, spec, ask().means, Path("RESULT"))


def test_a_python_that_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "docker" / "context" / "python.tar.gz"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    with image_build._archive(tmp_path, ask().spec):
        assert not left.exists()
    (tmp_path / "given.tar.gz").write_text("whole")
    given = ask("--python-archive", str(tmp_path / "given.tar.gz")).spec
    with image_build._archive(tmp_path, given):
        assert left.read_text() == "whole"
        with pytest.raises(errors.UsageError, match="another build"), image_build._archive(tmp_path, ask().spec):
            pass
    assert not left.exists()


def test_dry_run_prints_the_commands_and_touches_nothing(root: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (root / "docker").rglob("*")}
    told = build(root, "--accelerator", "cpu", "--tag", "T", "--dry-run", HOME=str(tmp_path))
    assert told.returncode == 0, told.stderr
    commands = [shlex.split(line) for line in told.stdout.splitlines()]
    assert commands[0][1:3] == ["buildx", "build"]
    assert commands[0][-1] == "."
    assert commands[-1][1:] == ["tag", "IMAGE", "multimesh-jax:T"]
    assert {path: path.stat().st_mtime_ns for path in (root / "docker").rglob("*")} == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tag", "v1.2.3"], "is the tag of a release; add --release"),
        (["--tag", "latest"], "comes with a release; add --release"),
        (["--validate", "medium"], "nvidia-smi lists no GPU here"),
        (["--release", "v99.0.0"], "the library says"),
    ],
)
def test_dry_run_refuses_what_a_run_refuses(root: Path, tmp_path: Path, options: list[str], said: str) -> None:
    for name in ("sh", "dirname", "git"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    told = build(root, "--upload", "--repo", "r.example/x", "--dry-run", "--allow-dirty", *options, PATH=str(tmp_path))
    assert (told.returncode != 0, told.stdout) == (True, "")
    assert said in told.stderr


def test_a_release_uses_no_bazel_cache() -> None:
    options = ("--jaxlib", "source", "--upload", "--repo", "r.example/x")
    assert ask(*options).means.use_bazel_cache
    assert not ask(*options, "--release", "v1.0.0").means.use_bazel_cache


def test_dry_run_speaks_json(root: Path) -> None:
    told = build(root, "--dry-run", "--json", "--validate", "none")
    command, named = json.loads(told.stdout)["commands"]
    assert command[-4:] == ["--load", "--metadata-file", "RESULT", "."]
    assert named[-2:] == ["IMAGE", "multimesh-jax:local"]


def test_without_an_engine_it_says_so_and_what_to_do(root: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = build(root, "--accelerator", "cpu")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of a processor, not of the clock: this machine may have more to do.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    assert told.returncode == errors.EngineError.exit_code
    here = "no engine answers at unix:///nonexistent/docker.sock"
    assert told.stderr.startswith(f"error: {here if shutil.which('docker') else 'docker is not installed'}")
    assert "maxtext/validate-cpu.sh" in told.stderr
    assert told.stderr.count("\n") == 1


def test_without_any_program_it_says_what_to_install(root: Path, tmp_path: Path) -> None:
    for name in ("sh", "dirname", "git"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    told = build(root, "--accelerator", "cpu", PATH=str(tmp_path))
    assert told.returncode == errors.EngineError.exit_code
    assert told.stderr.startswith("error: docker is not installed; install docker.io and docker-buildx")
    assert told.stderr.count("\n") == 1


def test_a_refusal_is_one_line_and_its_exit_code_says_usage(root: Path) -> None:
    told = build(root, "--tag", "$(touch x)")
    assert (told.returncode, told.stderr.count("\n"), told.stdout) == (2, 1, "")
