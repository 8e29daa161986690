"""The parameters of a checkpoint as MaxText's own tools read them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpora
import huggingface
import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file
from test_checkpoint import KERNEL, UNROLLED, state, write

from multimesh_maxtext.errors import CheckpointError, FileError
from multimesh_maxtext.trainer.checkpointer import export, nest


def make_parameters(names: list[str]) -> dict[str, Any]:
    """Parameters of four layers, each three by two."""
    layers = {("params", *path): x for path, x in state(names).items() if path[-1] == "kernel"}
    return nest({**layers, ("params", "params", "embedding"): np.arange(5.0, dtype="bfloat16")})


@pytest.mark.parametrize(
    ("layers", "scanned"),
    [(["layers_0_2", "layers_3_3"], True), (["layers"], True), (UNROLLED, False)],
    ids=["stacks", "scanned", "unrolled"],
)
@pytest.mark.parametrize("unrolled", [False, True])
def test_parameters_are_written_in_a_form_of_maxtexts(tmp_path: Path, layers: list[str], scanned: bool, unrolled: bool):
    names = ["layers"] if scanned and not unrolled else UNROLLED
    state = {**make_parameters(layers), "opt_state": {"mu": np.ones(3)}}
    ocp.save(tmp_path / "ck/7", state, checkpointable_name="items")
    summary = export(tmp_path / "ck", 7, tmp_path / "out", unrolled=unrolled)
    assert summary == {"scan_layers": names == ["layers"], "bytes": KERNEL.nbytes + 10}
    assert ocp.metadata(tmp_path / "out").custom_metadata == {"scan_layers": summary["scan_layers"]}
    np.testing.assert_equal(ocp.load(tmp_path / "out", checkpointable_name="items"), make_parameters(names))


def test_nothing_is_exported_from_nothing_or_over_something(run: Callable[..., Any], tmp_path: Path):
    result = run("--checkpoint", tmp_path / "ck", "--export", tmp_path)
    assert (result.code, result.stderr.count("\n")) == (CheckpointError.exit_code, 1)
    assert "ck: there is no checkpoint to export; train first" in result.stderr
    write(tmp_path / "ck", 3)
    result = run("--checkpoint", tmp_path / "ck", "--export", tmp_path)
    assert (result.code, result.stderr.count("\n")) == (FileError.exit_code, 1)
    assert f"--export {tmp_path}: it is there already; choose another folder" in result.stderr


def test_layers_that_are_scanned_in_groups_stay_so(tmp_path: Path):
    state = {"params": {"params": {"decoder": {"layers": {"layers_0": {"kernel": KERNEL.swapaxes(0, 1)}}}}}}
    ocp.save(tmp_path / "ck/7", state, checkpointable_name="items")
    with pytest.raises(CheckpointError, match=r"scanned in groups, .*; leave out --no-scan-layers"):
        export(tmp_path / "ck", 7, tmp_path / "out", unrolled=True)
    assert export(tmp_path / "ck", 7, tmp_path / "out")["scan_layers"]
    np.testing.assert_equal(ocp.load(tmp_path / "out", checkpointable_name="items"), state)


MODEL = huggingface.settings("llama")
FLAGS = ["--model-name", huggingface.NAMES["llama"], *huggingface.flags(MODEL), "dtype=float32", "--num-steps", "3"]
FLAGS += ["--sequence-length", "32", "--batch-size", "8", "--microbatch-size", "2", "--attention", "dot_product"]


@pytest.mark.full
def test_what_a_pipeline_of_stacks_trained_is_exported_as_what_one_program_trained(
    run: Callable[..., Any], maxtext: Path, tmp_path: Path
):
    models, tokenizer = [], corpora.huggingface(tmp_path, corpora.documents())
    for grid in ("--cpus 2 --pp 2", "--backend spmd --cpus 1"):
        folder = tmp_path / str(len(models))
        training = [*FLAGS, *grid.split(), "--scan-layers", "--output", folder / "out"]
        result = run(*training, "--checkpoint", folder / "ck")
        assert result.code == 0, result.stderr
        result = run("--checkpoint", folder / "ck", "--export", folder / "parameters", "--json")
        assert (result.code, result.json["scan_layers"]) == (0, True), result.stderr
        huggingface.to_huggingface(maxtext, folder / "parameters/items", folder / "hf", tokenizer, scan="true")
        models.append(load_file(folder / "hf/model.safetensors"))
    assert models[0].keys() == models[1].keys()
    assert len(models[0]) == 3 + 9 * 4
    for name, array in models[0].items():
        np.testing.assert_allclose(array, models[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.full
def test_maxtext_takes_the_parameters_out_of_a_pipelines_checkpoint(
    run: Callable[..., Any], maxtext: Path, tmp_path: Path
):
    result = run(*FLAGS, "--cpus", 2, "--pp", 2, "--checkpoint", tmp_path / "ck", "--output", tmp_path / "out")
    assert result.code == 0, result.stderr
    tool: list[Any] = [sys.executable, "-m", "maxtext.utils.generate_param_only_checkpoint"]
    tool += [maxtext / "maxtext/configs/base.yml", "model_name=llama3.1-8b", *MODEL, "override_model_config=true"]
    tool += ["scan_layers=false", "skip_jax_distributed_system=true", "hardware=cpu", "run_name=only"]
    tool += [f"load_full_state_path={tmp_path / 'ck/2/items'}", f"base_output_directory={tmp_path}"]
    keys = {"JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(maxtext)}
    subprocess.run(tool, env={**os.environ, **keys}, check=True, capture_output=True)
    export(tmp_path / "ck", 2, tmp_path / "ours")
    actual = jax.tree.leaves(ocp.load(tmp_path / "ours", checkpointable_name="items"))
    expected = jax.tree.leaves(ocp.load(tmp_path / "only/checkpoints/0", checkpointable_name="items"))
    assert len(actual) == len(expected) == 3 + 9 * 4
    for our, their in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(our).astype(their.dtype), their)  # the tool writes bfloat16
