"""The parameters of a checkpoint as MaxText's own tools read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from test_checkpoint import KERNEL, UNROLLED, write

from multimesh_maxtext.errors import CheckpointError, FileError
from multimesh_maxtext.export import export


def stored(names: list[str], axis: int = 1) -> dict[str, Any]:
    """Parameters of four layers, each three by two."""
    pieces = {"layers": [0, 1, 2, 3], "layers_0_2": [0, 1, 2], "layers_3_3": [3]}
    pieces |= {name: [number] for number, name in enumerate(UNROLLED)}
    layers = {
        name: {"kernel": np.stack(KERNEL[pieces[name]], axis) if name not in UNROLLED else KERNEL[pieces[name][0]]}
        for name in names
    }
    return {"params": {"params": {"decoder": layers, "embedding": np.arange(5.0, dtype="bfloat16")}}}


@pytest.mark.parametrize(
    ("kept", "scanned"),
    [(["layers_0_2", "layers_3_3"], True), (["layers"], True), (UNROLLED, False)],
    ids=["stacks", "scanned", "unrolled"],
)
@pytest.mark.parametrize("unrolled", [False, True])
def test_parameters_are_written_in_a_form_of_maxtexts(tmp_path: Path, kept: list[str], scanned: bool, unrolled: bool):
    written = ["layers"] if scanned and not unrolled else UNROLLED
    state = {**stored(kept), "opt_state": {"mu": np.ones(3)}}
    ocp.save(tmp_path / "ck/7", state, checkpointable_name="items")
    found = export(tmp_path / "ck", 7, tmp_path / "out", unrolled=unrolled)
    assert found == {"scan_layers": written == ["layers"], "bytes": KERNEL.nbytes + 10}
    assert ocp.metadata(tmp_path / "out").custom_metadata == {"scan_layers": found["scan_layers"]}
    np.testing.assert_equal(ocp.load(tmp_path / "out", checkpointable_name="items"), stored(written))


def test_nothing_is_exported_from_nothing_or_over_something(run: Callable[..., Any], tmp_path: Path):
    done = run("--checkpoint", tmp_path / "ck", "--export", tmp_path)
    assert (done.code, done.stderr.count("\n")) == (CheckpointError.exit_code, 1)
    assert "ck: there is no checkpoint to export; train first" in done.stderr
    write(tmp_path / "ck", 3)
    done = run("--checkpoint", tmp_path / "ck", "--export", tmp_path)
    assert (done.code, done.stderr.count("\n")) == (FileError.exit_code, 1)
    assert f"--export {tmp_path}: it is there already; choose another folder" in done.stderr


def test_layers_that_are_scanned_in_groups_stay_so(tmp_path: Path):
    state = {"params": {"params": {"decoder": {"layers": {"layers_0": {"kernel": KERNEL.swapaxes(0, 1)}}}}}}
    ocp.save(tmp_path / "ck/7", state, checkpointable_name="items")
    with pytest.raises(CheckpointError, match=r"scanned in groups, .*; leave out --no-scan-layers"):
        export(tmp_path / "ck", 7, tmp_path / "out", unrolled=True)
    assert export(tmp_path / "ck", 7, tmp_path / "out")["scan_layers"]
    np.testing.assert_equal(ocp.load(tmp_path / "out", checkpointable_name="items"), state)
