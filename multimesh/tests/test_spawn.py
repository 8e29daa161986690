"""`python -m multimesh spawn`, and `multimesh.launch`, of which it and other launchers are made."""

import os
import signal
import subprocess
import sys
import time

import pytest
from spawning import ON_CPU

import multimesh as mm
from multimesh import launch

SPAWN = (sys.executable, "-m", "multimesh", "spawn", "-n")


def spawn(count, program, *words, **options):
    return subprocess.run(
        [*SPAWN, str(count), str(program), *words], capture_output=True, text=True, env=ON_CPU, timeout=120, **options
    )


def write(folder, text):
    (folder / "program.py").write_text(text)
    return folder / "program.py"


@pytest.mark.multiprocess
def test_the_processes_find_each_other(tmp_path):
    text = "import multimesh, sys\nprint(multimesh.distributed.initialize(), sys.argv[1:])\n"
    program = write(tmp_path, text)
    process = spawn(2, program, "--steps", "3", check=True)
    for rank in range(2):
        assert f"process {rank} of 2 on " in process.stdout
    assert process.stdout.count("found by spawn: one process per device ['--steps', '3']") == 2
    assert process.stderr == ""


CHATTER = """
import os, sys
rank = os.environ["MULTIMESH_PROCESS"]
for number in range(300):
    for part in ("line ", rank, " ", str(number) * 50):
        print(part, end="", flush=True)
    print(flush=True)
print("half", file=sys.stderr, end="")
"""


@pytest.mark.parametrize("label", [False, True])
def test_lines_of_processes_stay_whole(tmp_path, label):
    process = spawn(3, *["--label"] * label, write(tmp_path, CHATTER), check=True)
    for rank in range(3):
        expected = [f"{rank}: " * label + f"line {rank} {str(number) * 50}" for number in range(300)]
        assert [line for line in process.stdout.splitlines() if f"line {rank} " in line] == expected
    assert len(process.stdout.splitlines()) == 900
    assert sorted(process.stderr.splitlines()) == [f"{rank}: half" if label else "half" for rank in range(3)]


def test_lines_come_when_they_are_printed(tmp_path):
    text = "import time\nprint('first')\ntime.sleep(600)"
    argv = [*SPAWN, "2", "-l", write(tmp_path, text)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=ON_CPU) as job:
        output = b""
        while not all(part in output for part in (b"0: first\n", b"1: first\n")):
            output += job.stdout.read1()
        job.terminate()


def test_output_that_a_stranger_holds_open_does_not_hold_up_the_end(tmp_path):
    text = "import subprocess, sys\nprint(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    process = spawn(2, write(tmp_path, text), check=True)
    for pid in process.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    assert len(process.stdout.split()) == 2


@pytest.mark.longer  # others get ten seconds to end by themselves
@pytest.mark.telling("os.kill(os.getpid(), 9)-137", "0-0")
@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("0", 0)])
def test_the_first_that_fails_ends_the_others_with_its_code(tmp_path, end, code):
    text = (
        f"import os, sys, time\n{end} if os.environ['MULTIMESH_PROCESS'] == '1' else time.sleep({600 if code else 0})"
    )
    assert spawn(3, write(tmp_path, text)).returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_it_ends_its_processes(tmp_path, number):
    text = "import os, time\nprint(os.getpid())\ntime.sleep(600)"
    with subprocess.Popen([*SPAWN, "2", write(tmp_path, text)], stdout=subprocess.PIPE, text=True, env=ON_CPU) as job:
        processes = [int(job.stdout.readline()) for _ in range(2)]
        job.send_signal(number)
        assert job.wait() == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{process}") for process in processes):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("2", "nothing.py"), "error: spawn: there is no file 'nothing.py'; give the Python program after the flags\n"),
        (("0", "program.py"), "error: argument -n/--processes: must be a whole number of at least 1, got '0'; "),
    ],
)
def test_what_is_wrong_is_said_in_a_line(words, message):
    process = subprocess.run([*SPAWN, *words], capture_output=True, text=True, env=ON_CPU, timeout=60)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(message)
    assert process.stderr.count("\n") == 1


OWN = """
import sys
from multimesh import launch
job = launch.job_variables()
variables = [job | launch.process_variables(rank, 2) for rank in range(2)]
code = launch.run_together([[sys.executable, sys.argv[1]]] * 2, variables, labels=["a ", "b "])
sys.exit(99 if "jax" in sys.modules else code)
"""


@pytest.mark.multiprocess
def test_a_launcher_of_ones_own_needs_no_jax(tmp_path):
    text = "import multimesh\nprint(multimesh.distributed.initialize(), flush=True)\n"
    argv = [sys.executable, "-c", OWN, write(tmp_path, text)]
    process = subprocess.run(argv, capture_output=True, text=True, env=ON_CPU, timeout=120, check=False)
    assert process.returncode == 0, process
    assert process.stdout.count("of 2 on ") == 2
    assert process.stderr == ""


def test_those_that_were_started_end_where_another_cannot_start(tmp_path):
    waits = [sys.executable, write(tmp_path, "import time\ntime.sleep(600)")]
    begin = time.monotonic()
    with pytest.raises(mm.MultiMeshError, match="no-such-program cannot be started: No such file") as error:
        launch.run_together([waits, ["no-such-program"]], [{}, {}])
    assert error.value.exit_code == 4
    assert time.monotonic() - begin < 30
    with pytest.raises(mm.UsageError, match="each command has variables of its own; got 2 and 1"):
        launch.run_together([waits] * 2, [{}])
    with pytest.raises(mm.UsageError, match="each command has a label of its own; got 2 and 1"):
        launch.run_together([waits] * 2, [{}] * 2, labels=[""])
    with pytest.raises(mm.UsageError, match=r"a command has no words: give its program first; got \[\[\]\]"):
        launch.run_together([[]], [{}])
    with pytest.raises(mm.UsageError, match=r"rank counts from 0 to processes - 1; got rank=2 of 2"):
        launch.process_variables(2, 2)


def test_one_that_has_to_be_killed_is_gone_when_the_call_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_PATIENCE", 0.5)
    pid = tmp_path / "pid"
    waits = f"trap '' TERM; echo $$ > {pid}.new; mv {pid}.new {pid}; while true; do sleep 0.1; done"
    fails = f"until [ -e {pid} ]; do sleep 0.1; done; exit 3"
    assert launch.run_together([["sh", "-c", text] for text in (waits, fails)], [{}, {}]) == 3
    assert not os.path.exists(f"/proc/{pid.read_text().strip()}")
