"""``python -m multimesh demo``: what a user sees."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from multimesh.__main__ import main
from multimesh.commands import demo
from spawning import CLEAN

import multimesh as mm
from tests.xla_flags import QUICK


def multimesh(*argv, code=None, env=CLEAN):
    """A fresh process, without any variable that makes virtual devices."""
    command = [sys.executable, *(("-m", "multimesh") if code is None else ("-c", code)), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.fixture(autouse=True)
def flags_of_xla(monkeypatch):
    """The command takes the number of devices out of them, for its own process."""
    if "XLA_FLAGS" in os.environ:
        monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])


@pytest.mark.longer
@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(s, marks=pytest.mark.full) for s in mm.schedules.names() if s != "1f1b")]
)
def test_each_loss_is_that_of_one_device(schedule):
    argv = ("demo", "--schedule", schedule, "--steps", "5", "--microbatches", "3", "--json", "--plan")
    done = multimesh(*argv, env=CLEAN | {"XLA_FLAGS": " ".join(["--xla_force_host_platform_device_count=2", *QUICK])})
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr
    found = json.loads(done.stdout)
    assert [s["step"] for s in found["steps"]] == [1, 2, 3, 4, 5]
    for s in found["steps"]:
        assert s["loss"] == pytest.approx(s["reference"], rel=1e-5)
    assert found["steps"][-1]["loss"] < found["steps"][0]["loss"]
    submeshes = found["plan"]["submeshes"]
    assert [s["axes"] for s in submeshes] == [{"data": 2, "model": 2}] * 2
    assert [s["devices"] for s in submeshes] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert {i["microbatch"] for i in found["plan"]["instructions"] if i.get("phase")} == {0, 1, 2}


RIGHT = 2.0, 2.000001
WRONG = 1.9, 1.8
NO_NUMBER = float("nan"), float("nan")


def shown(capsys, monkeypatch, argv, steps):
    monkeypatch.setattr(demo, "train", lambda options, submeshes: iter(steps))
    code = main(["demo", *argv])
    return code, *capsys.readouterr()


@pytest.mark.longer
def test_without_flags_a_table_then_where_the_timeline_is(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = shown(capsys, monkeypatch, [], [RIGHT, RIGHT])
    assert (code, err) == (0, "")
    line = "   2.000000    2.000001     5.0e-07\n"
    assert f"step  submeshes  one device  difference\n   1{line}   2{line}" in out
    assert "ok: 2 steps agree to 1e-05; loss 2.0000 -> 2.0000\n" in out
    wrote, path, what = out.splitlines()[-1].replace(";", "").split(maxsplit=2)
    assert (wrote, what) == ("wrote", "open it in a browser")
    assert tmp_path in Path(path).parents
    page = Path(path).read_text()
    assert "1f1b: 2 submeshes, 4 microbatches" in page
    assert "F0 embed microbatch 0\n" in page


@pytest.mark.parametrize("bad", [WRONG, NO_NUMBER], ids=["wrong", "nan"])
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["table", "json"])
def test_losses_that_differ_fail(flags, bad, capsys, monkeypatch):
    code, out, err = shown(capsys, monkeypatch, flags, [RIGHT, bad])
    assert code == 14
    assert err.startswith(f"error: step 2: the losses {bad[0]} and {bad[1]} differ")
    assert err.count("\n") == 1
    assert "ok:" not in out
    if flags:
        found = json.loads(out)
        assert (found["agrees"], found["exit_code"], found["steps"][1]["step"]) == (False, 14, 2)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["demo", "--steps", "0"], "--steps: must be a whole number of at least 1, got '0'"),
        (["demo", "--steps", "many"], "--steps"),
        (["demo", "--microbatches", "-1"], "--microbatches"),
        (["demo", "--schedule", "zbv"], "unknown schedule 'zbv'; did you mean zb-v? known: gpipe"),
        (["demo", "--sched", "gpipe"], "--sched"),
        (["demo", "--html", "no-such-folder/a.html"], "can't write 'no-such-folder/a.html': there is no folder"),
        (["forecast", "--perfetto", "/"], "can't write '/': it is a folder"),
        (["demonstrate"], "demonstrate"),
    ],
    ids=" ".join,
)
def test_bad_flags_end_in_one_line_before_jax_is_imported(argv, named):
    code = "import sys, multimesh.__main__ as m; c = m.main(sys.argv[1:]); sys.exit(99 if 'jax' in sys.modules else c)"
    done = multimesh(*argv, code=code)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_names_every_exit_code(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for code in (0, 1, mm.UsageError.exit_code, demo.MissingPartError.exit_code, demo.DisagreementError.exit_code, 130):
        assert f"\n{code:>5}  " in shown


@pytest.mark.longer
def test_too_few_real_devices():
    done = multimesh("demo", "--devices", "real", "--json", env=CLEAN | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 4
    assert done.stderr == f"error: {json.loads(done.stdout)['error']}\n"
    assert "needs 8 devices and JAX found 1" in done.stderr


@pytest.mark.longer
def test_the_example_runs():
    """examples/pipeline.py, alone in a fresh process; it compares itself with one device."""
    path = Path(__file__).parents[2] / "examples" / "pipeline.py"
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=CLEAN, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 4: loss" in done.stdout
    assert "parameters of back are on devices [4, 5, 6, 7]" in done.stdout


@pytest.mark.longer
def test_interrupted():
    """Ctrl-C at a terminal, pressed until it ends."""
    command = [sys.executable, "-m", "multimesh", "demo", "--steps", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=CLEAN) as process:
        try:
            assert process.stdout.readline().startswith("transformer, 4 layers")
            for _ in range(
                300
            ):  # one inside of JAX's garbage collector callback is lost, one at the end changes nothing
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, err = process.communicate(timeout=0.2)
                    break
        finally:
            process.kill()
    assert (process.returncode, err.splitlines()[-1]) == (130, "interrupted")


def test_interrupted_while_python_executes_a_string(tmp_path):
    """As dataclasses and namedtuples do: Python itself keeps in mind that this was interrupted, and ends by SIGINT."""
    (tmp_path / "interrupted.py").write_text(
        "import sys\n"
        "from multimesh import __main__\n"
        "__main__._demo = lambda options: exec('raise KeyboardInterrupt')\n"
        "sys.exit(__main__.main(['demo']))\n"
    )
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("argv", "near"),
    [("dmo", "demo"), ("demo --schedul gpipe", "--schedule"), ("forecast --stges 3", "--stages"), ("chek", "check")],
)
def test_a_wrong_word_is_told_with_the_nearest(capsys, argv, near):
    assert main(argv.split()) == 2
    assert f"did you mean {near}? python -m multimesh COMMAND --help lists the flags" in capsys.readouterr().err


def test_a_terminal_without_our_signs(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    main(["forecast", "--stages", "2"])
    print("\N{MULTIPLICATION SIGN}")
    assert stream.buffer.getvalue().endswith(b"?\n")
