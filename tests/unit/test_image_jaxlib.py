"""The arguments that jax's own build program gets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parts.processes import write_program
from tooling.core.files import ROOT

SCRIPT = ROOT / "docker" / "scripts" / "jaxlib.py"
_spec = importlib.util.spec_from_file_location("jaxlib_from_source", SCRIPT)
assert _spec
assert _spec.loader
jaxlib: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(jaxlib)

RECIPE = {"ACCELERATOR": "cuda12", "CUDA_VERSION": "12.8.1", "CUDNN_VERSION": "9.8.0", "BUILD_TYPE": "Release"}


def arguments(recipe: dict[str, str], bazelrc: str = "/run/secrets/bazelrc") -> list[str]:
    places = {"bazel": "/usr/bin/bazel", "bazelrc": bazelrc, "xla": "/xla", "output": "/wheels"}
    return jaxlib.command(recipe, **places, python_version="3.11")


CASES = [
    ({}, {"--wheels=jax,jaxlib,jax-cuda-plugin,jax-cuda-pjrt", "--cuda_version=12.8.1", "--cudnn_version=9.8.0",
          "--local_xla_path=/xla", "--bazel_startup_options=--bazelrc=/run/secrets/bazelrc"}, ()),
    ({"ACCELERATOR": "cpu"}, {"--wheels=jax,jaxlib"}, ("cuda",)),
    ({"BAZEL_CACHE": "none"}, {"--bazel_startup_options=--output_user_root=/tmp/bazel"}, ("disk_cache",)),
    ({"BUILD_TYPE": "Debug"}, {"--bazel_options=--compilation_mode=dbg", "--bazel_options=--strip=never"}, ()),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "present", "absent"), CASES, ids=["cuda", "cpu", "release", "debug"])
def test_what_each_recipe_gives_to_jaxs_program(changes: dict[str, str], present: set[str], absent: tuple[str]) -> None:
    """A release reads no cache of another build."""
    words = arguments(RECIPE | changes)
    assert words[0] == "build"
    assert present <= set(words)
    assert not [word for word in words for other in absent if other in word]
    assert bool([word for word in words if "disk_cache" in word]) == ("disk_cache" not in absent)
    assert not [word for word in arguments(RECIPE | changes, bazelrc="") if "bazelrc" in word]


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
    bazel = write_program(tmp_path / "bazel", "#!/bin/sh\necho bazel 7.7.0\n")
    recipe = RECIPE | {"ACCELERATOR": accelerator, "BUILD_TYPE": build_type}
    places = {"bazel": str(bazel), "bazelrc": "/run/secrets/bazelrc", "xla": str(tmp_path), "output": str(tmp_path)}
    words = jaxlib.command(recipe, **places, python_version="3.11")
    # Its parser, its checks and the Bazel commands that it makes of them; nothing is built.
    argv, env = [sys.executable, program, *words, "--dry_run", "--configure_only"], {"PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, env=os.environ | env)
    assert process.returncode == 0, process.stderr
    text = (tmp_path / ".jax_configure.bazelrc").read_text(encoding="utf-8")
    assert "HERMETIC_PYTHON_VERSION=3.11" in text
    assert ("HERMETIC_CUDA_VERSION=12.8.1" in text) == (accelerator == "cuda12")


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
