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

START = """
import os, sys, time
rank, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import jax, numpy as np
import multimesh as mm
"""
JOIN = START + "job = mm.distributed.initialize(address, count, rank)\n"
STEPS = """
from multimesh.processes.initialize import count_step
mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
whole, parts = (jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("x")))
x = jax.make_array_from_callback((count,), parts, lambda index: np.ones(1, np.float32))
total = jax.jit(lambda x: x.sum(), out_shardings=whole)
for step in range(100000):  # each waits for all
    total(x).block_until_ready()
    count_step()
    if step == 3:
        print("ready", flush=True)
    if step == 5 and rank == count - 1:
        LAST
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int
    seconds: float
    said: str


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
        base = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
        base |= {"JAX_NUM_CPU_DEVICES": "1"}
        started = {}
        for place, rank in enumerate(ranks or range(count)):
            with (tmp_path / f"{place}.log").open("w") as log:
                argv = [sys.executable, script, str(rank), str(count), address, *words(place)]
                started[place] = subprocess.Popen(argv, env=base | environ(place), stdout=log, stderr=log)
        logs = [tmp_path / f"{place}.log" for place in started]
        since = time.monotonic()
        if fault:
            _until(limit, lambda: all("ready" in log.read_text() for log in logs) or any(map(_ended, started.values())))
            since = time.monotonic()
            for number in fault[0]:
                started[number].send_signal(fault[1])
        seconds = {}
        try:
            awaited = started if ends is None else {number: started[number] for number in ends}
            _until(limit, lambda: _note(awaited, seconds, since))
        finally:
            for process in started.values():
                process.kill()
        return [Ended(started[n].wait(), seconds.get(n, limit), logs[n].read_text()) for n in started]

    return run


def _ended(process):
    """Whether a process ended, without telling the system to forget how: its neighbor may not have asked yet."""
    return process.returncode is not None or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _note(started, seconds, since):
    seconds |= {n: time.monotonic() - since for n, p in started.items() if n not in seconds and _ended(p)}
    return len(seconds) == len(started)


def _until(limit, true):
    deadline = time.monotonic() + limit
    while not true():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


def _named(rank, count=2):
    return rf"process {rank} of {count} \(\S+, pid \d+\)"


AGREE = """
import jax.numpy as jnp
from multimesh.plan import fingerprint
assert (job.launcher, job.rank, job.mode) == ("arguments", rank, "one process per device"), job
mm.distributed.agree_on("words", ["the", "same"])

def grads(w, x):
    def loss(w, x):
        x = mm.task(jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=POLICY), "first", mesh=meshes[0])(w, x)
        return mm.task(lambda x: (x**2).sum(), "second", mesh=meshes[1])(x)
    return mm.microbatch(jax.grad(loss), argnum=1, size=2)(w, x)

POLICY = jax.checkpoint_policies.save_only_these_names("a", "b", "c")
meshes = [jax.sharding.Mesh(np.array([d]), "x") for d in jax.devices()[:2]]
plan = mm.jit(grads).plan(np.ones((4, 4), np.float32), np.ones((8, 4), np.float32))
mm.distributed.agree_on("plan", fingerprint.lines(plan))

mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
at = lambda *spec: jax.sharding.NamedSharding(mesh, jax.P(*spec))
def array(value, sharding):
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
table = np.arange(12, dtype=np.float32).reshape(4, 3)
far = jax.sharding.SingleDeviceSharding(jax.devices()[1])
mine = [jax.device_put(table, d) for d in far.device_set if d.process_index == rank]
tree = {
    "rows": array(table, at("x")), "all": array(table, at()), "there": jax.make_array_from_single_device_arrays(
        table.shape, far, mine, dtype=table.dtype), "number": 3, "here": jnp.arange(2), "numpy": table, "none": None,
    "half": array(table.astype(jnp.bfloat16), at("x")), "empty": array(table[:0], at("x")),
    "scalar": array(np.float32(5).reshape(()), at()), "key": jax.random.key(7),
}
for _ in range(2):
    found = mm.distributed.gather(tree)
    for name in ("rows", "all", "there", "numpy", "half", "empty"):
        want = table[:0] if name == "empty" else table
        assert type(found[name]) is np.ndarray and found[name].dtype == tree[name].dtype, name
        np.testing.assert_array_equal(found[name].astype(np.float32), want)
    assert found["number"] == 3 and found["scalar"] == 5 and found["none"] is None and found["here"].sum() == 1
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(jax.random.key(7)).tolist()
try:
    mm.distributed.gather(array(np.zeros((count, (18 << 20) // count), np.float32), at("x")))
except mm.UsageError as error:
    assert "75,497,472 bytes" in str(error), error
else:
    raise AssertionError("too large")
if rank:
    time.sleep(LATE)
print("the end", flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("count", "late"), [(2, 1), pytest.param(2, 14, marks=pytest.mark.full), pytest.param(4, 0, marks=pytest.mark.full)]
)
def test_processes_agree_whatever_their_hash_seeds_and_end_together(job, count, late):
    ended = job(JOIN + AGREE.replace("LATE", str(late)), count, environ=lambda rank: {"PYTHONHASHSEED": str(rank)})
    assert [(e.code, e.said.splitlines()[0]) for e in ended] == [(0, "the end")] * count, ended
    waited = [re.search(f"multimesh: {_named(0, count)} is done and waits for others\n", e.said) for e in ended]
    assert [bool(w) for w in waited] == [late > 10] + [False] * (count - 1), ended


FULL = pytest.mark.full
SEEN = [pytest.mark.full, pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 does not tell")]
CALLBACK = """
        def wrong(x):
            raise ValueError('a fault')
        here = jax.device_put(jax.numpy.ones(2), jax.local_devices()[0])
        mm.distributed.gather(jax.jit(lambda x: jax.pure_callback(wrong, x, x))(here))"""
LEAVE = {  # what the last process does, its exit code, and what the others say of it
    "raise": ("raise RuntimeError('a fault\\nin one process')", 1, "failed after 6 steps: RuntimeError: a fault"),
    "usage": ("raise mm.UsageError('a fault')", 2, "failed after 6 steps: UsageError: a fault"),
    "fail": ("mm.distributed.fail(ValueError('a fault'))", 1, "failed after 6 steps: ValueError: a fault"),
    "exit": ("sys.exit(3)", 3, "failed after 6 steps: SystemExit: 3"),
    "SystemExit": ("raise SystemExit(3)", 3, "failed after 6 steps: SystemExit: 3"),
    "Ctrl-C": ("os.kill(os.getpid(), 2)", 130, "failed after 6 steps: KeyboardInterrupt"),
    "callback": (CALLBACK, 1, "failed after 6 steps: .*Error: ValueError: a fault"),
    "value": ("np.asarray(x)", 1, r"failed .*: RuntimeError: Fetching .*: multimesh.distributed.gather\(x\), .*"),
    "_exit": ("os._exit(4)", 4, r"ended with exit code 4( after \d steps?)?"),  # what it told last
    "abort": ("os.abort()", -signal.SIGABRT, r"was killed by SIGABRT( after \d steps?)?"),
}


@pytest.mark.telling("raise-2", "callback-2")
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "count"),
    [
        ("raise", 2),
        pytest.param("raise", 4, marks=FULL),
        ("exit", 2),
        pytest.param("SystemExit", 2, marks=SEEN),
        ("callback", 2),
        ("value", 2),
        *(pytest.param(how, 2, marks=FULL) for how in ("usage", "fail", "_exit", "abort", "Ctrl-C")),
    ],
)
def test_a_process_that_fails_leaves_at_once_and_the_others_name_it(job, how, count):
    """JAX alone: the process waits at its exit for the others, which wait for it."""
    what, code, told = LEAVE[how]
    *others, last = job(JOIN + STEPS.replace("LAST", f"print('fault', time.time(), flush=True); {what}"), count)
    assert last.code == code, last
    assert ("Traceback" in last.said) == (how in ("raise", "usage", "Ctrl-C", "callback", "value")), last
    assert "a fault" in last.said or how not in ("raise", "usage", "fail", "callback"), last
    assert how != "value" or "\nmultimesh: multimesh.distributed.gather(x), called" in last.said, last
    for rank, other in enumerate(others):
        line = rf"multimesh: {_named(rank, count)} ends because {_named(count - 1, count)} {told}\n"
        assert re.search(line, other.said), other
        assert "Traceback" not in other.said, other
        assert other.code == (code if code > 0 else 17), other
        assert abs(other.seconds - last.seconds) < 5, (other, last)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("rank", "count"), [(1, 2), (0, 4), pytest.param(2, 4, marks=FULL)])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=FULL)])
def test_a_killed_process_is_named(job, rank, count, number):
    """JAX alone: an error without a name and 40 s in its barrier at exit; of process 0: SIGABRT of all.

    Also SIGTERM ends a process, which JAX's preemption service would swallow.
    """
    ended = job(JOIN + STEPS.replace("LAST", "pass"), count, fault=([rank], number))
    dead = ended.pop(rank)
    assert dead.code == -number
    steps = r"( after \d+ steps?)?"  # those that it told last
    if number == signal.SIGTERM:
        assert re.search(f"multimesh: {_named(rank, count)} was killed by SIGTERM{steps}\n", dead.said), dead
    for other in ended:
        assert other.seconds < 5, other
        assert "Traceback" not in other.said
        told = f"ends because {_named(rank, count)} was killed by {number.name}{steps}\n"
        assert re.search(told, other.said), other
        assert other.code == 17, other


@pytest.mark.multiprocess
@pytest.mark.parametrize(("rank", "count"), [(1, 2), pytest.param(0, 2, marks=FULL), pytest.param(1, 4, marks=FULL)])
def test_a_stopped_process_is_named_and_ended(job, rank, count):
    """JAX alone: SIGABRT of all when the heartbeat's 100 s have passed, and the process stays."""
    soon = {"MULTIMESH_SILENCE_TIMEOUT": "4"}
    ended = job(JOIN + STEPS.replace("LAST", "pass"), count, fault=([rank], signal.SIGSTOP), environ=lambda rank: soon)
    assert ended[rank].code == -signal.SIGKILL
    assert all(e.seconds < 15 for e in ended), ended
    for other in ended[:rank] + ended[rank + 1 :]:
        told = rf"ends because {_named(rank, count)} has been stopped \(SIGSTOP\) for \d s( after \d+ steps)?\n"
        assert re.search(told if rank else f"{told}|Terminating process because the JAX", other.said), other
        assert other.code == 17 or (rank == 0 and other.code == -signal.SIGABRT), other


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
from multimesh.processes.initialize import begin_step, count_step
for step in range(100):
    begin_step()
    count_step()
    mm.distributed.barrier(f"step {step}")  # each waits for all
    if step == 5 and rank == 1:
        time.sleep(600)
"""


@pytest.mark.multiprocess
def test_a_process_that_hangs_is_named_with_its_stack_and_ended_if_asked(job):
    first, second = job(JOIN.replace("rank)", "rank, stall_timeout=2)") + STALL)
    told = rf"{_named(1)} has been after step 6 for [2-9] s, all others are after step 7"
    assert re.search(rf'multimesh: {told}\n(?:  .*\n)*?  File ".*job.py", line \d+, in <module>\n', first.said), first
    assert re.search(rf"multimesh: {_named(0)} ends because {told}\n", first.said), first
    assert first.code == 17
    assert second.code in (17, -signal.SIGABRT), second  # JAX aborts all when it misses process 0: most often later


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=FULL)])
def test_a_process_out_of_reach_is_named(job, number):
    """Nobody sees it, as on another machine: that its heartbeat is missing is all that is known."""
    alone = "import multimesh.processes.initialize as each\neach.machine = lambda: ''\n"
    join = START + alone + "job = mm.distributed.initialize(address, count, rank, silence_timeout=4)\n"
    ended = job(join + STEPS.replace("LAST", f"os.kill(os.getpid(), {number})"), 3, limit=30, ends=[0, 1])
    told = rf"ends because {_named(2, 3)} has been out of reach for 4 s( after \d steps)?: stopped, or its machine"
    for other in ended[:2]:
        assert re.search(told, other.said), other
        assert other.code == 17, other


@pytest.mark.multiprocess
def test_one_that_does_not_start_is_named(job):
    begin = time.monotonic()
    first, second = job(JOIN.replace("rank)", "rank, initialization_timeout=4)"), 4, ranks=[0, 2])
    told = "process 1, 3 of 4 did not start within 4 s; see what the launcher says"
    assert f"multimesh: {told}" in first.said
    assert [first.code, second.code, len(first.said.splitlines()), second.said] == [2, 2, 1, ""]
    assert time.monotonic() - begin < 30


@pytest.mark.multiprocess
def test_a_coordinator_that_is_not_there_is_named(job, address):
    (only,) = job(JOIN.replace("rank)", "rank, initialization_timeout=2)"), ranks=[1])
    told = f"process 1 of 2 cannot meet process 0 at {address} within 2 s: Connection refused"
    assert re.fullmatch(f"multimesh: .*{re.escape(told)}.*\n", only.said)
    assert only.code == 2


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [[0, 0], pytest.param([0, 1, 1], marks=FULL)])
def test_two_processes_with_one_number_are_named(job, ranks):
    ended = job(JOIN, 3, ranks=ranks)
    told = f"{_named(ranks[-1], 3)} and {_named(ranks[-1], 3)} cannot be of one job; give each process a process_id"
    assert all(e.code == 2 for e in ended), ended
    lines = [e.said for e in ended if re.fullmatch(f"multimesh: .*{told}.*\n", e.said)]
    assert len(lines) == (2 if ranks == [0, 0] else 1), ended


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("environ", "word", "told"),
    [
        ({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, "", "XLA_FLAGS: {} has nothing where {} has '--xla_cpu_en"),
        pytest.param({"MULTIMESH_TRANSPORT": "pull"}, "", "TRANSPORT: {} has nothing where {} has 'pull'", marks=FULL),
        pytest.param({"JAX_ENABLE_X64": "1"}, "", "of JAX: {} has 'jax_enable_x64=False' where {} has", marks=FULL),
        pytest.param({}, "--steps=3", "command line: {} has nothing where {} has '--steps=3'", marks=FULL),
    ],
)
def test_what_differs_is_named_before_anything_is_compiled(job, environ, word, told):
    ended = job(JOIN, environ=lambda rank: environ if rank else {}, words=lambda rank: [word] if rank and word else [])
    told = told.format(_named(0), _named(1))
    assert all(e.code == 2 for e in ended), ended
    assert re.fullmatch(f"multimesh: .*{told}.*\n", ended[0].said), ended
    assert ended[1].said == ""


@pytest.mark.multiprocess
@pytest.mark.parametrize("odd", [1, pytest.param(0, marks=FULL)])
def test_the_first_line_that_differs_is_named(job, odd):
    body = f"""
lines = [f"operation {{i}} " + "x" * 200 + ("sin" if rank == {odd} and i > 3 else "cos") for i in range(9)]
mm.distributed.agree_on("plan 1 (train)", lines)
"""
    ended = job(JOIN + body, 3 if odd == 0 else 2)
    told = f"plan 1 (train): process {odd} of {len(ended)} differs from process {1 - odd}, first in line 5, which is "
    for e in ended:
        assert re.search(re.escape(told) + "'[.]{3}x+sin' in place of '[.]{3}x+cos'; start all", e.said), e
        assert e.code == 2


@pytest.mark.multiprocess
@pytest.mark.mpi
@pytest.mark.full
@pytest.mark.parametrize(
    ("last", "code", "told"),
    [
        ("break", 0, ""),
        ("raise ValueError('a fault')", 1, "failed after 6 steps: ValueError: a fault"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL after 6 steps"),
    ],
)
def test_under_mpirun(tmp_path, last, code, told):
    """Open MPI says who is who; its own exit code is that of the process that failed."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun on this machine: apt-get install openmpi-bin")
    who = "True" if last == "break" else "rank == 1"
    steps = STEPS.replace("rank == count - 1", who).replace("LAST", last)
    join = "import os, jax, numpy as np, multimesh as mm\njob = mm.distributed.initialize()\nprint(job)\n"
    script = tmp_path / "job.py"
    script.write_text(f"{join}rank, count = job.rank, len(job.hosts)\n{steps}")
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")} | {"JAX_NUM_CPU_DEVICES": "1"}
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, script]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done
    for rank in range(2):
        assert re.search(rf"process {rank} of 2 on \S+, found by Open MPI: one process per device", done.stdout), done
    assert not told or re.search(f"multimesh: .*{_named(1)} {told}\n", done.stderr), done


def _certificates(folder):
    """A certificate for this machine and the authority that signed it."""
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -subj /CN=ours -days 2",
        "req -newkey rsa:2048 -nodes -keyout node.key -out node.csr -subj /CN=localhost",
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out node.pem -days 2 -extfile names",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    names = {"cert_file": "node.pem", "key_file": "node.key", "ca_file": "ca.pem"}
    return {f"mtls_{name}": str(folder / file) for name, file in names.items()}


@pytest.mark.multiprocess
@pytest.mark.longer
@pytest.mark.parametrize("who", ["all", "one"])
def test_certificates_of_jax_keep_others_out(job, tmp_path, who):
    """JAX's own options, from 0.12 on; an older one has none, and that is said. One that lacks them is named."""
    options = _certificates(tmp_path)
    given = f"{options} if rank == 0 or {who == 'all'} else dict()"
    ended = job(
        JOIN.replace("rank)", f"rank, initialization_timeout=20, jax_options={given})")
        + "mm.distributed.barrier('here')\n"
    )
    if "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
        told = r"multimesh: jax_options: mtls_ca_file, .*: jax.distributed.initialize\(\) of jax .* has no such"
        assert re.search(told, ended[0].said), ended
        assert ended[0].code == 2
    elif who == "all":
        assert [e.code for e in ended] == [0, 0], ended
    else:
        told = (
            rf"jax_options: {_named(0)} has 'mtls_ca_file mtls_cert_file mtls_key_file' where {_named(1)} has nothing"
        )
        assert re.search(told, ended[0].said), ended
        assert [e.code for e in ended] == [2, 2], ended


WAITS = {  # where process 0 waits for the other one, and seconds until Ctrl-C has ended both
    "a barrier": ("jax.devices(); print('ready', flush=True); mm.distributed.barrier('x')", 5),
    "C++ code": ("import threading; threading.Timer(3, print, ['ready']).start(); jax.devices()", 15),
}


@pytest.mark.multiprocess
@pytest.mark.full
@pytest.mark.parametrize("where", WAITS)
def test_ctrl_c_ends_a_process_that_waits(job, where):
    """JAX alone: a wait in C++ code, as for the devices of others, ends after minutes."""
    what, limit = WAITS[where]
    late = f"if rank:\n    {'jax.devices(); ' * (limit == 5)}print('ready', flush=True); time.sleep(600)\n"
    first, second = job(JOIN + late + what, fault=([0], signal.SIGINT), environ=lambda rank: {"PYTHONUNBUFFERED": "1"})
    assert (first.code, second.code) == (130, 130), (first, second)
    assert max(first.seconds, second.seconds) < limit, (first, second)
    told = rf"multimesh: {_named(0)} was interrupted in code that does not notice it\n"
    assert re.search(told if limit == 15 else "KeyboardInterrupt\n", first.said), first
    assert re.search(rf"ends because {_named(0)} failed: KeyboardInterrupt\n", second.said), second


@pytest.mark.multiprocess
def test_a_second_ctrl_c_does_not_change_how_a_process_ends(job):
    """It comes while the process tells the others of the first."""
    what = """
import signal, threading
if rank == 0:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    os.kill(os.getpid(), signal.SIGINT)
time.sleep(600)
"""
    first, second = job(JOIN + what)
    assert (first.code, second.code) == (130, 130), (first, second)
    assert "Error in sys.excepthook" not in first.said, first
    assert re.search(rf"ends because {_named(0)} failed: KeyboardInterrupt\n", second.said), second
