"""What a folder of checkpoints holds, and which runs may go on from it; no trainer is started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multimesh_maxtext.checkpoint_folder import aside, layers_of, leaf_paths, look
from multimesh_maxtext.command.checkpoint import beginning, check_parameters, prepare_folders, writing
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.steps import Run
from multimesh_maxtext.errors import CheckpointError, FlagError
from multimesh_maxtext.trainer.checkpointer import check_same, find_sources, is_stack, layers_in

Check = Callable[[Sequence[str]], Job]
Begin = Callable[[str], int]
STACKS = ["layers_0_3", "layers_4_7"]
UNROLLED = [f"layers_{n}" for n in range(4)]


def write(folder: Path, step: int, layers: Sequence[str] = UNROLLED) -> Path:
    """A complete checkpoint as far as we read one."""
    items = folder / str(step) / "items"
    items.mkdir(parents=True)
    paths = [["params", "params", "decoder", name, "mlp", "kernel"] for name in layers]
    paths += [["params", "params", "token_embedder", "embedding"], ["opt_state", "mu", "decoder", "layers_9"]]
    leaves = {str(path): {"key_metadata": [{"key": key} for key in path]} for path in paths}
    (items / "_METADATA").write_text(json.dumps({"tree_metadata": leaves}))
    (folder / str(step) / "commit_success.txt").write_text("")
    return folder / str(step)


@pytest.fixture
def begin(job: Check, tmp_path: Path) -> Begin:
    """Begin a run of twelve steps whose checkpoints lie in ``ck``, and return where it begins."""

    def start_at(argv: str) -> int:
        training = job(["--checkpoint", str(tmp_path / "ck"), "--num-steps", "12", *argv.split()])
        check_parameters(training)
        with beginning(training) as step:
            return step

    return start_at


def test_only_complete_checkpoints_count(tmp_path: Path):
    assert look(tmp_path / "nowhere") == []
    for step in (9, 0, 10):
        write(tmp_path, step)
    (tmp_path / "11.orbax-checkpoint-tmp").mkdir()
    assert look(tmp_path) == [0, 9, 10]
    (tmp_path / "0/commit_success.txt").unlink()  # a run was killed while Orbax removed it
    assert look(tmp_path) == [9, 10]
    assert layers_of(leaf_paths(tmp_path / "10/items")) == {*UNROLLED}


def test_a_checkpoint_that_was_copied_in_part_is_refused(tmp_path: Path):
    (write(tmp_path, 3) / "commit_success.txt").unlink()
    with pytest.raises(CheckpointError, match="3 is no complete checkpoint"):
        look(tmp_path)
    shutil.rmtree(tmp_path / "3")
    write(tmp_path, 4).joinpath("items/_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match=r"_METADATA: cannot be read as a checkpoint of MaxText .*; remove .*4$"):
        leaf_paths(tmp_path / "4/items")


def test_a_run_goes_on_after_the_newest_checkpoint(begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert begin("--pp 2 --resume") == 0
    assert "resuming from step 0: there is no checkpoint yet" in capsys.readouterr().err
    write(tmp_path / "ck", 6)
    assert begin("--pp 2 --resume") == 7
    assert capsys.readouterr().err == "resuming from checkpoint 6\n"


@pytest.mark.parametrize(
    ("argv", "layers", "error", "message"),
    [
        ("--pp 2", UNROLLED, FlagError, "has checkpoints up to 6; add --resume"),
        ("--backend spmd --scan-layers --resume", STACKS, CheckpointError, "in stacks, .* scanned; go on with"),
        ("--backend spmd --resume", ["layers"], CheckpointError, "scanned, .* unrolled; use --scan-layers"),
        ("--backend spmd --scan-layers --resume", UNROLLED, CheckpointError, "unrolled, .*; use --no-scan-layers"),
        ("--pp 2 --resume --model-name olmo3-7b", ["layers"], CheckpointError, "scanned, .*; use --backend spmd"),
    ],
)
def test_what_cannot_go_on_is_refused(begin: Begin, tmp_path: Path, argv: str, layers: Any, error: Any, message: str):
    write(tmp_path / "ck", 6, layers)
    with pytest.raises(error, match=message):
        begin(argv)


@pytest.mark.parametrize("layers", [UNROLLED, STACKS, ["layers"]])
@pytest.mark.parametrize("argv", ["--pp 2", "--pp 4", "--pp 2 --scan-layers", "--pp 2 --scan-layers --interleave 2"])
def test_a_pipeline_goes_on_from_any_layout(begin: Begin, tmp_path: Path, argv: str, layers: list[str]):
    write(tmp_path / "ck", 6, layers)
    assert begin(f"{argv} --resume --num-layers 4") == 7


@pytest.mark.parametrize(
    ("argv", "layers", "message"),
    [
        ("--pp 2", ["layers"], "scanned, but .* unrolled; write them anew"),
        ("--pp 2 --scan-layers", ["layers"], "scanned, but this run has them in stacks; write them anew"),
        ("--pp 2 --scan-layers", UNROLLED, "unrolled, but this run has them in stacks; use --no-scan-layers$"),
        ("--pp 2", STACKS, "in stacks, but this run has them unrolled; use --scan-layers$"),
        ("--backend spmd", STACKS, "in stacks, but this run has them unrolled; write them anew"),
        ("--backend spmd", [], "cannot be read as a checkpoint of MaxText"),
        ("--pp 2", UNROLLED, None),
        ("--backend spmd", UNROLLED, None),
        ("--backend spmd --scan-layers", ["layers"], None),
    ],
)
def test_parameters_to_begin_with_have_the_layout_of_the_run_or_are_refused_by_their_own_name(
    begin: Begin, tmp_path: Path, argv: str, layers: list[str], message: str | None
):
    source = tmp_path / "given/7/items"
    if layers:
        write(tmp_path / "given", 7, layers)
    refusal = pytest.raises(CheckpointError, match=rf"^load_parameters_path={source}:? .*{message}")
    with refusal if message else nullcontext():
        assert begin(f"{argv} load_parameters_path={source}") == 0


LAYOUTS = [("layers_0", "layers_1", "layers_2", "layers_3"), ("layers_0_1", "layers_2_3"), ("layers",)]
LAYOUTS += [("layers_0_2", "layers_3_3")]  # of unequal pieces
KERNEL = np.arange(4 * 3 * 2).reshape(4, 3, 2)  # of four layers, three by two each
COUNT = np.arange(4)


def state(names: Sequence[str]) -> dict[tuple[str, ...], np.ndarray]:
    """Parameters are stacked along their second dimension, counters along the first."""
    arrays: dict[tuple[str, ...], np.ndarray] = {("params", "embedding"): np.zeros(5)}
    for name in names:
        layers = list(layers_in(name, 4))
        kernel = np.stack(KERNEL[layers], 1) if is_stack(name) else KERNEL[layers[0]]
        arrays["params", "decoder", name, "kernel"] = kernel
        arrays["nnx_aux", "decoder", name, "count"] = COUNT[layers] if is_stack(name) else COUNT[layers[0], ...]
    return arrays


def test_what_not_every_layer_has_in_the_checkpoint_stays_as_the_run_made_it():
    """MaxText's layers share a generator of random numbers, which the checkpoint has once."""
    target, source = state(["layers_0_1", "layers_2_3"]), state(LAYOUTS[0])
    del source["nnx_aux", "decoder", "layers_1", "count"]
    assert ("nnx_aux", "decoder", "layers_0_1", "count") not in find_sources(target, source, 4)


def test_a_folder_that_cannot_be_used_is_named(job: Check, paths: Paths, tmp_path: Path):
    (tmp_path / "file").write_text("")
    lock = tmp_path / "file/lock"
    with pytest.raises(CheckpointError, match=r"file: .*; choose another"), writing(lock, "", CheckpointError):
        pass
    with pytest.raises(CheckpointError, match=r"--checkpoint .*file: Not a directory"):
        look(tmp_path / "file")
    paths.checkpoints.mkdir(parents=True)
    training = job(["--checkpoint", str(tmp_path / "ck")])
    with pytest.raises(FlagError, match=f"{paths.checkpoints}: File exists; choose another --output"):
        prepare_folders(training, paths, ())
    paths.checkpoints.rmdir()
    for _ in range(2):
        prepare_folders(training, paths, ())
        assert paths.checkpoints.readlink() == tmp_path / "ck"


def test_a_folder_belongs_to_one_run_until_its_trainer_has_ended(tmp_path: Path):
    lock = tmp_path / "lock"
    with writing(lock, "--output"):
        trainer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
        with pytest.raises(CheckpointError, match="writes here"), writing(lock, "--checkpoint", CheckpointError):
            pass
    with pytest.raises(FlagError, match="another run writes here"), writing(lock, "--output"):
        pass
    trainer.communicate(b"\n")
    with writing(lock, "--output"):
        pass


def test_no_run_goes_on_from_a_damaged_checkpoint(tmp_path: Path):
    for step in (6, 9, 9):
        write(tmp_path, step)
        if step == 9:
            aside(tmp_path / "9")
    assert look(tmp_path) == [6]
    assert {path.name for path in tmp_path.iterdir()} == {"6", "9.damaged", "9.damaged2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({("params", "layers_0", "w"): (4, 4)}, r"params/layers_0/w is \(4, 4\) in it and \(2, 3\) in this run;"),
        ({("params", "layers_0", "b"): (2,)}, r"params/layers_0/b is \(2,\) in it and not there in this run"),
        ({("params", "layers_0", "w"): None}, r"params/layers_0/w is not there in it and \(2, 3\) in this run"),
        ({("opt_state", "0", "count"): None}, r"opt_state/0/count is not there in it and \(\) in this run"),
        ({("nnx_aux", "rngs"): (9,)}, None),
    ],
)
def test_a_checkpoint_of_another_model_names_the_first_parameter(changes: dict[Any, Any], message: str | None):
    model = {("params", "layers_0", "w"): (2, 3), ("opt_state", "0", "count"): (), ("nnx_aux", "rngs"): (1,)}
    run_shapes, stored_shapes = (
        {path: shape if shape is None else np.zeros(shape) for path, shape in shapes.items()}
        for shapes in (model, model | changes)
    )
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        check_same(run_shapes, stored_shapes, {})


def test_metrics_of_steps_that_will_be_repeated_are_cut_off(paths: Paths):
    """The evaluation after the last step that counts stays.

    MaxText writes the running means of its batches, numbered from 0, and then the whole, with the step.
    """
    metrics, lines = paths.metrics, []
    assert Run(paths, range(3, 4)).before == []
    for step in range(4):
        lines.append(json.dumps({"learning/loss": 1.0, "learning/total_weights": 1.0, "step": float(step)}))
        lines += [json.dumps({"eval/avg_loss": 1.0, "step": float(batch)}) for batch in range(2)]
        lines.append(json.dumps({"eval/avg_loss": 1.0, "eval/total_loss": 2.0, "step": float(step)}))
    metrics.write_text("\n".join([*lines, '{"learning/loss": 1.']))
    assert [step.number for step in Run(paths, range(2, 4)).before] == [0, 1]
    assert metrics.read_text() == "\n".join(lines[:8]) + "\n"
