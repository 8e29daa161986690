"""What processes must have alike, who holds up others, and the arguments of a meeting: without processes."""

import inspect
import re

import jax
import numpy as np
import pytest
from multimesh.processes import agree, initialize, launchers, step_counts

import multimesh as mm


class Steps(step_counts.StepsOfAll):
    """Processes that have ended and begun so many calls; one that is None has said nothing yet."""

    def __init__(self, *at, stall=0.0, now=1000.0):
        super().__init__(len(at), stall, 990)
        self.progress = {}
        for rank, calls in enumerate(at):
            self.note(rank, calls)
        self.stall_at(now)

    def note(self, rank, at, partners=(), finished=False):
        if at:
            self.progress[rank] = step_counts.text_of(at, frozenset(partners), finished)

    def stall_at(self, now):
        return self.find(self.progress, now)

    def ranks_at(self, *moments):
        return [stall and stall[0] for stall in map(self.stall_at, moments)]


def test_who_holds_up_others_is_told_after_two_minutes_and_again_after_four():
    assert Steps(None, None, None).ranks_at(1000, 1400) == [None, None]  # nobody has ended a step: they compile
    steps = Steps((52, 53), (51, 51), (52, 53))
    assert steps.ranks_at(1000, 1119) == [None, None]
    assert steps.stall_at(1121) == (1, "is after step 51 for 121 s, all others are in step 53", False)
    assert steps.ranks_at(1130, 1241, 1243) == [None, None, 1]
    steps.note(1, (51, 52))  # it goes on, and hangs again
    steps.note(2, (53, 53))
    assert steps.ranks_at(1300, 1419) == [None, None]
    assert steps.stall_at(1421) == (1, "is in step 52 for 121 s, others are after step 53 and in step 53", False)


def test_one_that_has_said_nothing_yet_is_not_late_since_the_machine_started():
    steps = Steps((7, 8), None, (7, 8), stall=2, now=991)
    assert steps.stall_at(991) is None
    assert steps.stall_at(993) == (1, "has been after step 0 for 3 s, all others are in step 8", True)


def test_a_job_that_hangs_ends_when_that_was_asked_for():
    steps = Steps((5, 6), (5, 6), (5, 6), stall=300)
    assert steps.ranks_at(1119, 1121, 1299) == [None, 0, None]
    assert steps.stall_at(1301) == (0, "has been in step 6 for 301 s, all others are in step 6", True)


def test_a_job_whose_processes_are_all_between_two_steps_does_not_end():
    """They compile the next plan, or save: other timeouts are for that."""
    steps = Steps((1, 1), (1, 1), (1, 1), stall=8)
    assert steps.ranks_at(1009, 1119) == [None, None]
    assert steps.stall_at(1121) == (0, "is after step 1 for 121 s, all others are after step 1", False)
    for rank in (1, 2):
        steps.note(rank, (1, 2))
    assert steps.ranks_at(1122, 1128) == [None, None]
    assert steps.stall_at(1130) == (0, "has been after step 1 for 9 s, all others are in step 2", True)


def test_one_that_compiles_longer_than_others_holds_them_up_from_then_on():
    """The time does not begin with its compilation: the others compiled too."""
    steps = Steps(None, None, None, stall=8)
    assert steps.stall_at(1060) is None
    steps.note(0, (1, 1))
    assert steps.ranks_at(1061, 1067, 1069) == [None, None, 1]


def test_one_that_has_ended_and_that_others_need_is_named():
    """After five seconds, but not where others call without it."""
    steps = Steps((3, 3), None, (3, 4))
    steps.note(1, (3, 3), finished=True)
    assert steps.stall_at(1004) is None
    assert steps.stall_at(1006) == (1, "ended after step 3, and others have begun step 4, which needs it", True)
    steps.note(2, (3, 4), partners={0, 2})
    assert steps.stall_at(1006) is None
    steps.note(0, (4, 4), finished=True)
    assert steps.stall_at(1200) == (2, "is in step 4 for 200 s, all others have ended", False)


@pytest.fixture(autouse=True)
def timeouts_of_this_test(monkeypatch):
    monkeypatch.setattr(agree, "_timeouts", {})


@pytest.mark.parametrize(
    ("timeouts", "environ", "message"),
    [
        ({"start": 0.0}, {}, "start_timeout=0.0: give a positive"),
        ({"silence": None}, {"MULTIMESH_SILENCE_TIMEOUT": "soon"}, "MULTIMESH_SILENCE_TIMEOUT=soon: give a positive"),
        ({"compile": float("inf")}, {}, "compile_timeout=inf: give a positive"),
    ],
)
def test_timeouts_are_numbers(monkeypatch, timeouts, environ, message):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(mm.UsageError, match=re.escape(message)):
        agree.choose_timeouts(timeouts)


@pytest.mark.parametrize("name", agree.TIMEOUTS)
def test_each_timeout_has_an_argument_and_a_variable(monkeypatch, name):
    """The argument wins; without both it is the usual one."""
    argument = "initialization_timeout" if name == "start" else f"{name}_timeout"
    assert argument in inspect.signature(mm.distributed.initialize).parameters
    for variable, value, expected in (("", None, agree.TIMEOUTS[name]), ("8", None, 8), ("8", 7, 7)):
        monkeypatch.setenv(f"MULTIMESH_{name.upper()}_TIMEOUT", variable)
        agree.choose_timeouts({name: value})
        assert agree.seconds_of(name) == expected


def member(rank, *words):
    return {
        "name": f"process {rank} of 4 (n{rank}, pid 7)",
        "host": f"n{rank}",
        "facts": {"command line": list(words)},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (lambda r: ["a.py", "--steps=1"], ""),
        (lambda r: ["a.py", str(r), "4", f"--log=/tmp/{r}.log", f"--me=n{r}"], ""),
        (lambda r: ["a.py", str(r), "1"], ""),  # which is also the number of one
        (lambda r: ["a.py", "1" if r == 2 else "3"], "has '3' where process 2 of 4 (n2, pid 7) has '1'"),
        (lambda r: ["a.py"] + ["-v"] * (r > 1), "has nothing where process 2 of 4 (n2, pid 7) has '-v'"),
        (lambda r: ["a.py", f"1{r}"], "has '10' where process 1 of 4 (n1, pid 7) has '11'"),
        (lambda r: ["-a", "-b"] if r else ["-b", "-a"], "has '-b' where process 1 of 4 (n1, pid 7) has '-a'"),
    ],
)
def test_command_lines_may_differ_in_the_number_and_host_of_a_process_only(words, message):
    members = [member(rank, *words(rank)) for rank in range(4)]
    if not message:
        assert [host for _, host in initialize.compare(members)] == ["n0", "n1", "n2", "n3"]
        return
    with pytest.raises(mm.UsageError, match=re.escape(f"; command line: process 0 of 4 (n0, pid 7) {message}")):
        initialize.compare(members)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "lacks coordinator_address, num_processes, process_id: start the processes with srun or mpirun"),
        ("pod", "lacks coordinator_address, num_processes, process_id: set JAX_COORDINATOR_ADDRESS=HOST:PORT and MUL"),
        ({"coordinator_address": "n1:1", "num_processes": 2}, "lacks process_id"),
        ({"coordinator_address": "n1", "num_processes": 2, "process_id": 0}, "'n1:61440'; got 'n1'"),
        ({"coordinator_address": "n1:99999", "num_processes": 2, "process_id": 0}, "got 'n1:99999'"),
        ({"coordinator_address": "n1:1", "num_processes": 2, "process_id": 2}, "got process_id=2 of 2"),
        ({"coordinator_address": "n1:1", "num_processes": 2, "process_id": "1"}, "got process_id='1' of 2"),
        ({"cluster_detection_method": "slurm"}, "cluster_detection_method='slurm' finds nothing here"),
    ],
)
def test_arguments_that_do_not_do_are_refused(monkeypatch, arguments, message):
    monkeypatch.setattr("multimesh.core._compat.has_backends", lambda: False)
    if arguments == "pod":
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    with pytest.raises(mm.UsageError, match=re.escape(message)):
        mm.distributed.initialize(**({} if arguments == "pod" else arguments))


def test_devices_in_use_are_refused():
    jax.devices()
    with pytest.raises(mm.UsageError, match="must come before anything that uses a device"):
        mm.distributed.initialize("n1:1", 2, 0)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_JOB_ID": "5", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
         | {"SLURM_LOCALID": "0"}, ("Slurm", ("n3:61445", 4, 2, [0]))),
        ({"OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.0.0.1:3", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}
         | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, ("Open MPI", ("10.0.0.1:61442", 3, 1, [1]))),
        ({"OMPI_VERSION": "5.0.11", "JAX_COORDINATOR_ADDRESS": "n:3", "OMPI_COMM_WORLD_SIZE": "3"}
         | {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, ("Open MPI", ("n:3", 3, 2, [1]))),
        ({"JAX_COORDINATOR_ADDRESS": "n:3", "PMI_SIZE": "3", "PMI_RANK": "2", "MPI_LOCALRANKID": "1"}
         , ("MPICH", ("n:3", 3, 2, [1]))),
        ({"JAX_COORDINATOR_ADDRESS": "n:3", "MULTIMESH_PROCESSES": "4", "JOB_COMPLETION_INDEX": "2"}
         , ("Kubernetes", ("n:3", 4, 2, None))),
        ({"JAX_COORDINATOR_ADDRESS": "n:3", "JAX_LOCAL_DEVICE_IDS": "0,2"}, ("arguments", ("n:3", None, None, [0, 2]))),
    ],
    ids=["Slurm", "Open MPI", "Open MPI 5", "MPICH", "Kubernetes", "environment"],
)  # fmt: skip
def test_launchers_are_found(monkeypatch, environ, expected):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert launchers.complete((None,) * 4, None, 1) == expected
    explicit = ("n9:1", 8, 7, None)
    assert launchers.complete(explicit, None, 1) == ("arguments", (*explicit[:3], expected[1][3]))


def test_what_a_launcher_lacks_is_said_in_a_line(monkeypatch):
    """Open MPI 5 without mpi4py on jax 0.12, and Kubernetes without its package: JAX raises a RuntimeError."""

    class Launcher:
        name = "k8s"

        def auto_detect_unset_distributed_params(self, *args):
            raise RuntimeError("Install the client of Kubernetes.")

    monkeypatch.setattr("multimesh.core._compat.launcher", lambda method: Launcher())
    with pytest.raises(mm.UsageError, match=r"^nothing says where process 0 is: Install the .* of Kubernetes; mend th"):
        launchers.complete((None,) * 4, None, 1)


def test_one_process_gathers_what_it_has():
    gathered = mm.distributed.gather({"a": jax.numpy.arange(3), "b": 2})
    assert type(gathered["a"]) is np.ndarray
    assert (gathered["a"].tolist(), gathered["b"]) == ([0, 1, 2], 2)


def test_processes_may_dump_programs_to_folders_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", '--a=1 --xla_dump_to="/two words/process-1" --b="c d"')
    assert initialize.describe("", {}, True)["facts"]["XLA_FLAGS"] == ["--a=1", '--b="c d"']
