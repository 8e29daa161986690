"""Real MaxText: killed and resumed, on other devices, on a disk that is full; and evaluated on the way."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from killing import kill_run, records, while_saving

pytestmark = pytest.mark.longer

Run = Callable[..., Any]
STEPS = 8
ALL = (f"max_num_checkpoints_to_keep={STEPS}",)
MODEL = ("--num-layers", 4, "--model-dims", 64, "--mlp-dims", 64, "--sequence-length", 32, "--attention", "dot_product")
# MaxText loads a row per device and microbatch at least, and drops what is over: grids with fewer see other text.
TRAINING = (*MODEL, "--batch-size", 8, "--microbatch-size", 2, "--num-steps", STEPS, "--seed", 3, "dtype=float32")
GRID = ("--cpus", 4, "--tp", 2, "--pp", 2)
EVALUATED = ("eval_interval=3", "eval_steps=2")


@dataclass(frozen=True)
class Reference:
    """A run that nobody interrupted, with a checkpoint after each step."""

    output: Path
    checkpoints: Path
    arguments: tuple[Any, ...]

    def up_to(self, step: int, folder: Path) -> Path:
        """A copy of its checkpoints, as if it had ended after a step."""
        shutil.copytree(
            self.checkpoints, folder, ignore=shutil.ignore_patterns(*(str(n) for n in range(step + 1, STEPS)))
        )
        return folder


@pytest.fixture(scope="module")
def reference(run: Run, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("whole")
    arguments = (*TRAINING, *EVALUATED, "checkpoint_period=1", *ALL, "--text", root / "LICENSE")
    result = run(*GRID, "--output", folder / "out", "--checkpoint", folder / "ck", *arguments)
    assert result.code == 0, result.stderr
    return Reference(folder / "out", folder / "ck", arguments)


def continues(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """All that was recorded is bit for bit what the whole run recorded, and no step is missing."""
    assert [record for record in actual if record not in expected] == []
    assert [record["step"] for record in actual if "learning/loss" in record] == [*range(STEPS)]
    assert actual[-1] == expected[-1]


def test_a_run_killed_while_it_saves_resumes_bit_for_bit(reference: Reference, run: Run, root: Path, tmp_path: Path):
    resume = (*GRID, "--output", tmp_path, "--checkpoint", tmp_path / "ck", "--resume", *reference.arguments)
    kill_run(root, resume, while_saving(tmp_path / "ck"))
    (half,) = (tmp_path / "ck").glob("*-tmp")
    result = run(*resume, "max_num_checkpoints_to_keep=3")
    assert result.code == 0, result.stderr
    step = int(half.name.split(".")[0])
    assert f"resuming from checkpoint {step - 1}\n" in result.stderr
    assert not half.exists()
    continues(records(tmp_path), records(reference.output))
    assert sorted(int(path.name) for path in (tmp_path / "ck").iterdir() if path.name.isdigit()) == [*range(STEPS)][-3:]


def agree(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same records in the same order, their losses and norms equal to 1e-5."""
    keys = ("step", "learning/loss", "learning/raw_grad_norm", "learning/param_norm", "eval/avg_loss")
    assert len(actual) == len(expected)
    for record, other in zip(actual, expected, strict=True):
        values = {key: record[key] for key in keys if key in record}
        assert values == {key: pytest.approx(other[key], rel=1e-5) for key in keys if key in other}
        assert len(values) >= 2


@pytest.mark.full
def test_one_program_goes_on_from_a_pipelines_checkpoint(reference: Reference, run: Run, tmp_path: Path):
    ck = reference.up_to(2, tmp_path / "ck")
    spmd = ("--backend", "spmd", "--no-scan-layers", "--cpus", 2, "--tp", 2)
    result = run(*spmd, "--output", tmp_path, "--checkpoint", ck, "--resume", *reference.arguments)
    assert result.code == 0, result.stderr
    actual, expected = records(tmp_path), records(reference.output)
    assert [record["step"] for record in actual if "learning/loss" in record] == [3, 4, 5, 6, 7]
    assert [record["step"] for record in actual if "eval/total_loss" in record] == [3, 6]
    agree(actual, expected[-len(actual) :])


@pytest.mark.full
@pytest.mark.parametrize(
    "grid",
    [
        ("--cpus", 8, "--dp", 2, "--pp", 4),
        ("--cpus", 4, "--fsdp", 2, "--pp", 2, "--schedule", "gpipe"),
        ("--cpus", 1, "--no-scan-layers"),
    ],
    ids=["dp2-pp4", "fsdp2-pp2", "alone"],
)
def test_other_grids_go_on_from_a_checkpoint(reference: Reference, run: Run, tmp_path: Path, grid: tuple[Any, ...]):
    ck = reference.up_to(2, tmp_path / "ck")
    resume = ("--checkpoint", ck, "--resume", f"learning_rate_schedule_steps={STEPS}", *reference.arguments)
    for name, flags in (("there", (*grid, *resume, "--num-steps", 5)), ("back", (*GRID, *resume))):
        result = run(*flags, "--output", tmp_path / name)
        assert result.code == 0, result.stderr
    actual = [*records(tmp_path / "there"), *records(tmp_path / "back")]
    losses, expected = (
        [record["learning/loss"] for record in rows if "learning/loss" in record]
        for rows in (actual, records(reference.output))
    )
    assert losses == pytest.approx(expected[3:], rel=1e-5)


@pytest.mark.full
def test_a_pipeline_goes_on_from_layers_in_another_layout(run: Run, root: Path, tmp_path: Path):
    """One stack, then one by one, then a stack per piece: each time a few steps further than the run before."""
    scanned = ("--backend", "spmd", "--cpus", 2, "--tp", 2, "--scan-layers")
    grids = (
        (4, scanned),
        (6, (*GRID, "--no-scan-layers")),
        (8, ("--cpus", 4, "--pp", 2, "--dp", 2, "--interleave", 2, "--scan-layers")),
    )
    text = ("--text", root / "LICENSE")
    single = run(*scanned, *TRAINING, "--output", tmp_path / "whole", *text)
    assert single.code == 0, single.stderr
    actual = []
    for steps, grid in grids:
        folder = tmp_path / str(steps)
        resume = ("--checkpoint", tmp_path / "ck", "--resume", "--num-steps", steps, "learning_rate_schedule_steps=8")
        result = run(*grid, *TRAINING, "--output", folder, *resume, *text)
        assert result.code == 0, result.stderr
        actual += records(folder)
    agree(actual, records(tmp_path / "whole"))


@pytest.mark.full
@pytest.mark.parametrize(
    "grid", [GRID, ("--backend", "spmd", "--no-scan-layers", "--cpus", 2, "--tp", 2)], ids=["pp", "spmd"]
)
def test_a_checkpoint_that_cannot_be_used_is_refused_in_a_line(
    reference: Reference, run: Run, tmp_path: Path, grid: tuple[Any, ...]
):
    ck = reference.up_to(2, tmp_path / "ck")
    resume = (*grid, "--output", tmp_path / "out", "--checkpoint", ck, "--resume", *reference.arguments)
    result = run(*resume, "--mlp-dims", 96)
    wider = r"--checkpoint is of another model or optimizer: params/.+ is .*64.* in it and .*96.* in this run; use .*"
    assert result.code == 15, result.stderr
    assert re.fullmatch(rf"error: {wider}", result.stderr.splitlines()[-1])
    for record in (ck / "2").glob("multimesh-sums*"):
        record.unlink()  # as in a checkpoint of an older run
    file = largest(ck / "2")
    os.truncate(file, file.stat().st_size // 2)
    result = run(*resume)
    assert result.code == 15, result.stderr
    remedy = f"copy it again, or remove {ck}/2 to go on from checkpoint 1"
    lines = "resuming from checkpoint 2\nmultimesh: checkpoint 2 has no checksums; its bytes are not compared\n"
    assert re.fullmatch(rf"{lines}error: checkpoint 2 cannot be read \(.+\); {remedy}\n", result.stderr)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(reference: Reference, run: Run, tmp_path: Path):
    """A bit of its arrays is another one, which Orbax does not see: the run sets it aside, and computes it again."""
    ck = reference.up_to(2, tmp_path / "ck")
    file = largest(ck / "2")
    data = file.read_bytes()
    middle = len(data) // 2
    file.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
    result = run(*GRID, "--output", tmp_path / "out", "--checkpoint", ck, "--resume", *reference.arguments)
    assert result.code == 0, result.stderr
    fault = rf"{file}: bytes 0 to [\d,]+ are not those that were written"
    notice = rf"{fault}; it is set aside as \*\.damaged"
    assert re.fullmatch(f"resuming from checkpoint 2\n{notice}\nresuming from checkpoint 1\n", result.stderr)
    agree(records(tmp_path / "out")[-2:], records(reference.output)[-2:])
    assert {path.name for path in ck.iterdir() if path.name[0].isdigit()} == {*map(str, range(STEPS)), "2.damaged"}


def largest(step: Path) -> Path:
    """The largest file of a checkpoint: it holds arrays."""
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
