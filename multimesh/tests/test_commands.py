"""``python -m multimesh``: its flags, errors and interrupts; and the first example."""

import contextlib
import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from multimesh.__main__ import main
from multimesh.errors import DisagreementError, DoesNotFitError, UsageError
from spawning import CLEAN


def multimesh(*argv, code=None, env=CLEAN):
    """A fresh process, without any variable that makes virtual devices."""
    command = [sys.executable, *(("-m", "multimesh") if code is None else ("-c", code)), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["forecast", "--stages", "0"], "--stages: must be a whole number of at least 1, got '0'"),
        (["check", "--stages", "many"], "--stages"),
        (["forecast", "--microbatches", "-1"], "--microbatches"),
        (["forecast", "--schedule", "zbv"], "unknown schedule 'zbv'; did you mean zb-v? known: gpipe"),
        (["forecast", "--sched", "gpipe"], "--sched"),
        (["forecast", "--svg", "no-such-folder/a.svg"], "can't write 'no-such-folder/a.svg': there is no folder"),
        (["forecast", "--perfetto", "/"], "can't write '/': it is a folder"),
        (["demo"], "demo"),
    ],
    ids=" ".join,
)
def test_bad_flags_end_in_one_line_before_jax_is_imported(argv, word):
    code = "import sys, multimesh.__main__ as m; c = m.main(sys.argv[1:]); sys.exit(99 if 'jax' in sys.modules else c)"
    process = multimesh(*argv, code=code)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("error: ")
    assert word in process.stderr
    assert process.stderr.count("\n") == 1


def test_help_names_every_exit_code(capsys):
    with pytest.raises(SystemExit) as error:
        main(["forecast", "--help"])
    assert error.value.code == 0
    output = capsys.readouterr().out
    for code in (0, *(kind.exit_code for kind in (UsageError, DisagreementError, DoesNotFitError)), 130):
        assert f"\n{code:>5}  " in output


@pytest.mark.longer
def test_the_example_runs(tmp_path):
    """examples/pipeline.py, alone in a fresh process; it compares itself with one device."""
    path = Path(__file__).parents[2] / "examples" / "pipeline.py"
    child = subprocess.run([sys.executable, path], capture_output=True, text=True, env=CLEAN, cwd=tmp_path, check=False)
    assert (child.returncode, "Warning" in child.stderr) == (0, False), child.stderr
    assert "step 4: loss" in child.stdout
    assert "parameters of back are on devices [4, 5, 6, 7]" in child.stdout
    page = (tmp_path / "timeline.html").read_text()
    assert "1f1b: 2 submeshes, 8 microbatches" in page
    assert "F0 encode microbatch 0\n" in page


INTERRUPTED = """
import itertools, sys
from multimesh import __main__
from multimesh.commands import forecast

def simulate(*_):
    print("begins", flush=True)
    for _ in itertools.count():
        exec("raise KeyboardInterrupt" if sys.argv[1:] else "")

forecast.choose_schedules = simulate
sys.exit(__main__.main(["forecast"]))
"""


def test_interrupted():
    """Ctrl-C at a terminal, pressed until it ends."""
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=CLEAN) as process:
        try:
            assert process.stdout.readline() == "begins\n"
            while process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
        finally:
            process.kill()
        assert (process.returncode, process.stderr.read().splitlines()[-1]) == (130, "interrupted")


def test_interrupted_while_python_executes_a_string(tmp_path):
    """As dataclasses and namedtuples do: Python itself keeps in mind that this was interrupted, and ends by SIGINT."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "interrupted", "inside"]
    process = subprocess.run(command, capture_output=True, text=True, env=CLEAN, cwd=tmp_path, check=False)
    assert (process.returncode, process.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("argv", "suggestion"),
    [
        ("spwn", "spawn"),
        ("forecast --schedul gpipe", "--schedule"),
        ("forecast --stges 3", "--stages"),
        ("chek", "check"),
    ],
)
def test_a_wrong_word_is_told_with_the_nearest(capsys, argv, suggestion):
    assert main(argv.split()) == 2
    assert f"did you mean {suggestion}? python -m multimesh COMMAND --help lists the flags" in capsys.readouterr().err


def test_a_terminal_without_our_signs(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    main(["forecast", "--stages", "2"])
    print("\N{MULTIPLICATION SIGN}")
    assert stream.buffer.getvalue().endswith(b"?\n")
