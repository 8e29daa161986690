"""Jobs of MaxText whose kernels are compiled for GPUs that are not there; `.ci/run full-compile-gpu`, nightly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_jobs import settings, size

from multimesh import schedules

pytestmark = [pytest.mark.full, pytest.mark.compile_gpu]

Run = Callable[..., Any]
SMALL = ("--nodes", 4, "--gpus", 1, "--tp", 2, "--pp", 2, "--model-dims", 64, "--mlp-dims", 64, "--num-steps", 3)
SMALL += ("--sequence-length", 32, "--batch-size", 4, "--attention", "cudnn_flash_te", "--remat", "full")
COMPILED = ("--forecast", "--compile", "--json")


def schedule_flags() -> list[tuple[Any, ...]]:
    """Return the flags of each published schedule, with as many stages on a submesh as it usually has."""
    kinds = (schedules.get(name) for name in schedules.names() if schedules.get(name).name == name)
    return [("--schedule", one.name, "--interleave", one.usual, "--num-layers", 2 * one.usual) for one in kinds]


@pytest.mark.parametrize("device", ["h100", "b200"])
@pytest.mark.parametrize("flags", schedule_flags(), ids=lambda flags: flags[1])
def test_a_job_is_compiled_in_every_schedule(run: Run, tmp_path: Path, flags: tuple[Any, ...], device: str):
    result = run(*SMALL, *flags, *COMPILED, "--device", device, "--output", tmp_path)
    assert result.code == 0, result.stderr
    assert all(need["total"] > 0 for need in result.json["compiled"])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", ["h100", "b200"])
@pytest.mark.parametrize("folder", ["llama3-70b-64gpus", "gpt3-175b-64gpus"])
def test_a_folders_job_is_compiled_and_fits(run: Run, tmp_path: Path, folder: str, device: str):
    flags = (*settings(folder).split(), "--nodes", math.prod(size(folder)), "--gpus", 1)
    result = run(*flags, *COMPILED, "--device", device, "--output", tmp_path)
    assert result.code == 0, result.stderr
    compilation = result.json["compilation"]
    assert compilation["compiled"] <= compilation["kernels"] / 3  # most stages are alike
