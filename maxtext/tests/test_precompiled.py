"""`run.py --precompile` and `--precompiled`: a job that loads its kernels, and folders that do not fit it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multimesh.runtime.compile_options import flags_of_code
from multimesh_maxtext.command.launch import forecasting, launch
from multimesh_maxtext.errors import LauncherError
from multimesh_maxtext.handoff import receive

Run = Callable[..., Any]
SIZES = ("--tp", 2, "--pp", 2, "--num-layers", 4, "--model-dims", 64, "--mlp-dims", 64, "--num-steps", 3)
SIZES += ("--sequence-length", 32, "--batch-size", 8, "--remat", "full")
JOB = ("--cpus", 4, *SIZES, "--interleave", 2, "--attention", "dot_product")


@pytest.fixture
def wrote(tmp_path: Path) -> Path:
    """A folder that looks as if it held kernels."""
    folder = tmp_path / "wrote"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--precompile WROTE", "it holds kernels already; choose another folder"),
        ("--precompiled EMPTY", "it has no manifest.json; name a folder that --precompile has written"),
        ("--precompiled WROTE --forecast", "--precompiled is for a run that trains"),
        ("--precompile EMPTY --schedule auto", "nothing can be precompiled; name another"),
        ("--precompile EMPTY --nodes 2", "--precompile compiles for CPU devices of one process"),
        ("--precompile EMPTY --backend spmd", "it has no plan whose kernels could be written"),
        ("--precompiled WROTE --backend spmd", "it has no plan whose kernels could be loaded"),
    ],
)
def test_folders_that_do_not_fit_are_refused(job: Any, tmp_path: Path, wrote: Path, flags: str, message: str):
    given = flags.replace("WROTE", str(wrote)).replace("EMPTY", str(tmp_path / "empty")).split()
    with pytest.raises(LauncherError, match=message):
        job([*map(str, JOB), *given])


@pytest.mark.compile_gpu
def test_a_login_node_compiles_with_the_flags_of_the_job(job: Any, paths: Any, tmp_path: Path, wrote: Path):
    """But for those of how XLA finds the fastest products: without a GPU they are cuBLASLt's."""
    flags = [*map(str, SIZES), "--nodes", "4", "--gpus", "1", "--xla-ag-threshold", "1000", "--collective-matmul", "8"]
    users = {"XLA_FLAGS": "--xla_gpu_enable_while_loop_double_buffering=true"}
    login = job([*flags, "--device", "h100", "--precompile", str(tmp_path / "kernels")])
    there = forecasting(login, paths, inherited=users, gpu_memory=None)
    here = launch(job([*flags, "--precompiled", str(wrote)]), paths, inherited=users, gpu_memory=None)
    found = [flags_of_code(start.environment["XLA_FLAGS"], {}, cpu=False) for start in (there, here)]
    assert found[0] == found[1]
    assert "--xla_gpu_all_gather_combine_threshold_bytes=1000" in found[0]
    assert "--xla_gpu_enable_triton_gemm=false" in there.environment["XLA_FLAGS"]
    assert "triton_gemm" not in here.environment["XLA_FLAGS"]
    tuned = {"XLA_FLAGS": "--xla_gpu_load_autotune_results_from=tuned.txt"}
    assert "triton_gemm" not in forecasting(login, paths, inherited=tuned, gpu_memory=None).environment["XLA_FLAGS"]
    assert receive(there.environment).precompile == str(tmp_path / "kernels")
    assert receive(here.environment).precompiled == str(wrote)


def losses(folder: Path) -> list[Any]:
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(step["learning/loss"], step["learning/grad_norm"]) for step in steps]


@pytest.mark.longer
@pytest.mark.telling("--scan-layers")
@pytest.mark.parametrize("scan", ["--no-scan-layers", "--scan-layers"])
def test_a_job_loads_its_kernels_and_trains_alike(run: Run, tmp_path: Path, scan: str):
    kernels = tmp_path / "kernels"
    written = run(*JOB, scan, "--precompile", kernels, "--output", tmp_path / "login", "--json")
    assert written.code == 0, written.stderr
    kept = written.json["precompiled"]
    assert kept["kernels"] >= kept["programs"] > 4
    assert kept["bytes"] > 10_000
    for name, flags in (("loaded", ("--precompiled", kernels)), ("compiled", ())):
        done = run(*JOB, scan, *flags, "--output", tmp_path / name)
        assert done.code == 0, done.stderr
    assert losses(tmp_path / "loaded") == losses(tmp_path / "compiled")
    logs = [(tmp_path / name / "maxtext.log").read_text() for name in ("loaded", "compiled")]
    assert ["loading kernels" in log for log in logs] == [True, False]
    assert ["compiling kernels" in log for log in logs] == [False, True]
    other = run(*JOB, scan, "--mlp-dims", 128, "--precompiled", kernels, "--output", tmp_path / "other")
    assert other.code == 2, other.stderr
    (line,) = (line for line in other.stderr.splitlines() if line.startswith("error: "))
    assert "has no kernel '" in line
    assert "precompile again with this function, these shapes" in line


@pytest.mark.longer
@pytest.mark.compile_gpu
def test_kernels_for_gpus_that_are_not_there_are_written(run: Run, tmp_path: Path):
    """With cuDNN's attention and cuBLASLt's products. Nothing here can load them."""
    job = ("--nodes", 4, "--gpus", 1, *SIZES, "--attention", "cudnn_flash_te", "--device", "h100")
    done = run(*job, "--precompile", tmp_path / "kernels", "--output", tmp_path, "--json")
    assert done.code == 0, done.stderr
    assert done.json["precompiled"]["programs"] == done.json["compilation"]["compiled"]
    calls = {name for of_stage in done.json["calls"] for name in of_stage}
    assert any("cudnn" in name for name in calls)
    assert any("cublas" in name for name in calls)
    assert not any("triton" in name and "gemm" in name for name in calls)
    manifest = json.loads((tmp_path / "kernels" / "manifest.json").read_text())
    assert manifest["processes"] == [1] * 4
    assert manifest["devices"] == ["NVIDIA H100 80GB HBM3 9.0"]
