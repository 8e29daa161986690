"""``str(plan)`` fits a terminal and can be read."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from test_forecast import plan_of

import multimesh as mm


@pytest.mark.parametrize("columns", [40, 80, 132])
@pytest.mark.parametrize(("schedule", "stages", "count"), [("1f1b", 4, 8), ("1f1b", 4, 64), ("interleaved", 8, 16)])
def test_no_line_is_wider_than_the_terminal(schedule, stages, count, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(plan_of(schedule, stages, count, meshes=4))
    assert max(map(len, text.splitlines())) <= columns
    assert [line[0] for line in text.splitlines()[-4:]] == list("0123")


def test_a_line_for_each_submesh(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(plan_of("1f1b", 3, 4)).splitlines()
    assert lines[0].startswith("submesh 0: [data=1 | devices 0], peak ")
    assert lines[4] == "Fm forward, Bm backward, FBm both in one kernel, of microbatch m"
    assert [line.split(" | ")[1].replace("unmarked ", "").replace(" unmarked", "") for line in lines[5:]] == [
        "zeros F0 F1 F2 B0 F3 B1 B2 B3",
        "zeros F0 F1 B0 F2 B1 F3 B2 B3",
        "zeros FB0 FB1 FB2 FB3",
    ]


def test_of_a_long_line_both_ends_are_shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    row = str(plan_of("gpipe", 2, 32)).splitlines()[-1]
    assert row == "1 | unmarked zeros F0 F1 ... 60 more ... B30 B31 unmarked"


def test_of_many_submeshes_the_first_and_last_are_shown():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    one = mm.jit(lambda x: mm.task(lambda x: x + 1, "add", mesh=mesh)(x)).plan(np.ones(3, np.float32))
    many = dataclasses.replace(
        one,
        submeshes=one.submeshes * 100,
        instructions=tuple(dataclasses.replace(i, submesh=s) for s in range(100) for i in one.instructions),
    )
    lines = str(many).splitlines()
    assert len(lines) < 60
    assert sum("76 more submeshes" in line for line in lines) == 2
    assert lines[-1].startswith("99 | add")
