"""What a run leaves to the next one, and what it must not: folders, processes, modules. The trainer is a stand-in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killing import children, command_lines
from test_checkpoint import write

from multimesh_maxtext.command import cli, train_job
from multimesh_maxtext.command.cli import main
from multimesh_maxtext.command.environment import stale_parts
from multimesh_maxtext.command.training import StopRequest

TRAINER = """
import json, os, sys, time, numpy
print("numpy from", numpy.__file__, flush=True)
settings = dict(word.split("=", 1) for word in sys.argv[2:])
asked = json.loads(os.environ.get("MULTIMESH_RUN", "{}"))
if asked.get("forecast"):
    host = [{"kernels": 9, "arrays": 90, "transfers": 2}]
    json.dump({"needs": [], "bubble": 0.5, "host": host, "stages": None}, open(asked["forecast"], "w"))
if asked.get("forecast") or asked.get("dump_only"):
    sys.exit()
if os.environ.get("STAND_IN") == "reads a damaged checkpoint":
    values = {"cause": "damaged-checkpoint", "message": "1/d: gone", "remedy": "it is set aside as *.damaged"}
    json.dump({**values, "who": ""}, open(asked["outcome"], "w"))
    sys.exit(1)
if os.environ.get("STAND_IN") == "fails":
    sys.exit("no step was done")
with open(settings["metrics_file"], "a") as file:
    for step in range(int(settings["steps"])):
        record = {"learning/loss": 2.0 - step, "learning/grad_norm": 1.0, "perf/step_seconds": 0.1}
        print(json.dumps({"step": step, "learning/total_weights": 8} | record), file=file, flush=True)
        while os.environ.get("STAND_IN") == "goes on" and not os.path.exists(os.environ["GO_ON"]):
            time.sleep(0.05)
if os.environ.get("STAND_IN") == "leaves a child":
    if os.fork():
        time.sleep(600)
    os.setsid()
    time.sleep(600)
if os.environ.get("STAND_IN") == "reads data":
    import subprocess
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)
if os.environ.get("STAND_IN") == "needs memory":
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
    numpy.ones(1 << 40)
if os.environ.get("STAND_IN") == "needs memory in C++":
    print("terminate called after throwing an instance of 'std::bad_alloc'\\n  what():  std::bad_alloc", flush=True)
    os.abort()
if os.environ.get("STAND_IN") == "hangs":
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def stand_in(maxtext: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose MaxText has the configurations of the real one, and a trainer of a few lines."""
    root = tmp_path_factory.mktemp("repository")
    package = root / "third_party/maxtext/src/maxtext"
    for folder in (package, package / "trainers", package / "trainers/pre_train"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    for name in ("configs", "common"):
        (package / name).symlink_to(maxtext / "maxtext" / name)
    (package / "trainers/pre_train/train.py").write_text(TRAINER)
    return root


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(stand_in: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def command(*arguments: object, **environment: str) -> subprocess.Popen[str]:
        program = "import sys; from pathlib import Path; from multimesh_maxtext.command.cli import command; "
        program += f"command(sys.argv[1:], root=Path({str(stand_in)!r}))"
        line = [sys.executable, "-I", "-c", program, "--num-steps", "2", *map(str, arguments)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(line, env=os.environ | environment, **pipes))
        return processes[-1]

    yield command
    for process in processes:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate()
    return process.returncode, out, errors


def succeeded(ending: tuple[int, str, str]) -> str:
    """What a command printed that ended well."""
    assert ending[0] == 0, ending[2]
    return ending[1]


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(stand_in: Path, capsys: pytest.CaptureFixture) -> Command:
    """The command in this process, run to its end: its exit code, and what it printed."""

    def run(*arguments: object, stop: StopRequest | None = None) -> tuple[int, str, str]:
        code = main(["--num-steps", "2", *map(str, arguments)], root=stand_in, stop=stop)
        return code, *capsys.readouterr()

    return run


def wait_for(condition: Callable[[], object]) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("waited for a minute")


def running(start: Start, folder: Path, kind: str) -> tuple[subprocess.Popen[str], int]:
    """A launcher, and its trainer that has done a step."""
    one = start("--output", folder, STAND_IN=kind)
    (trainer,) = wait_for(lambda: children(one.pid) if (folder / "metrics.jsonl").exists() else [])
    return one, trainer


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.longer
def test_a_folder_that_holds_a_run_is_kept_unless_told_otherwise(start: Start, tmp_path: Path):
    out = succeeded(finish(start("--output", tmp_path)))
    assert "step 0 of 2" in out
    assert out.splitlines()[-1].startswith("ok: 2 steps")  # numbered 0 and 1, as in the metrics and the checkpoints
    assert [line.split()[0] for line in out.splitlines() if line.strip()[:1].isdigit()] == ["0", "1"]
    code, _, errors = finish(start("--output", tmp_path))
    assert (code, errors.count("\n")) == (2, 1)
    assert f"--output {tmp_path} holds another run; add --overwrite to replace it" in errors
    for name in ("mine.txt", "forecast.svg", "process-3/maxtext.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    succeeded(finish(start("--output", tmp_path, "--overwrite")))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    remaining = {".running", "maxtext.log", "metrics.jsonl", "outcome.json", "mine.txt"}
    assert {path.name for path in tmp_path.iterdir()} == remaining


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.longer
def test_looking_ahead_leaves_a_run_alone_even_while_it_runs(start: Start, command: Command, tmp_path: Path):
    """``--forecast`` and ``--dump-only`` have folders of their own, and are no run that another would replace."""
    start("--output", tmp_path, STAND_IN="hangs")
    wait_for(lambda: (tmp_path / ".running").exists() and (tmp_path / ".running").stat().st_size)
    before = contents(tmp_path)
    job = ("--pp", 2, "--cpus", 2)
    for flags in (("--forecast",), ("--dump-only", "--dump", tmp_path / "plan")):
        succeeded(command(*job, *flags, "--output", tmp_path))
    assert before.items() <= contents(tmp_path).items()
    assert command(*job, "--forecast", "--output", tmp_path / "fresh")[0] == 0
    succeeded(command("--output", tmp_path / "fresh"))


def test_what_failed_before_its_first_step_is_not_in_the_way(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "short.txt").write_text("abc")
    job = ("--output", tmp_path / "out", "--text", tmp_path / "short.txt")
    code, _, errors = command(*job, "--sequence-length", 8)
    assert (code, "use --sequence-length 2" in errors) == (2, True)
    with monkeypatch.context() as context:
        context.setenv("STAND_IN", "fails")
        assert command(*job, "--sequence-length", 2)[0] == 10
    succeeded(command(*job, "--sequence-length", 2))


def test_a_resumption_writes_over_no_other_run(command: Command, tmp_path: Path):
    """Only over the records that its own checkpoints do not have; every remedy that is named can be taken."""
    out, other_out, ck = (tmp_path / name for name in ("out", "own", "ck"))
    resume = ("--checkpoint", ck, "--resume")
    assert command("--output", out, "--num-steps", 3)[0] == 0
    before = (out / "metrics.jsonl").read_bytes()
    code, _, errors = command("--output", out)
    assert (code, "--resume" in errors) == (2, False)  # there is nothing to go on with
    code, _, errors = command("--output", out, *resume)
    assert code == 2
    refusal = f"holds a run that wrote no checkpoint to {ck}: --resume would write over it; choose another --output"
    assert errors == f"error: --output {out} {refusal}\n"
    assert (out / "metrics.jsonl").read_bytes() == before
    for _ in range(2):  # its own folder, before the first checkpoint
        succeeded(command("--output", other_out, *resume))
    (ck / "7").mkdir()
    (ck / "7/commit_success.txt").touch()
    code, _, errors = command("--output", other_out)
    assert (code, f"add --overwrite to replace it, --checkpoint {ck} --resume to go on" in errors) == (2, True)
    metrics = tmp_path / "mine.jsonl"
    metrics.write_text("mine")
    code, _, errors = command("--output", tmp_path / "third", "--metrics-file", metrics)
    assert (code, metrics.read_text()) == (2, "mine")
    assert f"--metrics-file {metrics} has the steps of another run; remove it, or choose" in errors
    code, _, errors = command("--output", tmp_path / "fourth", "--metrics-file", "/proc/metrics.jsonl")
    assert (code, "error: /proc/metrics.jsonl: " in errors) == (2, True)


@pytest.mark.parametrize("launcher", [("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), ()], ids=["srun", "alone"])
def test_what_is_wrong_for_all_processes_is_told_by_the_first(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: tuple[str, ...]
):
    """What only one finds, such as a file that its machine lacks, it tells after a while, and who it is."""
    monkeypatch.setattr(cli, "HOLD", 0.0)
    for name, value in zip(launcher, ("1", "2", "1"), strict=False):
        monkeypatch.setenv("SLURM_STEP_NODELIST", "n1")
        monkeypatch.setenv(name, value)
    job = ("--nodes", 2, "--cpus", 1, "--dp", 2, "--json", "--output", tmp_path)
    code, out, errors = command(*job, "learning_rat=1")
    assert (code, bool(out), bool(errors)) == ((2, False, False) if launcher else (2, True, True))
    code, out, errors = command(*job, "--text", tmp_path / "none")
    assert (code, bool(out)) == (2, not launcher)
    assert errors.startswith("error: process 1 of 2 on " if launcher else "error: --text")


@pytest.mark.parametrize(("kind", "code"), [("", 0), ("fails", 10)])
def test_a_signal_after_the_trainer_has_ended_does_not_change_the_verdict(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: int
):
    """Slurm tells all processes of a step to end as soon as the first one has ended with an error."""
    run_trainers, stop = train_job.run_trainers, StopRequest()

    def signal_after(*arguments: Any) -> Any:
        result = run_trainers(*arguments)
        stop(signal.SIGTERM, None)
        return result

    monkeypatch.setenv("STAND_IN", kind)
    monkeypatch.setattr(train_job, "run_trainers", signal_after)
    assert command("--output", tmp_path, stop=stop)[0] == code
    assert stop.count == 1


def test_two_runs_in_one_folder_are_refused(start: Start, tmp_path: Path):
    running(start, tmp_path, "hangs")
    code, _, errors = finish(start("--output", tmp_path, "--overwrite"))
    assert (code, errors.count("\n")) == (2, 1)
    assert f"--output {tmp_path}: another run writes here (`fuser " in errors
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("stays", ["leaves a child", "reads data"])
def test_a_killed_launcher_takes_its_trainer_along_and_what_stays_keeps_the_folder(
    start: Start, tmp_path: Path, stays: str
):
    """Also those that read data for it; but not what left its session."""
    one, trainer = running(start, tmp_path, stays)
    (child,) = wait_for(lambda: children(trainer))
    one.send_signal(signal.SIGKILL)
    wait_for(lambda: has_ended(trainer))
    if stays == "leaves a child":
        try:
            code, _, errors = finish(start("--output", tmp_path, "--overwrite"))
            assert (code, "another run writes here" in errors) == (2, True)
        finally:
            os.kill(child, signal.SIGKILL)
    wait_for(lambda: has_ended(child))
    succeeded(finish(start("--output", tmp_path, "--overwrite")))


def test_no_guard_is_left_of_a_run(start: Start, tmp_path: Path):
    one, trainer = running(start, tmp_path, "hangs")

    def guards() -> list[int]:
        return [pid for pid, words in command_lines() if words.endswith(f"guard\0{trainer}\0")]

    assert wait_for(guards)
    one.send_signal(signal.SIGTERM)
    assert finish(one)[0] == 130
    wait_for(lambda: not guards())


@pytest.mark.parametrize("flags", [("--dry-run",), ("--dry-run", "--json"), ("--pp", 2, "--forecast", "--dry-run")])
def test_a_pipe_that_is_closed_ends_the_command_without_a_traceback(start: Start, tmp_path: Path, flags: Any):
    one = start(*flags, "--output", tmp_path)
    assert one.stdout is not None
    one.stdout.close()
    assert one.stderr is not None
    assert (one.stderr.read(), one.wait()) == ("", 141)


def test_a_command_that_was_started_without_output_has_its_exit_code(root: Path):
    line = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, str(root / "maxtext/run.py")]
    assert [subprocess.run([*line, *words], check=False).returncode for words in (["--dry-run"], ["--no"])] == [0, 2]


def test_a_pipe_that_is_closed_while_it_trains_stops_the_trainer_with_a_line(start: Start, tmp_path: Path):
    one = start("--output", tmp_path, "--num-steps", 3, STAND_IN="goes on", GO_ON=str(tmp_path / "go on"))
    assert one.stdout is not None
    for line in one.stdout:
        if line.startswith("step 0 of"):
            break
    (trainer,) = wait_for(lambda: children(one.pid))
    one.stdout.close()
    (tmp_path / "go on").touch()
    assert one.stderr is not None
    errors = one.stderr.read()
    assert errors.endswith("so the trainer was stopped; write it to a file\n"), errors
    assert (one.wait(), errors.count("\n")) == (141, 1)
    assert has_ended(trainer)


@pytest.mark.parametrize(("kind", "words"), [("", "Unable to allocate 8.00 TiB"), (" in C++", "std::bad_alloc")])
def test_memory_of_the_machine_that_does_not_suffice_is_told_in_a_line(
    start: Start, tmp_path: Path, kind: str, words: str
):
    code, _, errors = finish(start("--output", tmp_path, STAND_IN=f"needs memory{kind}"))
    assert (code, errors.count("\n")) == (16, 1)
    assert errors.startswith("error: the memory of this machine did not suffice ")
    assert words in errors
    assert " after 2 of 2 steps" in errors
    assert "--mem of Slurm" in errors


def test_a_finished_job_that_is_run_again_has_nothing_left_to_do(start: Start, tmp_path: Path):
    write(tmp_path / "ck", 1)
    out = succeeded(finish(start("--output", tmp_path / "out", "--checkpoint", tmp_path / "ck", "--resume")))
    assert out.splitlines()[-1] == "ok: checkpoint 1 is after the last of --num-steps 2; nothing is left to do"


def test_a_run_whose_only_checkpoint_is_damaged_does_not_begin_anew(start: Start, tmp_path: Path):
    line = ("--output", tmp_path / "out", "--checkpoint", tmp_path / "ck", "--resume")
    code, _, said = finish(start(*line, STAND_IN="reads a damaged checkpoint"))
    assert (code, said.count("resuming from step 0")) == (15, 1)
    assert "1/d: gone; it is set aside as *.damaged; no checkpoint is complete" in said.splitlines()[-1]
    assert json.loads((tmp_path / "out/outcome.json").read_text())["cause"] == "damaged-checkpoint"


def test_stray_modules_do_not_reach_the_trainer(start: Start, tmp_path: Path):
    for name in ("numpy", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray module')")
    stray = {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}:"}
    succeeded(finish(start("--output", tmp_path / "out", **stray)))
    assert "site-packages/numpy" in (tmp_path / "out/maxtext.log").read_text()


def test_stray_modules_do_not_reach_the_door(root: Path, tmp_path: Path):
    for name in ("numpy", "json", "re", "yaml", "pathlib", "multimesh_maxtext"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray module')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:"}
    line = [sys.executable, str(root / "maxtext/run.py"), "--dry-run", "--json"]
    process = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["environment"]["PYTHONPATH"].endswith(f":{tmp_path}")


def test_a_maxtext_older_than_its_patches_is_noticed(tmp_path: Path, root: Path):
    assert list(stale_parts(tmp_path)) == []
    (tmp_path / "sources.lock").write_text("components:\n  maxtext:\n    patched_commit: aaaa\n")
    branch = tmp_path / "third_party/maxtext/.git/refs/heads/patched"
    branch.parent.mkdir(parents=True)
    (tmp_path / "third_party/maxtext/.git/HEAD").write_text("ref: refs/heads/patched\n")
    branch.write_text("aaaa\n")
    assert list(stale_parts(tmp_path)) == []
    branch.write_text("bbbb\n")
    assert list(stale_parts(tmp_path)) == [
        "third_party/maxtext is at bbbb, sources.lock wants aaaa; run ./bootstrap.sh"
    ]
    assert list(stale_parts(root)) == []
