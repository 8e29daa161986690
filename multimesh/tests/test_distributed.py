"""Processes that meet, agree, and end together: real processes, and every fault within its time."""

import dataclasses
import inspect
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from agreeing import AGREE
from spawning import ON_CPU, certificates

ONE_DEVICE = ON_CPU | {"JAX_NUM_CPU_DEVICES": "1"}
START = """
import os, sys, time
rank, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import jax, numpy as np
import multimesh as mm
"""
JOIN = START + "job = mm.distributed.initialize(address, count, rank)\n"
STEPS = """
from multimesh.processes.liveness import watch
mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
replicated, parts = (jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("x")))
x = jax.make_array_from_callback((count,), parts, lambda index: np.ones(1, np.float32))
total = jax.jit(lambda x: x.sum(), out_shardings=replicated)
for step in range(100000):  # each waits for all
    total(x).block_until_ready()
    watch.count_step()
    if step == 3:
        print("ready", flush=True)
    if step == 5 and rank == count - 1:
        LAST
"""


@dataclasses.dataclass(frozen=True)
class Ending:
    code: int
    seconds: float
    log: str


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"127.0.0.1:{port}"
    _until(3, lambda: not _mentioning(f"127.0.0.1:{port}"))
    socket.create_server(("127.0.0.1", port)).close()  # and no port


def _mentioning(address):
    """Command lines of running processes that name an address."""
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if address.encode() in _read(path)]


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture
def job(tmp_path, address):
    """Run processes; with ``fault`` = (numbers, signal), send it when all are ready, and count the time from then."""

    def run(
        body, count=2, *, ranks=None, fault=None, limit=60, ends=None, environ=lambda rank: {}, words=lambda rank: ()
    ):
        script = tmp_path / "job.py"
        script.write_text(body)
        jobs = {}
        for place, rank in enumerate(ranks or range(count)):
            with (tmp_path / f"{place}.log").open("w") as log:
                argv = [sys.executable, script, str(rank), str(count), address, *words(place)]
                jobs[place] = subprocess.Popen(argv, env=ONE_DEVICE | environ(place), stdout=log, stderr=log)
        logs = [tmp_path / f"{place}.log" for place in jobs]
        since = time.monotonic()
        if fault:
            _until(limit, lambda: all("ready" in log.read_text() for log in logs) or any(map(_is_dead, jobs.values())))
            since = time.monotonic()
            for number in fault[0]:
                jobs[number].send_signal(fault[1])
        seconds = {}
        try:
            awaited = jobs if ends is None else {number: jobs[number] for number in ends}
            _until(limit, lambda: _note(awaited, seconds, since))
        finally:
            for process in jobs.values():
                process.kill()
        return [Ending(jobs[n].wait(), seconds.get(n, limit), logs[n].read_text()) for n in jobs]

    return run


def _is_dead(process):
    """Return whether a process ended; the system keeps its exit code: the neighbor may not have asked yet."""
    return process.returncode is not None or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _note(jobs, seconds, since):
    seconds |= {n: time.monotonic() - since for n, p in jobs.items() if n not in seconds and _is_dead(p)}
    return len(seconds) == len(jobs)


def _until(limit, true):
    deadline = time.monotonic() + limit
    while not true():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


def _name(rank, count=2):
    return rf"process {rank} of {count} \(\S+, pid \d+\)"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("count", "wait"), [(2, 1), pytest.param(2, 14, marks=pytest.mark.full), pytest.param(4, 0, marks=pytest.mark.full)]
)
def test_processes_agree_whatever_their_hash_seeds_and_end_together(job, count, wait):
    runs = job(JOIN + AGREE.replace("LATE", str(wait)), count, environ=lambda rank: {"PYTHONHASHSEED": str(rank)})
    assert [(e.code, "the end\n" in e.log) for e in runs] == [(0, True)] * count, runs
    waits = [re.search(f"multimesh: {_name(0, count)} is done and waits for others\n", e.log) for e in runs]
    assert [bool(w) for w in waits] == [wait > 10] + [False] * (count - 1), runs


FULL = pytest.mark.full
CALLBACK = """
        def wrong(x):
            raise ValueError('a fault')
        here = jax.device_put(jax.numpy.ones(2), jax.local_devices()[0])
        mm.distributed.gather(jax.jit(lambda x: jax.pure_callback(wrong, x, x))(here))"""
LEAVE = {  # what the last process does, its exit code, and what the others say of it
    "raise": ("raise RuntimeError('a fault\\nin one process')", 1, "failed after 6 steps: RuntimeError: a fault"),
    "usage": ("raise mm.UsageError('a fault')", 2, "failed after 6 steps: UsageError: a fault"),
    "fail": ("mm.distributed.fail(ValueError('a fault'))", 1, "failed after 6 steps: ValueError: a fault"),
    "Ctrl-C": ("os.kill(os.getpid(), 2)", 130, "failed after 6 steps: KeyboardInterrupt"),
    "callback": (CALLBACK, 1, "failed after 6 steps: .*Error: ValueError: a fault"),
    "value": ("np.asarray(x)", 1, r"failed .*: RuntimeError: Fetching .*: multimesh.distributed.gather\(x\), .*"),
}


@pytest.mark.telling("raise-2", "callback-2")
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "count"),
    [
        ("raise", 2),
        pytest.param("raise", 4, marks=FULL),
        ("callback", 2),
        ("value", 2),
        *(pytest.param(how, 2, marks=FULL) for how in ("usage", "fail", "Ctrl-C")),
    ],
)
def test_a_process_that_fails_leaves_at_once_and_the_others_name_it(job, how, count):
    """JAX alone: the process waits at its exit for the others, which wait for it."""
    fault, code, message = LEAVE[how]
    tell = "mm.distributed.tell_at_loss(lambda text, code: print('at loss', code, text, flush=True))\n"
    *others, last = job(JOIN + tell + STEPS.replace("LAST", f"print('fault', time.time(), flush=True); {fault}"), count)
    assert last.code == code, last
    assert ("Traceback" in last.log) == (how in ("raise", "usage", "Ctrl-C", "callback", "value")), last
    assert "a fault" in last.log or how not in ("raise", "usage", "fail", "callback"), last
    assert how != "value" or "\nmultimesh: multimesh.distributed.gather(x), called" in last.log, last
    for rank, other in enumerate(others):
        line = rf"multimesh: {_name(rank, count)} ends because {_name(count - 1, count)} {message}\n"
        assert re.search(line, other.log), other
        assert f"at loss {code} process {rank} of {count}" in other.log, other
        assert "Traceback" not in other.log, other
        assert other.code == (code if code > 0 else 17), other
        assert abs(other.seconds - last.seconds) < 5, (other, last)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("number", "rank", "count"),
    [
        (signal.SIGTERM, 1, 2),
        pytest.param(signal.SIGKILL, 1, 2, marks=FULL),
        pytest.param(signal.SIGSTOP, 1, 3, marks=FULL),
        pytest.param(signal.SIGSTOP, 0, 2, marks=FULL),
        pytest.param(signal.SIGSTOP, 0, 3, marks=FULL),
        pytest.param(signal.SIGKILL, 2, 4, marks=FULL),
    ],
)
def test_a_process_out_of_reach_is_named(job, number, rank, count):
    """The others know only that its heartbeat is missing."""
    soon = {"MULTIMESH_SILENCE_TIMEOUT": "4"}
    others = [other for other in range(count) if other != rank]
    body = JOIN + STEPS.replace("LAST", "pass")
    runs = job(body, count, fault=([rank], number), environ=lambda rank: soon, ends=others)
    message = rf"ends because {_name(rank, count)} has been out of reach for \d s( after \d+ steps?)?: it was killed or"
    for other in others:
        assert re.search(message, runs[other].log), runs[other]
        assert runs[other].code == 17, runs[other]


WITHOUT_FIRST = """
if rank == 0:
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(address, count, 0, cluster_detection_method="deactivate")
    os.kill(os.getpid(), 9)
"""
DEAF = """
from multimesh.processes import liveness
liveness.Watch._hear = lambda self: time.sleep(600)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=FULL)])
@pytest.mark.parametrize("before", ["", pytest.param(DEAF, id="deaf")])
def test_when_process_0_is_killed_the_others_name_it(job, before, count):
    """JAX's client notices at once too: it ends the process, unless a handler of C++ does that before."""
    zero, *others = job(
        START + before + JOIN[len(START) :] + STEPS.replace("LAST", "pass"), count, fault=([0], signal.SIGKILL)
    )
    assert zero.code == -signal.SIGKILL
    for rank, other in enumerate(others, 1):
        line = rf"multimesh: {_name(rank, count)} ends because {_name(0, count)} is gone: it was killed"
        assert len(re.findall(line, other.log)) == 1, other
        assert (other.code, "terminate called" in other.log) == (17, False), other


@pytest.mark.multiprocess
@pytest.mark.full
def test_when_process_0_is_killed_at_the_start_the_others_name_it(job):
    zero, other = job(START + WITHOUT_FIRST + JOIN[len(START) :])
    assert (zero.code, other.code) == (-signal.SIGKILL, 17), other
    assert re.search(rf"multimesh: {_name(1)} ends because process 0 is gone: it was killed", other.log), other
    assert "Traceback" not in other.log


@pytest.mark.multiprocess
@pytest.mark.parametrize(("last", "code"), [("break", 0), ("sys.exit(3)", 3)])
def test_a_process_that_has_left_is_named_where_others_need_it(job, last, code):
    """As with uneven batches: nobody waits for ever, and who has left keeps its exit code."""
    body = """
from jax.sharding import Mesh
meshes = [Mesh(np.array([d]), "x") for d in jax.devices()]
def f(w, x):
    h = mm.task(lambda w, x: x @ w, "a", mesh=meshes[0])(w[0], x)
    return mm.task(lambda w, h: (h @ w).sum(), "b", mesh=meshes[1])(w[1], h)
step, w = mm.jit(lambda w, x: jax.value_and_grad(f)(w, x)), [np.ones((4, 4), np.float32)] * 2
for n in range(5):
    if n == 3 and rank == 1:
        LAST
    jax.block_until_ready(step(w, w[0]))
"""
    first, second = job(JOIN + body.replace("LAST", last), limit=60)
    assert (first.code, second.code) == (17, code), (first, second)
    line = f"{_name(1)} ended after step 3, and others have begun step 4, which needs it\n"
    assert re.search(f"multimesh: {_name(0)} ends because {line}", first.log), first
    assert re.search(f"multimesh: {line}", second.log), second


@pytest.mark.multiprocess
def test_a_process_that_has_left_is_named_where_others_wait_for_it(job):
    first, second = job(JOIN + "if rank == 0:\n    mm.distributed.barrier('the end')\n")
    assert (first.code, second.code) == (17, 0), (first, second)
    assert "LostProcessError: the end: process 1 of 2 has ended and does not come here; do all processes" in first.log


@pytest.mark.multiprocess
@pytest.mark.full
def test_a_process_that_was_stopped_goes_on(job):
    """A debugger, a container that was paused: 6 s are no loss where they may be."""
    pause = """
        import subprocess
        subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 6; kill -CONT {os.getpid()}"])
    if step == 50:
        break"""
    job_that_waits = JOIN.replace("rank)", "rank, silence_timeout=20)")
    assert [e.code for e in job(job_that_waits + STEPS.replace("LAST", pause) + "time.sleep(0.2)\n")] == [0, 0]


STALL = """
from multimesh.processes.liveness import watch
for step in range(100):
    watch.begin_step()
    watch.count_step()
    mm.distributed.barrier(f"step {step}")  # each waits for all
    if step == 5 and rank == 1:
        time.sleep(600)
"""


@pytest.mark.multiprocess
def test_a_process_that_hangs_is_named_with_its_stack_and_ended_if_asked(job):
    first, second = job(JOIN.replace("rank)", "rank, stall_timeout=2)") + STALL)
    line = rf"{_name(1)} has been after step 6 for [2-9] s, all others are after step 7"
    assert re.search(rf"multimesh: {_name(0)} ends because {line}\n", first.log), first
    assert re.search(rf'multimesh: {line}\n(?:.*\n)*?  File ".*job.py", line \d+ in <module>\n', second.log), second
    assert first.code == 17
    assert second.code in (17, -signal.SIGABRT), second  # JAX aborts all when it misses process 0: most often later


@pytest.mark.multiprocess
def test_one_that_does_not_start_is_named(job):
    """JAX's barrier names it, in the lines of process 0."""
    runs = job(JOIN.replace("rank)", "rank, initialization_timeout=4)"), 4, ranks=[0, 2])
    for result in runs:
        assert re.search(
            r": not all 4 processes have started and reached process 0 at \S+ within 4 s; if", result.log
        ), result
        assert result.code == 2
        assert "Traceback" not in result.log
    assert re.search(r"timed out task names:\n(1\n3|3\n1)\n", runs[0].log), runs[0]


@pytest.mark.multiprocess
def test_a_coordinator_that_is_not_there_is_named(job, address):
    (only,) = job(JOIN.replace("rank)", "rank, initialization_timeout=2)"), ranks=[1])
    line = f"multimesh: {_name(1)}: not all 2 processes have started and reached process 0 at {address} within 2 s; if"
    assert re.search(line, only.log), only
    assert only.code == 2


@pytest.mark.multiprocess
def test_a_port_that_another_job_has_is_named(job, address):
    """JAX's services of both would share it, and mix the processes of both jobs."""
    shared = """
import socket
other = socket.socket(socket.AF_INET6)
other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
other.bind(("", int(address.rpartition(":")[2])))
other.listen()
"""
    (only,) = job(START + shared + JOIN.removeprefix(START), ranks=[0])
    line = rf"multimesh: {_name(0)} cannot listen at \[::\]:\d+: Address already in use.*; if another job"
    assert re.search(line, only.log), only
    assert only.code == 2


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("environ", "word", "message"),
    [
        ({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, "", "XLA_FLAGS: {} has nothing where {} has '--xla_cpu_en"),
        pytest.param({"MULTIMESH_TRANSPORT": "pull"}, "", "TRANSPORT: {} has nothing where {} has 'pull'", marks=FULL),
        pytest.param({"JAX_ENABLE_X64": "1"}, "", "of JAX: {} has 'jax_enable_x64=False' where {} has", marks=FULL),
        pytest.param({}, "--steps=3", "command line: {} has nothing where {} has '--steps=3'", marks=FULL),
    ],
)
def test_what_differs_is_named_before_anything_is_compiled(job, environ, word, message):
    runs = job(JOIN, environ=lambda rank: environ if rank else {}, words=lambda rank: [word] if rank and word else [])
    message = message.format(_name(0), _name(1))
    assert all(e.code == 2 for e in runs), runs
    assert re.search(f"multimesh: .*{message}.*\n", runs[0].log), runs
    assert runs[1].log == ""


@pytest.mark.multiprocess
@pytest.mark.parametrize("odd", [1, pytest.param(0, marks=FULL)])
def test_the_first_line_that_differs_is_named(job, odd):
    body = f"""
lines = [f"operation {{i}} " + "x" * 200 + ("sin" if rank == {odd} and i > 3 else "cos") for i in range(9)]
mm.distributed.agree_on("plan 1 (train)", lines)
"""
    runs = job(JOIN + body, 3 if odd == 0 else 2)
    line = f"plan 1 (train): process {odd} of {len(runs)} differs from process {1 - odd}, first in line 5, which is "
    for e in runs:
        assert re.search(re.escape(line) + "'[.]{3}x+sin' in place of '[.]{3}x+cos'; start all", e.log), e
        assert e.code == 2


@pytest.mark.multiprocess
@pytest.mark.mpi
@pytest.mark.full
@pytest.mark.parametrize(("last", "code"), [("break", 0), ("raise ValueError('a fault')", 1)])
def test_under_mpirun(tmp_path, last, code):
    """Open MPI says who is who; its own exit code is that of the process that failed."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun on this machine: apt-get install openmpi-bin")
    steps = STEPS.replace("rank == count - 1", "True" if last == "break" else "rank == 1").replace("LAST", last)
    join = "import os, jax, numpy as np, multimesh as mm\njob = mm.distributed.initialize()\nprint(job)\n"
    script = tmp_path / "job.py"
    script.write_text(f"{join}rank, count = job.rank, len(job.hosts)\n{steps}")
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, script]
    proc = subprocess.run(argv, env=ONE_DEVICE, capture_output=True, text=True, timeout=100)
    assert proc.returncode == code, proc
    assert len(re.findall(r"process \d of 2 on \S+, found by Open MPI: one process per device", proc.stdout)) == 2, proc
    assert not code or re.search(f"multimesh: .*{_name(1)} failed after 6 steps: ValueError: a fault\n", proc.stderr)


@pytest.mark.multiprocess
@pytest.mark.longer
@pytest.mark.parametrize("who", ["all", "one"])
def test_certificates_of_jax_keep_others_out(job, tmp_path, who):
    """JAX's own options, from 0.12 on; an older one has none, and that is said. One that lacks them does not get in."""
    options = certificates(tmp_path)
    options_of = f"{options} if rank == 0 or {who == 'all'} else dict()"
    runs = job(
        JOIN.replace("rank)", f"rank, initialization_timeout=20, jax_options={options_of})")
        + "mm.distributed.barrier('here')\n"
    )
    if "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
        line = r"multimesh: jax_options: .*mtls_"
        assert re.search(line, runs[0].log), runs
        assert runs[0].code == 2
    elif who == "all":
        assert [e.code for e in runs] == [0, 0], runs
    else:
        assert re.search(rf"multimesh: {_name(1)}: not all 2 processes .* within 20 s", runs[1].log), runs
        assert [e.code for e in runs] == [2, 2], runs


@pytest.mark.multiprocess
@pytest.mark.full
def test_ctrl_c_ends_a_process_that_waits(job):
    wait = """
jax.devices(); print("ready", flush=True)
time.sleep(600) if rank else mm.distributed.barrier("x")
"""
    first, second = job(JOIN + wait, fault=([0], signal.SIGINT))
    assert (first.code, second.code) == (130, 130), (first, second)
    assert max(first.seconds, second.seconds) < 7, (first, second)
    assert re.search(rf"ends because {_name(0)} failed: KeyboardInterrupt\n", second.log), second


@pytest.mark.multiprocess
def test_a_second_ctrl_c_does_not_change_how_a_process_ends(job):
    """It comes while the process tells the others of the first."""
    body = """
import signal, threading
if rank == 0:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    os.kill(os.getpid(), signal.SIGINT)
time.sleep(600)
"""
    first, second = job(JOIN + body)
    assert (first.code, second.code) == (130, 130), (first, second)
    assert "Error in sys.excepthook" not in first.log, first
    assert re.search(rf"ends because {_name(0)} failed: KeyboardInterrupt\n", second.log), second
