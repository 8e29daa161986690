"""How processes meet although strangers come, and what one sees of the next one on its machine."""

import concurrent.futures
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multimesh.processes.watching import meeting, members
from multimesh.processes.watching.endings import Neighbor
from multimesh.processes.watching.watch import beat
from test_meeting_rules import member

import multimesh as mm

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
HELLO = {"hello": member(1) | {"count": 2}}


@given(st.lists(st.from_regex(r"[a-z0-9-]{1,12}(\.[a-z0-9]{1,4}){0,2}", fullmatch=True), min_size=1))
@settings(max_examples=100, deadline=None)
def test_hosts_are_the_same_after_they_were_packed(hosts):
    assert meeting._unpack(meeting._pack(hosts)) == hosts


def test_eight_thousand_hosts_are_few_bytes():
    hosts = [f"gpu-node-{i // 2:04d}.cluster.example.org" for i in range(8192)]
    assert len(meeting._pack(hosts)) < 30_000


def test_the_next_process_on_a_machine_is_one_ring_for_all():
    everyone = [member(rank) | {"machine": machine} for rank, machine in enumerate(["a", "b", "a", "", "b", "a", ""])]
    assert members.neighbors(everyone) == {0: 2, 2: 5, 5: 0, 1: 4, 4: 1}


class Hub:
    """Process 0 of a job of two that waits for the other one."""

    def __init__(self, timeout=60.0):
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.address = f"127.0.0.1:{server.getsockname()[1]}"
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.met = self.pool.submit(self.meet, 0, timeout)

    def meet(self, rank, timeout=60.0):
        return meeting.meet(member(rank) | {"count": 2}, self.address, self.address, timeout)

    def connected(self):
        while not self.met.done():
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(meeting._split(self.address))
        raise AssertionError(self.met.result())

    def both_meet(self):
        hosts, known = self.meet(1)
        assert hosts == ["n0", "n1"]
        assert sorted(known) == [0, 1]
        assert self.met.result() == (hosts, known)


FRAMES = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\n", b"\x16\x03\x01\n", b"[" * 100_000 + b"\n", b'"\\ud800"\n', b"\xff\n"]
HEARD = [{"hello": 1}, {"hello": {"rank": "1"}}, {"hosts": "x"}, {}, {"hello": HELLO["hello"] | {"rank": 2}}]
WRONG = [*HEARD, {"hello": HELLO["hello"] | {"facts": {"a": [1]}}}, {"hello": HELLO["hello"] | {"rank": True}}]


def test_strangers_do_not_keep_a_job_from_meeting():
    """Whatever bytes they send at process 0's port; then a process of the job comes, and both have met."""
    hub = Hub()
    said = st.dictionaries(st.sampled_from(["hello", "hosts", "refused"]), JSON, max_size=2)
    lines = said.map(lambda words: json.dumps(words).encode() + b"\n")

    @given(st.sampled_from(FRAMES) | st.binary(max_size=300) | lines)
    @settings(max_examples=60, deadline=None)
    def come(sent):
        with hub.connected() as link, contextlib.suppress(OSError):
            link.sendall(sent)

    come()
    for words in WRONG:
        with hub.connected() as link, contextlib.suppress(OSError):
            link.sendall(json.dumps(words).encode() + b"\n")
            assert link.recv(1) == b""
    hub.both_meet()


def test_many_that_say_nothing_do_not_keep_a_job_from_meeting():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    hub = Hub()
    with contextlib.ExitStack() as stack:
        stack.enter_context(hub.connected())
        opened = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 70, limits[1]))  # this process has both ends
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with contextlib.suppress(OSError):
            while True:
                stack.enter_context(hub.connected())
        stack.pop_all().close()
    hub.both_meet()


def reset(link):
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def wait_for_its_end(link):
    while link.recv(1 << 16):
        pass


@pytest.mark.longer
@pytest.mark.telling("closes", "http", "hosts", "resets", "waits")
@pytest.mark.parametrize(
    ("behave", "said"),
    [
        *(
            (lambda link, answer=answer: link.sendall(answer), "is no process of this job, or ended")
            for answer in (b"", b"HTTP/1.1 400\r\n", b"{}\n", b"[1]\n", b'{"hosts": 1}\n')
        ),
        (reset, "is no process of this job, or ended"),
        (wait_for_its_end, "does not answer"),
    ],
    ids=["closes", "http", "object", "list", "hosts", "resets", "waits"],
)
def test_one_that_finds_a_stranger_says_so(behave, said):
    with socket.create_server(("127.0.0.1", 0)) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def serve():
            server.settimeout(2)
            with contextlib.suppress(TimeoutError):
                while True:
                    with server.accept()[0] as link, contextlib.suppress(OSError):
                        behave(link)

        served = pool.submit(serve)
        with pytest.raises(mm.UsageError, match=f"within 1 s: what listens there {said}; does process 0 run"):
            meeting.meet(member(1), address, address, 1.0)
        begun = time.monotonic()
        with pytest.raises(mm.UsageError, match=r"process 0 of 4 .* cannot listen at .*: Address already in use; if"):
            meeting.meet(member(0), address, address, 1.0)
        assert time.monotonic() - begun < 3
        served.result()


def test_too_few_open_files_are_told():
    code = f"""
import sys
sys.path.insert(0, {os.path.dirname(os.path.dirname(mm.__file__))!r})
from multimesh.processes.watching import meeting
meeting.resource.setrlimit(meeting.resource.RLIMIT_NOFILE, (300, 300))
meeting.resource.setrlimit = None  # as for one who may not raise it
meeting.allow_files = lambda count: 300
own = dict(rank=0, count=1000, host="n0", pid=1, machine="", facts={{}})
try:
    meeting.meet(own, "localhost:1", "localhost:1", 1)
except meeting.RefusedError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "process 0 needs 1,064 open files, one for each of 1,000 processes, and may have 300: raise" in said.stdout
    ), said


def test_eight_hundred_values_a_second_are_enough():
    assert [beat(n, 30.0) for n in (2, 800, 4000, 8192)] == [1.0, 1.0, 5.0, 10.0]


@pytest.mark.parametrize("asked", [False, True], ids=["its parent has not asked", "its parent has asked"])
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("sys.exit(3)", ("ended with exit code 3", 3)),
        ("os.kill(os.getpid(), 9)", ("was killed by SIGKILL", None)),
        ("os.abort()", ("was killed by SIGABRT", None)),
        ("pass", ("ended without a word: killed (perhaps for lack of memory), crashed, or left by os._exit", None)),
    ],
)
def test_how_the_next_process_ended(code, told, asked):
    """Linux tells it since 6.15 where the parent has asked already."""
    if asked and tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 15):
        told = "ended without a word: killed (perhaps for lack of memory), crashed, or left by os._exit", None
    command = [sys.executable, "-c", f"import os, sys\nsys.stdin.read()\n{code}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        neighbor = Neighbor(1, process.pid)
        assert not neighbor.ended(0.0)
        assert neighbor.stopped() == 0
        process.stdin.close()
        if asked:
            process.wait()
        assert neighbor.ended(60.0)
        assert neighbor.death() == told


def test_the_next_process_is_seen_stopped_and_ended():
    waits = [sys.executable, "-c", "import time\ntime.sleep(600)"]
    with subprocess.Popen(waits, stderr=subprocess.PIPE, text=True) as process:
        neighbor = Neighbor(1, process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while not neighbor.stopped():
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGCONT)
        while neighbor.stopped():
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGSTOP)
        neighbor.kill("process 1 of 2 has been stopped")
        assert neighbor.ended(20.0)
        assert process.wait() == -signal.SIGKILL
        assert process.stderr.read() == "multimesh: process 1 of 2 has been stopped\n"
