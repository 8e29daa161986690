"""``python -m multimesh forecast``: schedules beside the published formulas, without devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from multimesh.__main__ import main
from multimesh.schedules.table import PublishedIdle

from multimesh import schedules

TABLE = """\
p=4 submeshes, m=8 microbatches, tF=1, tB=1, tW=1, transfers 0

schedule             makespan  idle  in a row  published                              bubble  peak activations
gpipe                      33     9         9          9  (p-1)(tF+tB+tW)             27.3 %           8 8 8 8
looped-bfs, v=2          28.5   4.5       4.5        4.5  (p-1)(tF+tB+tW)/v           15.8 %           8 8 8 8
1f1b                       33     9         9          9  (p-1)(tF+tB+tW)             27.3 %           4 3 2 1
eager-1f1b                 33     9         9          9  (p-1)(tF+tB+tW)             27.3 %           7 5 3 1
interleaved, v=2         28.5   4.5       4.5        4.5  (p-1)(tF+tB+tW)/v           15.8 %   5.5 4.5 3.5 2.5
kimi-k2, v=2             28.5   4.5       4.5        4.5  (p-1)(tF+tB+tW)/v           15.8 %           6 5 4 3
zb-h1                      27     3         3          3  (p-1)(tF+tB-tW)             11.1 %           4 4 4 4
zb-h2                      27     3         0          0  (p-1)(tF+tB-2tW)            11.1 %           7 7 7 7
interleaved-zb, v=2      25.5   1.5       1.5        1.5  (p-1)(tF+tB-tW)/v            5.9 %           4 4 4 4
zb-v, v=2                25.5   1.5         0          0  0                            5.9 %           4 4 4 4
dualpipe-v, v=2          25.5   1.5       1.5          3  (p-1)(tF+2tB-tW)/v at most   5.9 %   4.5 4.5 4.5 4.5
wavefront                  33     9         9          -                              27.3 %           6 4 2 1
prefetch-wavefront         33     9         9          -                              27.3 %           6 4 2 1
"""


def run(capsys, *argv):
    code = main(["forecast", *map(str, argv)])
    return code, *capsys.readouterr()


def test_all_schedules(capsys):
    assert run(capsys) == (0, TABLE, "")


def test_one_schedule(capsys):
    code, out, _ = run(capsys, "--schedule", "zb-h1", "--costs", "F=2, B=2,W=1", "--stages", 3, "--microbatches", 6)
    assert code == 0
    assert out.splitlines()[-1].split() == ["zb-h1", "36", "6", "6", "6", "(p-1)(tF+tB-tW)", "16.7", "%", "3", "3", "3"]


def test_auto_says_what_it_chose_from(capsys):
    argv = ("--schedule", "auto", "--costs", "F=1,B=1.5,W=0.5")
    code, out, _ = run(capsys, *argv)
    assert code == 0
    lines = out.splitlines()
    assert lines[-1] == "took zb-h1: the shortest published table that fits into memory"
    assert [line.split()[0] for line in lines if line.endswith("taken")] == ["zb-h1"]
    (row,) = json.loads(run(capsys, *argv, "--json")[1])["schedules"]
    assert row["choice"]["taken"] == "zb-h1"
    assert row["makespan"] == row["choice"]["candidates"][1]["makespan"] == 30


def test_json(capsys):
    code, out, _ = run(capsys, "--schedule", "interleaved", "--interleave", 4, "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 0
    (only,) = document["schedules"]
    assert only["idle"] == pytest.approx([9 / 4] * 4)
    assert only["agrees"] is True
    assert (only["stages_per_submesh"], only["formula"]) == (4, "(p-1)(tF+tB+tW)/v")


def test_where_a_formula_need_not_hold(capsys):
    code, out, _ = run(capsys, "--schedule", "zb-v", "--costs", "F=1,B=2,W=1")
    assert code == 0
    assert out.splitlines()[-1].startswith("zb-v: the formula need not hold, as tF, tB and tW differ")


def test_pictures(tmp_path, capsys):
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    code, out, _ = run(capsys, "--schedule", "1f1b", "--svg", svg, "--perfetto", trace)
    assert code == 0
    assert out.splitlines()[:2] == [f"wrote {svg}", f"wrote {trace}"]
    assert svg.read_text().startswith("<svg ")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--svg", "a.svg"], "--svg and --perfetto show one schedule; name it with --schedule"),
        (["--costs", "F=1"], "expected one for each of F, B and W, got 'F'"),
        (["--costs", "1"], "--costs: expected F=1,B=1,W=1 with your numbers, got '1'"),
        (["--costs", "F=1,B=-1,W=1"], "that of B must be a finite number of at least 0"),
        (["--transfer", "-1"], "--transfer: must be a time of at least 0, got '-1'"),
        (["--stages", "0"], "--stages: must be a whole number of at least 1"),
        (["--schedule", "zb-h1", "--interleave", "2"], "schedule zb-h1 has one stage a submesh"),
        (["--schedule", "zigzag"], "'zigzag'"),
    ],
)
def test_bad_flags(argv, word, capsys):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert word in err
    assert err.count("\n") == 1


def test_an_idle_time_that_is_not_the_published_fails(capsys, monkeypatch):
    idle = PublishedIdle(5.0, "(p-1)")
    monkeypatch.setattr(schedules.OneFOneB, "idle", lambda *_: idle)
    code, out, err = run(capsys, "--schedule", "1f1b")
    assert code == 14
    assert "(p-1)" in out
    assert err == "error: 1f1b: the simulated idle time is not the published\n"


def test_without_jax():
    code = "import sys, multimesh.__main__ as m; c = m.main(['forecast']); sys.exit(99 if 'jax' in sys.modules else c)"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


STEP = Path(__file__).with_name("lowered_step.py")


@pytest.mark.compile_gpu
def test_a_step_of_the_user_is_compiled_for_gpus_that_are_not_there(capsys):
    argv = ("--compile", f"{STEP}:lower", "--device", "h100", "--gpus", 4)
    code, out, err = run(capsys, *argv, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["compilation"]["kernels"] == 2
    assert document["limit"] == pytest.approx(0.75 * 80 * 2**30, rel=0.03)
    for forecast, compiled in zip(document["forecast"], document["compiled"], strict=True):
        assert forecast["arguments"] == compiled["arguments"] >= 2 * 1024**2
    most = max(kernel["total"] for kernel in document["compiled"])
    code, out, err = run(capsys, *argv, "--memory", most - 1)
    assert code == 16
    assert "2 kernels, " in out
    assert "on each device, and JAX may use" in err


@pytest.mark.compile_gpu
@pytest.mark.parametrize(
    ("function", "code", "word"),
    [
        ("lower_nothing", 2, "returned a tuple"),
        ("missing", 2, "has no function 'missing'"),
        ("fail", 1, "it raised ValueError: 8 are too few"),
    ],
)
def test_a_function_that_lowers_no_step_is_named(capsys, function, code, word):
    result = run(capsys, "--compile", f"{STEP}:{function}")
    assert result[0] == code
    assert word in result[2]
    assert result[2].count("\n") == 1


def test_a_file_that_is_not_there_is_named(capsys):
    code, _, err = run(capsys, "--compile", "nowhere.py:lower")
    assert code == 2
    assert "--compile nowhere.py:lower: write FILE:FUNCTION" in err
