"""A job that goes on with fewer processes: the grids of ``--fallback``, what is refused, and real processes killed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from killing import trainers

from multimesh_maxtext.command import spawning
from multimesh_maxtext.command.cli import main
from multimesh_maxtext.command.fallback import Grid, choose, without_axes
from multimesh_maxtext.command.options import read
from multimesh_maxtext.command.report import Step
from multimesh_maxtext.command.restarts import Attempt, attempt_table, begin, continue_attempts, end, goodput
from multimesh_maxtext.command.roll_call import Place, answer
from multimesh_maxtext.command.translate import Paths
from multimesh_maxtext.errors import ProcessLostError

Run = Callable[..., Any]
STEPS = 12
SIZES = "--num-layers 4 --model-dims 32 --num-heads 2 --sequence-length 32 --batch-size 8 --microbatch-size 2 --seed 1"
FOUR = "--spawn --nodes 4 --cpus 1 --pp 2 --dp 2 --max-restarts 3 --checkpoint ck"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--fallback pp=4,zz=1",
            "'zz' is no axis of a grid; those are dp, fsdp, tp, cp, pp, ep, interleave",
        ),
        ("--fallback pp", "'pp' has no size; write e.g. pp=4,dp=2; pp=4,dp=1"),
        ("--fallback dp=4", "--fallback dp=4: 8 devices, but the job has 4"),
        ("--fallback pp=1,dp=3", "--fallback pp=1,dp=3: a batch of 8 is no multiple of dp x fsdp x ep x microbatch"),
        ("--fallback pp=3,dp=1;pp=8", "--fallback pp=8: 16 devices, but the job has 4"),
        ("--fallback dp=1,tp=4,pp=1", "--fallback dp=1,tp=4,pp=1: --tp 4 does not divide the attention heads (2)"),
        ("--fallback dp=1,tp=2,pp=2 --microbatch-size 1", "on each grid; use --microbatch-size 2"),
        ("--fallback dp=1 --cpus 2 --dp 4 --pp 2 --nodes 4 --fallback pp=1,dp=1", "multiple of 2"),
        ("--fallback auto --partition 1,3", "the planner deals layers by itself; leave out --partition"),
        ("--fallback dp=1 dataset_type=grain grain_train_files=x", "keeps a position in the data for each process"),
    ],
)
def test_a_grid_that_does_not_come_out_is_refused_before_anything_starts(
    root: Path, capsys: pytest.CaptureFixture, flags: str, told: str
):
    assert main(f"{FOUR} {SIZES} {flags}".split(), root=root) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --fallback")
    assert told in line


def test_fallback_needs_a_folder_for_checkpoints(root: Path, capsys: pytest.CaptureFixture):
    flags = "--spawn --nodes 2 --cpus 1 --pp 2 --max-restarts 1 --fallback pp=1"
    assert main(flags.split(), root=root) == 2
    assert "--fallback needs --checkpoint; add it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("pp=2,dp=1; pp=1,dp=1", ["4 --nodes 4", "2 --pp 2 --dp 1 --nodes 2", "1 --pp 1 --dp 1 --nodes 1"]),
        ("dp=1", ["4 --nodes 4", "2 --dp 1 --nodes 2"]),
        ("dp=2;dp=1;", ["4 --nodes 4", "2 --dp 1 --nodes 2"]),
    ],
)
def test_the_grids_of_a_job(root: Path, capsys: pytest.CaptureFixture, given: str, want: list[str]):
    """Its own comes first; axes that are not named stay; the global batch is that of the flags."""
    assert main([*FOUR.split(), *SIZES.split(), "--fallback", given, "--show-grids"], root=root) == 0
    found = capsys.readouterr().out.splitlines()
    assert found == [line if line[0] == "4" else f"{line} --batch-size 8" for line in want]


def test_the_planner_finds_a_grid_of_every_smaller_number(root: Path, capsys: pytest.CaptureFixture):
    """Three of four processes run three stages, though neither the batch nor the layers are a multiple of three."""
    assert main([*FOUR.split(), *SIZES.split(), "--fallback", "auto", "--show-grids"], root=root) == 0
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in found] == ["4", "3", "2", "1"]
    for processes, *words in found[1:]:
        sizes = dict(zip(words[::2], words[1::2], strict=True))
        assert sizes["--nodes"] == processes
        assert sizes["--batch-size"] == "8"
        axes = (int(sizes[f"--{axis}"]) for axis in ("dp", "fsdp", "tp", "cp", "pp", "ep"))
        assert math.prod(axes) == int(processes)


def test_the_first_grid_that_fits_is_taken():
    grids = [Grid("dp 2 pp 4", 8), Grid("pp 4", 4), Grid("dp 3 pp 2", 6), Grid("1 device", 1)]
    taken = [choose(grids, left) for left in range(9)]
    assert [grid and grid.processes for grid in taken] == [None, 1, 1, 1, 4, 4, 4, 4, 8]


def test_words_that_are_no_part_of_the_grid_stay():
    flags = "--pp=2 --dp 2 --nodes 4 --spawn --fallback auto --max-restarts 3 --seed 1 --text a --schedule gpipe"
    argv = flags.split()
    assert [*without_axes(argv)] == ["--seed", "1", "--text", "a", "--schedule", "gpipe"]


def at(seconds: float) -> str:
    return f"2026-01-01T10:{int(seconds) // 60:02d}:{seconds % 60:06.3f}+00:00"


def test_goodput_is_the_share_of_the_time_in_steps_that_counted():
    """Steps 3 to 5 were done twice; a first step of 9 s, of which 8 compile, counts as one of 1 s."""
    attempts = [
        Attempt(at(0), "dp 2 pp 2", 4, 0, 6, at(20), "process 3 was killed"),
        Attempt(at(20), "dp 2 pp 2", 4, 3, 3, at(24), "process 3 was killed"),
        Attempt(at(25), "pp 2", 2, 3, 7, at(50), "all steps are done"),
    ]
    seconds = [9.0, 1.0, 1.0, 12.0, 2.0, 2.0, 2.0]
    steps = [Step(number, 1.0, 1.0, took, 8.0) for number, took in enumerate(seconds)]
    assert goodput(attempts, steps) == "goodput 22.0 %: 7 steps that counted took 11.0 of 50.0 seconds"
    cells = [[*column.cells] for column in attempt_table(attempts).columns]
    assert cells[2:7] == [
        ["dp 2 pp 2", "dp 2 pp 2", "pp 2"],
        ["4", "4", "2"],
        ["0-5", "none", "3-6"],
        ["3", "0", "4"],
        ["20.0", "4.0", "25.0"],
    ]


def test_an_attempt_that_nobody_closed_ended_when_it_last_wrote_something(tmp_path: Path):
    """The pause until the next start, such as a wait for an allocation, is no part of it."""
    paths = Paths("", Path(), tmp_path, tmp_path / "metrics.jsonl")
    options = read(["--nodes", "2", "--cpus", "1", "--pp", "2", "--max-restarts", "1"]).options
    begin(options, paths, 0)
    paths.log.write_text("step 3")
    os.utime(paths.log, (1_700_000_000, 1_700_000_000))
    first, second = begin(options, paths, 7)  # numbers of another allocation go on
    assert datetime.fromisoformat(first.ended).timestamp() == 1_700_000_000
    assert second.ended == ""


@pytest.mark.parametrize(
    ("codes", "dones", "sizes"),
    [
        ([0], [9], [4]),
        ([10], [2], [4]),
        ([17, 0], [5, 9], [4, 4]),  # one process was lost on its way: as many are tried again
        ([17, 17, 0], [5, 3, 9], [4, 4, 2]),  # no step was done: so many cannot be had
        ([17, 17, 17, 14], [3, 3, 3, 9], [4, 2, 1, None]),
        ([17, 17, 17, 17], [5, 6, 7, 8], [4, 4, 4, 4]),  # --max-restarts 3
        ([17, 14], [5, 9], [4, 4]),
    ],
)
def test_a_job_that_lost_a_process_starts_again_on_a_grid_that_fits(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codes: list[int],
    dones: list[int],
    sizes: list[int | None],
    capsys: pytest.CaptureFixture,
):
    """At most as often as asked for, and only then."""
    started = []
    (tmp_path / "ck/2").mkdir(parents=True)
    (tmp_path / "ck/2/commit_success.txt").touch()
    paths = Paths("", Path(), tmp_path, tmp_path / "metrics.jsonl")

    def start(words: list[str], processes: int, _root: Path | None, number: int, *, saves: bool) -> int:
        """Be a job whose checkpoint has three steps."""
        options = continue_attempts(read(words), {"MULTIMESH_MAXTEXT_RESTARTS": str(number)}).options
        assert (options.resume, options.overwrite) == (number > 0, number == 0)
        assert (options.nodes, saves) == (processes, True)
        begin(options, paths, number)
        end(paths, "process 3 was killed", dones[len(started)])
        started.append(processes)
        return codes[len(started) - 1]

    monkeypatch.setattr(spawning, "_run", start)
    place = ["--output", str(tmp_path), "--checkpoint", str(tmp_path / "ck"), "--overwrite"]
    line = ["--spawn", "--nodes", "4", "--cpus", "1", "--pp", "2", "--dp", "2", "--max-restarts", "3", "--fallback"]
    code = main([*line, "dp=1; pp=1,dp=1", *place, *SIZES.split()], root=root)
    assert started == [size for size in sizes if size]
    told = capsys.readouterr().err
    assert told.count("all processes start again") == len(started) - 1
    assert told.count("all processes start again on ") == len({*started}) - 1
    if None in sizes:
        assert "no grid of --fallback can do with the processes that are left, 0" in told
        assert code == 17
    else:
        assert code == codes[-1]


def test_spare_gpus_take_the_place_of_lost_ones_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four processes of two GPUs on a machine of twelve, of which two, and then four more, are gone."""
    visible, started = [12, 10, 6], []
    monkeypatch.setattr(spawning, "visible_gpu_memory", lambda: [80] * visible[len(started)])
    monkeypatch.setattr(spawning, "_run", lambda _words, processes, *_, **__: started.append(processes) or 17)
    flags = "--spawn --nodes 4 --gpus 2 --pp 8 --max-restarts 2 --checkpoint ck --fallback pp=4"
    options = read([*flags.split(), "--output", str(tmp_path)]).options
    monkeypatch.setattr(spawning.restarts, "close_attempt", lambda *_: Attempt("", "", 4, 0, 1))
    assert spawning.spawn([], options, None, [Grid("pp 8", 4), Grid("pp 4", 2)]) == 17
    assert started == [4, 4, 2]


def kill_for_good(folder: Path, checkpoints: Path, ranks: tuple[int, ...], ended: threading.Event) -> None:
    """Kill these ranks when there is a second checkpoint, and whenever they are there again after that."""
    while not ended.wait(0.05):
        if any(path.name.isdigit() and int(path.name) for path in checkpoints.glob("*")):
            for pid in (pid for rank in ranks for pid in trainers(folder, rank)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def losses(metrics: Path) -> dict[int, float]:
    records = map(json.loads, metrics.read_text().splitlines())
    return {record["step"]: record["learning/loss"] for record in records if "learning/loss" in record}


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fallback", ["pp=2,dp=1", "auto"])
def test_processes_that_are_killed_for_good_are_done_without(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture, fallback: str
):
    """Ranks 2 and 3 of four die and always die again; losses are those of a run that nobody interrupts."""
    common = [*SIZES.split(), f"--num-steps={STEPS}", "dtype=float32", "--text", str(root / "LICENSE")]
    out, kept = tmp_path / "out", tmp_path / "ck"
    place = ["--output", str(out), "--checkpoint", str(kept), "--checkpoint-every", "2"]
    restarting = ["--max-restarts", "5", "--fallback", fallback]
    ended = threading.Event()
    killer = threading.Thread(target=kill_for_good, args=(out, kept, (2, 3), ended))
    killer.start()
    spawned = ["--spawn", "--nodes", "4", "--cpus", "1", "--pp", "2", "--dp", "2"]
    code = main([*spawned, *place, *restarting, *common], root=root)
    ended.set()
    killer.join()
    told = capfd.readouterr()
    assert code == 0, told.err
    print(told.out[told.out.index("attempt") :])
    rows = re.findall(r"^ *(\d) +[\d:]{8} +(\S.*?) {2,}(\d) +(\S+) +(\d+) +([\d.]+)  +(\S.*)$", told.out, re.MULTILINE)
    assert rows[0][1:3] == ("dp 2 pp 2", "4")
    assert rows[-1][2] == "2"
    assert rows[-1][-1].strip() == "all steps are done"
    assert re.search("process [23] of", rows[0][-1])  # later they are killed before they meet the others
    assert sum(int(row[4]) for row in rows) == STEPS
    assert re.search(r"^goodput [\d.]+ %: 12 steps that counted took", told.out, re.MULTILINE)

    assert main(["--cpus", "2", "--pp", "2", "--output", str(tmp_path / "one"), *common], root=root) == 0
    ours, want = losses(out / "metrics.jsonl"), losses(tmp_path / "one/metrics.jsonl")
    assert [*want] == [*range(STEPS)]
    # MaxText writes the metrics of a step one step later: those of the last step before a loss may be missing.
    assert len(ours) >= STEPS - 1
    assert ours == {step: pytest.approx(want[step], rel=1e-5) for step in ours}


@pytest.mark.longer
def test_those_that_came_share_out_the_places_of_the_largest_grid_they_can_have(tmp_path: Path):
    """Three of four come, one of them late; a file that lies there from another day is nobody."""
    (tmp_path / "0.json").write_text(json.dumps({"name": "old", "address": "n0:1", "beat": "7"}))
    grids = [Grid("dp 2 pp 2", 4), Grid("pp 2", 2, ("--dp", "1"))]

    def come(rank: int) -> Place | None:
        time.sleep(2 * (rank == 1))
        return answer(tmp_path, rank, 4, f"n{rank}:1", grids, patience=6 - 2 * (rank == 1))

    with ThreadPoolExecutor(3) as pool:
        places = [*pool.map(come, (1, 2, 3))]
    assert places == [Place(grids[1], 0, "n1:1"), Place(grids[1], 1, "n1:1"), None]


def test_too_few_say_so(tmp_path: Path):
    with pytest.raises(ProcessLostError, match="1 of 4 processes came within 0 s, too few for any grid"):
        answer(tmp_path, 2, 4, "n2:1", [Grid("pp 2", 2)], patience=0)


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.stand_in("processes with the variables that a kubelet gives, in place of pods")
def test_pods_whose_first_never_comes_train_on_a_smaller_grid(root: Path, tmp_path: Path):
    """The pods 1 and 2 train, 3 waits, and all end with 0."""
    common = [*SIZES.split(), "--num-steps=3", "dtype=float32", "--text", str(root / "LICENSE")]
    flags = "--nodes 4 --cpus 1 --pp 2 --dp 2 --max-restarts 3 --fallback dp=1 --resume --start-timeout 30"
    job = flags.split()
    place = ["--output", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "ck")]
    line = [sys.executable, str(root / "maxtext/run.py"), *job, *place, *common]
    port, pods = free_port(), []
    for rank in (1, 2, 3):
        told = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": 0, "RESTARTS": 0, "ADDRESS": f"127.0.0.1:{port}"}
        given = {f"MULTIMESH_MAXTEXT_{name}": str(value) for name, value in told.items()}
        own = {**os.environ, **given, "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}
        pods.append(subprocess.Popen(line, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [pod.communicate(timeout=600) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0, 0], said
    assert "2 cpu devices: pp 2;" in said[0][0]
    assert "does without this process" in said[2][1]
    assert main(["--cpus", "2", "--pp", "2", "--output", str(tmp_path / "one"), *common], root=root) == 0
    want = losses(tmp_path / "one/metrics.jsonl")
    assert losses(tmp_path / "out/metrics.jsonl") == {step: pytest.approx(want[step], rel=1e-5) for step in range(3)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
