"""What a trainer is started with: what the hooks are told, and of several processes which is which."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from multimesh_maxtext.command import training
from multimesh_maxtext.command.command_line import read
from multimesh_maxtext.command.environment import memory_limit
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.member import Member, find_members, find_repeats
from multimesh_maxtext.command.training import SIGNALS, StopRequest, run_trainers
from multimesh_maxtext.command.translate import Launch, forecasting, launch
from multimesh_maxtext.errors import FlagError
from multimesh_maxtext.handoff import PIPELINE, TrainerConfig, receive

Check = Callable[[Sequence[str]], Job]
ROOT = Path(__file__).resolve().parents[2]
SLURM = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}
SPAWNED = {"MULTIMESH_PROCESS": "1", "MULTIMESH_PROCESSES": "16", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:6000"}
MPI = {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPI |= {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:5"}
MPICH = {"PMI_RANK": "9", "PMI_SIZE": "16", "MPI_LOCALRANKID": "1", "JAX_COORDINATOR_ADDRESS": "n1:6000"}
SHELL = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}


def test_a_forecast_needs_neither_dataset_nor_checkpoint(job: Check, paths: Paths):
    flags = (
        "--backend multimesh --pp 2 --gpus 2 --use-tfds-dataset --dataset-path /d --dataset-name c4 --tokenizer-path /t"
    )
    training = job([*flags.split(), "--checkpoint", "/c", "--profile", "--dump", "/p", "--forecast"])
    start = forecasting(training, paths, inherited={}, gpu_memory=None)
    assert start.command[5].endswith("base.yml")
    assert start.configuration["dataset_type"] == "synthetic"
    assert start.configuration["enable_checkpointing"] is False
    config = receive(start.environment)
    assert config.forecast
    assert config.dump == config.profile == ""


@pytest.mark.parametrize("launcher", [SLURM, MPI, MPICH, SHELL | MPI], ids=["srun", "mpirun", "mpich", "in a shell"])
def test_a_launcher_says_which_process_this_is(launcher: dict[str, str]):
    """The innermost does: ``--spawn`` and mpirun also start processes in a step of Slurm."""
    assert find_members(read(["--nodes", "16"]).flags, launcher) == [Member(9, 16, 1)]
    assert find_members(read(["--nodes", "16"]).flags, launcher | SPAWNED) == [Member(1, 16, 1)]
    assert find_members(read([]).flags, launcher) == [Member()]  # a job of one process may run anywhere
    assert find_members(read(["--nodes", "2", "--spawn"]).flags, launcher) == [Member(0, 2, 0), Member(1, 2, 1)]
    assert list(find_repeats(read(["--nodes", "16"]).flags, launcher)) == []
    (line,) = find_repeats(read([]).flags, {**launcher, **SPAWNED, "MULTIMESH_PROCESS": "0"})
    assert line.endswith("with --nodes 16 they train together")


@pytest.mark.parametrize(
    ("argv", "launcher", "message"),
    [
        ("--nodes 2", {}, "no launcher started this process; use `srun --ntasks=2 ...` or `mpirun -n 2 ...`, or"),
        ("--nodes 2", {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "no launcher"),  # a batch script, outside of srun
        ("--nodes 2", SHELL, "no launcher"),  # srun --pty bash
        ("--nodes 2", SLURM, "but Slurm started 16 processes; make them agree"),
        ("--nodes 2", {"SLURM_STEP_NODELIST": "n1"}, "SLURM_PROCID=, SLURM_NTASKS="),
        ("--nodes 2", SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID=x, SLURM_NTASKS=16"),
        ("--nodes 16", SLURM | {"SLURM_PROCID": "16"}, "SLURM_PROCID=16, SLURM_NTASKS=16"),
        ("--nodes 16", MPI | {"OMPI_COMM_WORLD_RANK": "-1"}, "OMPI_COMM_WORLD_RANK=-1, OMPI_COMM"),
        (
            "--nodes 16",
            {name: value for name, value in MPI.items() if "URI" not in name.upper()},
            "Open MPI does not say where process 0 is; give all processes JAX_COORDINATOR_ADDRESS=HOST:PORT",
        ),
    ],
)
def test_processes_that_cannot_meet_are_refused(argv: str, launcher: dict[str, str], message: str):
    with pytest.raises(FlagError) as error:
        find_members(read(argv.split()).flags, launcher)
    assert message in str(error.value)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_every_process_knows_what_its_gpus_hold_and_all_choose_by_what_all_know(job: Check, paths: Paths, nodes: str):
    def read_limits(*flags: str) -> tuple[int | None, int]:
        training = job(["--nodes", nodes, "--gpus", "2", "--dp", nodes, "--pp", "2", *flags])
        environment = launch(training, paths, inherited={}, gpu_memory=80_000, this=Member(0, int(nodes))).environment
        config = receive(environment)
        assert config
        return memory_limit(training.flags, 80_000), config.limit

    assert read_limits() == (60_000 * 2**20, 60_000 * 2**20 if nodes == "1" else 0)
    assert read_limits("--device-memory", "1GiB") == (2**30, 2**30)
    assert read_limits("--fbmem", "70") == (70_000 * 2**20, 70_000 * 2**20)


def test_stages_are_handed_over_in_the_environment(job: Check, paths: Paths):
    def variables(argv: str, **inherited: str) -> Mapping[str, str]:
        return launch(job(argv.split()), paths, inherited=inherited, gpu_memory=None).environment

    env = variables("--cpus 8 --pp 4 --dp 2 --schedule gpipe", PYTHONPATH="/mine")
    assert receive(env) == TrainerConfig(
        outcome=str(paths.outcome),
        stages=4,
        interleave=1,
        schedule="gpipe",
        table=None,
        placement=str(paths.output / "placement.json"),
        sizes=(2, 2, 2, 2),
    )
    assert receive(variables("--pp 2 --replicate-small-params")).replicate_below == 4 * 128  # the tokens of a batch
    assert receive(variables("--pp 2 --fsdp 2 --gather-once --dump d --dump-only")).gather_once
    assert env["PYTHONPATH"].startswith(f"{paths.maxtext}:{ROOT / 'maxtext/src'}:{ROOT / 'multimesh/src'}:")
    assert env["PYTHONPATH"].endswith("/site-packages:/mine")  # what is installed comes before what is inherited
    assert receive(variables("--pp 2")).schedule == "1f1b"
    down = "--cpus 4 --pp 4 --num-layers 8 --batch-size 8 --microbatch-size 1 --schedule auto"
    assert receive(variables(f"{down} --interleave 2")).route == (0, 1, 2, 3, 3, 2, 1, 0)  # the head is heavy
    assert receive(variables(f"{down} --interleave 2".replace("auto", "interleaved"))).route == ()
    assert receive(variables(down)).route == ()
    for one_program in ("--dp 2", "--pp 2 --backend spmd"):
        assert PIPELINE not in variables(one_program)


def test_every_process_gets_its_own_devices_and_dumps_its_own_programs(job: Check, paths: Paths):
    """A process that sees its own GPUs only takes the first."""
    on_cpus = job(["--nodes", "2", "--cpus", "4", "--dp", "8", "--dump", str(paths.output / "d")])
    for this, folder in ((Member(0, 2), "d"), (Member(1, 2), "d/process-1")):
        variables = launch(on_cpus, paths.of_process(this.rank), inherited={}, gpu_memory=None, this=this).environment
        assert "--xla_force_host_platform_device_count=4" in variables["XLA_FLAGS"]
        assert f'--xla_dump_to="{paths.output}/{folder}" ' in variables["XLA_FLAGS"]
        assert "JAX_LOCAL_DEVICE_IDS" not in variables
    on_gpus = job(["--nodes", "4", "--gpus", "2", "--dp", "8"])
    for visible, devices in (("", "2,3"), ("0,1,2,3", "2,3"), ("6,7", "0,1")):
        inherited = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        start = launch(on_gpus, paths, inherited=inherited, gpu_memory=None, this=Member(1, 4, 1))
        assert start.environment["JAX_LOCAL_DEVICE_IDS"] == devices
        assert start.configuration["num_slices"] == 1


@pytest.mark.full
def test_two_processes_train_what_one_does(maxtext: Path, tmp_path: Path):
    """MaxText alone, as srun starts it."""
    flags = "--backend spmd --dp 2 --pp 2 --num-layers 2 --batch-size 8 --sequence-length 32 --num-steps 3 --output"

    def start(*words: object, **variables: str) -> subprocess.Popen[str]:
        argv = [sys.executable, str(ROOT / "maxtext/run.py"), *flags.split(), *map(str, words)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(argv, env=os.environ | variables, **pipes)

    def losses(folder: Path) -> list[float]:
        return [json.loads(line)["learning/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    place, single = (tmp_path / "two", "--nodes", 2, "--cpus", 2), start(tmp_path / "one", "--cpus", 4)
    ranks = [start(*place, **step, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in "01"]
    outputs = [process.communicate(timeout=600)[0] for process in (single, *ranks)]
    assert [process.returncode for process in (single, *ranks)] == [0, 0, 0], outputs
    for folder in (tmp_path / "two", tmp_path / "two/process-1"):
        assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    assert (outputs[1].count("ok: 3 steps"), outputs[2]) == (1, "")


def follow(paths: Paths, *programs: str, saves: bool = False) -> tuple[list[str], int]:
    """Why trainers ended that are lines of a shell, and how many signals came to us meanwhile.

    A trainer that writes its number to ``$ENDED`` has ended when we get a signal, and nobody has looked since.
    """
    starts, stop, file = [], StopRequest(), paths.output / "ended"
    stop.trains = True
    for rank, program in enumerate(programs):
        place = paths.of_process(rank)
        place.output.mkdir(parents=True, exist_ok=True)
        starts.append((Launch(("sh", "-c", program), {"ENDED": str(file)}, {}), place))

    def look_on() -> bool:
        number = file.read_text() if file.exists() and not stop.count else ""
        if number:
            state = Path(f"/proc/{number.strip()}/stat")
            while state.exists() and state.read_text().rpartition(") ")[2][0] != "Z":
                time.sleep(0.01)
            os.kill(ME, signal.SIGTERM)
        return saves

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        ends = run_trainers(starts, look_on, stop)
        return [str(error or "").partition(";")[0] for error in ends], stop.count
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


ME = os.getpid()


@pytest.mark.stand_in("a shell in the place of the trainer")
@pytest.mark.parametrize(
    ("programs", "saves", "ends", "count"),
    [
        ([f"sleep 0.3; kill -TERM {ME}; sleep 0.5; exit 17"], False, ["SIGTERM ended the run"], 1),
        ([f"kill -INT {ME}; sleep 600"], False, ["SIGINT ended the run"], 1),
        ([f"trap 'exit 0' TERM; kill -USR1 {ME}; sleep 600 & wait"], True, [""], 1),  # it saves, and ends
        (
            [f"trap 'sleep 2.1; kill -HUP {ME}; sleep 9' TERM; kill -HUP {ME}; sleep 9"],
            True,
            ["SIGHUP ended the run"],
            2,
        ),
        (  # nothing to save
            [f"trap 'exit 0' TERM; kill -USR1 {ME}; sleep 600 & wait"],
            False,
            ["SIGUSR1 ended the run"],
            1,
        ),
        (["echo $$ >$ENDED; kill -TERM $$"], False, ["SIGTERM ended the run"], 1),  # Slurm ends both
        (["echo $$ >$ENDED; exit 17"], False, ["the trainer failed with exit code 17"], 1),  # it had failed
        (["exit 3", "sleep 600"], False, ["the trainer failed with exit code 3", ""], 0),
        (["sleep 0.3", "exit 0"], False, ["", ""], 0),
        (["kill -STOP $$", "exit 0"], False, ["", ""], 0),  # its work was done, and somebody stopped it
    ],
)
def test_trainers_are_ended_as_their_steps_ask_for(
    paths: Paths,
    monkeypatch: pytest.MonkeyPatch,
    programs: list[str],
    saves: bool,
    ends: list[str],
    count: int,
):
    """They never train on."""
    monkeypatch.setattr(training, "_PATIENCE", 0.5)
    assert follow(paths, *programs, saves=saves) == (ends, count)


OURS = r"JAX_COORDINATOR_ADDRESS[= ]\S+:6\d{4}"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("mpirun (Open MPI) 4.1.4", r"--oversubscribe --bind-to none( --allow-run\S+)? -n 2 "),
        ("mpirun (Open MPI) 5.0.3", rf"--oversubscribe .*-x {OURS} -n 2 "),
        ("HYDRA build details:\n    Version: 4.0.2", rf"-genv {OURS} -genv I_MPI_PIN off -n 2 "),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", rf"-genv {OURS} -genv I_MPI_PIN off -n 2 "),
        ("mpirun of another", None),
    ],
)
def test_every_mpirun_is_told_apart(tmp_path: Path, version: str, words: str | None):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo \'{version}\' || echo "$@"\n')
    mpirun.chmod(0o755)
    env = {key: value for key, value in os.environ.items() if key != "JAX_COORDINATOR_ADDRESS"}
    script = Path(__file__).parents[1] / "validate-mpi.sh"
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    process = subprocess.run([script], env=env, capture_output=True, text=True)
    if words is None:
        message = f"error: mpirun is neither of Open MPI nor of MPICH or Intel MPI: {version}\n"
        assert (process.returncode, process.stderr) == (4, message)
    else:
        assert re.match(words, process.stdout), process
