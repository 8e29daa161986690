"""The arguments that jax's own build program gets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "scripts" / "jaxlib.py"
_spec = importlib.util.spec_from_file_location("jaxlib_from_source", SCRIPT)
assert _spec
assert _spec.loader
jaxlib: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(jaxlib)

RECIPE = {"ACCELERATOR": "cuda12", "CUDA_VERSION": "12.8.1", "CUDNN_VERSION": "9.8.0", "BUILD_TYPE": "Release"}


def arguments(recipe: dict[str, str], bazelrc: str = "/run/secrets/bazelrc") -> list[str]:
    places = {"bazel": "/usr/bin/bazel", "bazelrc": bazelrc, "xla": "/xla", "output": "/wheels"}
    return jaxlib.command(recipe, **places, python_version="3.11")


def test_cuda_builds_the_plugins_with_hermetic_cuda() -> None:
    got = arguments(RECIPE)
    assert got[:2] == ["build", "--wheels=jax,jaxlib,jax-cuda-plugin,jax-cuda-pjrt"]
    assert {"--cuda_version=12.8.1", "--cudnn_version=9.8.0", "--local_xla_path=/xla"} <= set(got)
    assert "--bazel_startup_options=--bazelrc=/run/secrets/bazelrc" in got


def test_the_cpu_builds_jaxlib_alone() -> None:
    got = arguments(RECIPE | {"ACCELERATOR": "cpu"}, bazelrc="")
    assert got[1] == "--wheels=jax,jaxlib"
    assert not [word for word in got if "cuda" in word or "bazelrc" in word]


def test_a_release_reads_no_cache_of_another_build() -> None:
    assert [word for word in arguments(RECIPE) if "disk_cache" in word]
    got = arguments(RECIPE | {"BAZEL_CACHE": "none"}, bazelrc="")
    assert not [word for word in got if "disk_cache" in word]
    assert "--bazel_startup_options=--output_user_root=/tmp/bazel" in got


def test_debug_builds_keep_their_symbols() -> None:
    got = arguments(RECIPE | {"BUILD_TYPE": "Debug"})
    assert {"--bazel_options=--compilation_mode=dbg", "--bazel_options=--strip=never"} <= set(got)


@pytest.mark.parametrize("field", list(RECIPE))
@pytest.mark.parametrize("poison", ["12.8; id", "$(id)", "`id`", "12.8.1 --config=x", "12\n"])
def test_nothing_but_plain_values_reach_the_shell_of_jaxs_program(field: str, poison: str) -> None:
    with pytest.raises(jaxlib.Refused):
        arguments(RECIPE | {field: poison})


@pytest.mark.parametrize("accelerator", ["cpu", "cuda12"])
@pytest.mark.parametrize("build_type", ["Release", "RelWithDebInfo", "Debug"])
def test_the_locked_jax_takes_these_arguments(root: Path, tmp_path: Path, accelerator: str, build_type: str) -> None:
    program = root / "third_party" / "jax" / "build" / "build.py"
    if not program.exists():
        pytest.skip("third_party/jax is not here: ./bootstrap.sh --group source")
    bazel = tmp_path / "bazel"
    bazel.write_text("#!/bin/sh\necho bazel 7.7.0\n", encoding="utf-8")
    bazel.chmod(0o755)
    recipe = RECIPE | {"ACCELERATOR": accelerator, "BUILD_TYPE": build_type}
    places = {"bazel": str(bazel), "bazelrc": "/run/secrets/bazelrc", "xla": str(tmp_path), "output": str(tmp_path)}
    words = jaxlib.command(recipe, **places, python_version="3.11")
    # Its parser, its checks and the Bazel commands that it makes of them; nothing is built.
    done = subprocess.run(
        [sys.executable, program, *words, "--dry_run", "--configure_only"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    written = (tmp_path / ".jax_configure.bazelrc").read_text(encoding="utf-8")
    assert "HERMETIC_PYTHON_VERSION=3.11" in written
    assert ("HERMETIC_CUDA_VERSION=12.8.1" in written) == (accelerator == "cuda12")


@pytest.mark.parametrize(
    ("version", "sha256", "reason"),
    [("7.7.0", "", "is not pinned"), ("8.0.0", "ab", "third_party/jax wants Bazel 8.0.0")],
)
def test_a_bazel_without_a_pin_or_of_another_version_is_not_fetched(
    tmp_path: Path, version: str, sha256: str, reason: str
) -> None:
    place = (tmp_path / "bazel", tmp_path / "ca.pem")
    with pytest.raises(jaxlib.Refused, match=reason):
        jaxlib.fetch_bazel("https://example.invalid/7.7.0/bazel", sha256, version, *place)
    assert not (tmp_path / "bazel").exists()
