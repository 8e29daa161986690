"""Each process reads the rows of its own devices, those of stages without data none; a run goes on with other ones."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from spawning import run

pytest.importorskip("grain")  # of the group `run`; a released jax is tested without it
import data_steps

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).parent / "data_steps.py"
ROWS = data_steps.ROWS


def steps(processes, stages, folder, first):
    children = run(processes, 8 // processes, SCRIPT, str(stages), str(folder), str(first), "2")
    assert [e.code for e in children] == [0] * processes, [e.err for e in children]
    reports = [json.loads(e.out.splitlines()[-1]) for e in children]
    assert all(report["losses"] == reports[0]["losses"] for report in reports)
    return reports[0]["losses"], [report["asked"] for report in reports]


def shares(first, parts):
    """Rows of two steps, in parts of equal length."""
    number = [n * ROWS + np.arange(ROWS).reshape(parts, -1) for n in (first, first + 1)]
    return [sorted(row for rows in number for row in rows[part].tolist()) for part in range(parts)]


def wanted_losses(number):
    """Yield the losses of plain jit, on one device, which is given all rows."""
    dataset = data_steps.shuffle(data_steps.Source())
    reference, params = jax.jit(data_steps.training(data_steps.loss_of)), data_steps.initial()
    for step in range(number):
        rows = [dataset[step * ROWS + i] for i in range(ROWS)]
        params, value = reference(params, {name: np.stack([row[name] for row in rows]) for name in ("x", "y")})
        yield float(value)


def test_processes_read_the_rows_of_their_stages(tmp_path):
    losses, requests = steps(2, 4, tmp_path, 0)
    assert requests == [{"x": shares(0, 1)[0], "y": []}, {"x": [], "y": shares(0, 1)[0]}]
    np.testing.assert_allclose(losses, list(wanted_losses(2)), rtol=1e-5)


@pytest.mark.full
def test_a_run_goes_on_with_other_processes_and_stages(tmp_path):
    """Two processes with two stages each, then four: two for each of two stages, then one for each of four."""
    losses, _ = steps(2, 4, tmp_path, 0)
    middle, requests = steps(4, 2, tmp_path, 2)
    front, back = shares(2, 2)
    assert requests == [{"x": front, "y": []}, {"x": back, "y": []}, {"x": [], "y": front}, {"x": [], "y": back}]
    last, requests = steps(4, 4, tmp_path, 4)
    (all_rows,) = shares(4, 1)
    assert requests == [{"x": all_rows, "y": []}, {"x": [], "y": []}, {"x": [], "y": []}, {"x": [], "y": all_rows}]
    np.testing.assert_allclose([*losses, *middle, *last], list(wanted_losses(6)), rtol=1e-5)
