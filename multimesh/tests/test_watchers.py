"""What watchers say to each other, and what strangers can't: on sockets of this process, without processes."""

import concurrent.futures
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multimesh.processes import members, notes, secret, watcher, wire
from multimesh.processes.meeting import Meeting, TurnedAwayError
from test_meeting_rules import member

import multimesh as mm

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SAID = st.dictionaries(st.sampled_from([*wire._KINDS, "other"]), JSON, max_size=3)
HELLO = {"hello": member(1) | {"count": 2}}


@pytest.fixture
def ends():
    """Two connected sockets at a time; all are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: [stack.enter_context(each) for each in socket.socketpair()]


def pair(ends, secrets=(b"a secret of a job", b"a secret of a job")):
    one, other = ends()
    lines = wire.Line(one, secrets[0], hub=True), wire.Line(other, secrets[1])
    for line in (*lines, *lines):
        line.receive()
    return lines


def test_messages_of_any_size_arrive_whole_and_in_order(ends):
    hub, guest = pair(ends)
    texts = ["", "a", "ä" * 300_000, "z"]
    found = []
    for text in texts:
        hub.send(stack=text)
    while len(found) < len(texts):
        hub.flush()
        found += guest.receive()
    assert found == [{"stack": text} for text in texts]
    guest.send(done=True)
    assert hub.receive() == [{"done": True}]


def test_notes_are_found_by_name_and_process_and_kept_until_all_came(ends):
    one, other = ends()
    mine, to_watcher = notes.Notes(wire.Line(one)), wire.Line(other)
    mine.leave("step 1", b"\0\xff")
    (said,) = to_watcher.receive()
    assert wire.is_message(said)
    mine.add([{"notes": [[3, *said["note"]]]}, {"end": 1}])
    assert mine.wait("step 1", 2, 0) == {3: b"\0\xff"}
    assert mine.wait("step 2", 1, 0) == {}
    mine.add([{"notes": [[7, *said["note"]]]}])
    assert mine.wait("step 1", 2, 60) == {3: b"\0\xff", 7: b"\0\xff"}
    assert mine.wait("step 1", 1, 0) == {}


def test_a_process_that_reads_nothing_does_not_hold_up_its_watcher(ends):
    one, other = ends()
    watcher_end, process = wire.Line(one), wire.Line(other)
    one.setblocking(False)
    texts = ["a" * 3_000_000, "b"]
    assert not any(watcher_end.send(stack=text) for text in texts)
    found = []
    while len(found) < len(texts):
        watcher_end.flush()
        found += process.receive()
    assert [each["stack"] for each in found] == texts


def test_one_without_the_secret_says_nothing(ends):
    for mine in (b"another", b""):
        hub, guest = pair(ends, (b"a secret of a job", mine))
        guest.send(done=True)
        assert hub.receive() is None
        hub.send(all_done=True)
        assert guest.receive() is None


@pytest.mark.parametrize("wrong", ["changed", "repeated", "turned back", "left out"])
def test_what_somebody_between_changes_is_found(ends, wrong):
    """The bytes of two connections, carried by hand."""
    (hub_end, carrier), (guest_end, other) = ends(), ends()
    hub, guest = wire.Line(hub_end, b"secret", hub=True), wire.Line(guest_end, b"secret")
    other.sendall(carrier.recv(999))
    carrier.sendall(other.recv(999))
    assert hub.receive() == guest.receive() == []
    guest.send(done=False)
    first = other.recv(999)
    guest.send(done=True)
    second = other.recv(999)
    carrier.sendall(first)
    assert hub.receive() == [{"done": False}]
    if wrong == "turned back":
        other.sendall(first)
        assert guest.receive() is None
        return
    guest.send(done=True)
    carrier.sendall(
        {"changed": second.replace(b"true", b"null"), "repeated": first, "left out": other.recv(999)}[wrong]
    )
    assert hub.receive() is None


@given(SAID)
@settings(max_examples=200, deadline=None)
def test_whatever_a_watcher_says_is_a_message_or_ends_its_connection(said):
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(each) for each in socket.socketpair())
        hub, guest = wire.Line(one, b"", hub=True), wire.Line(other, b"")
        hub.receive(), guest.receive()
        guest.send(**said)
        heard = hub.receive()
    if heard is None:
        return
    for message in heard:
        assert 0 <= message.get("code", 0) < 256
        assert all(type(number) is int for number in message.get("at", []))
        assert members.is_member(message.get("hello")) in (True, False)


@given(st.lists(st.from_regex(r"[a-z0-9-]{1,12}(\.[a-z0-9]{1,4}){0,2}", fullmatch=True) | st.text(max_size=4)))
@settings(max_examples=300, deadline=None)
def test_hosts_are_the_same_after_they_were_folded(hosts):
    assert members.unfolded(members.folded(hosts)) == hosts


def test_eight_thousand_hosts_are_few_bytes():
    hosts = [f"gpu-node-{i // 2:04d}.cluster.example.org" for i in range(8192)]
    assert members.unfolded(members.folded(hosts)) == hosts
    assert len(members.folded(hosts)) < 300


class Hub:
    """The hub of a job of two that has begun to meet, and watchers that come to it."""

    def __init__(self, ends, word=b"", timeout=60.0):
        self.ends, self.word = ends, word
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.met = self.pool.submit(self.meeting(0, word, timeout).hub)

    def meeting(self, rank, word, timeout=60.0):
        address = f"127.0.0.1:{self.port}"
        process = wire.Line(self.ends()[0])
        return Meeting(member(rank) | {"count": 2}, address, address, timeout, process, word)

    def connected(self):
        while not self.met.done():
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self.port))
        raise AssertionError(self.met.result())

    def both_meet(self):
        links, known, hosts = self.meeting(1, self.word).guest()
        assert members.unfolded(hosts) == ["n0", "n1"]
        assert sorted(known) == [0, 1]
        found, all_known, _ = self.met.result()
        assert all_known == known
        for line in (*links.values(), *found.values()):
            line.link.close()


FRAMES = [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"hello": 1}\n', b"[" * 100_000, wire.GREETING, wire.GREETING + bytes(16)]
FRAMES += [wire.GREETING + bytes(16) + size.to_bytes(4, "big") + bytes(40) for size in (0, 24, 1 << 20, (1 << 32) - 1)]
HEARD = [HELLO | {"at": [1]}, {"hello": 1}, {"hello": {"rank": "1"}}, {"cause": {}}, {"done": 1}, {"hosts": "x"}, {}]
WRONG = [*HEARD, {"hello": HELLO["hello"] | {"rank": 2}}, {"hello": HELLO["hello"] | {"facts": {"a": [1]}}}]


def test_strangers_do_not_keep_a_job_from_meeting(ends):
    """Whatever bytes they send at the hub's port; then a watcher of the job comes, and both have met."""
    hub = Hub(ends)

    @given(
        st.sampled_from(FRAMES) | st.binary(max_size=300) | st.binary(max_size=99).map(lambda x: FRAMES[-1][:36] + x)
    )
    @settings(max_examples=60, deadline=None)
    def come(sent):
        with hub.connected() as link, contextlib.suppress(OSError):
            link.sendall(sent)

    come()
    for message in WRONG:  # of one that knows how to speak
        with hub.connected() as link, contextlib.suppress(OSError):
            line = wire.Line(link, b"")
            line.send(**message)
            while line.receive() == [] and not line.proven:
                time.sleep(0.001)
                if not line._early:
                    break
    hub.both_meet()


def test_who_lacks_the_secret_is_not_let_in_and_told(ends):
    hub = Hub(ends, b"a secret of a job", timeout=2.0)
    with pytest.raises(TurnedAwayError, match="has another MULTIMESH_JOB_SECRET"):
        hub.meeting(1, b"another secret", timeout=1.0).guest()
    with pytest.raises(TurnedAwayError, match=r"process 1 of 2 did not start within 2 s \(\d came without the job's"):
        hub.met.result()


def test_many_that_say_nothing_do_not_keep_a_job_from_meeting(ends):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    hub = Hub(ends, b"a secret of a job")
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


def test_too_few_open_files_are_told():
    code = f"""
import resource, sys
sys.path.insert(0, {os.path.dirname(os.path.dirname(mm.__file__))!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
from multimesh.processes import meeting, wire
wire.resource.setrlimit = None  # as for one who may not raise it
import socket
own = dict(rank=0, count=1000, host="n0", pid=1, facts={{}})
wire.allow_files = meeting.allow_files = lambda count: 300
try:
    meeting.Meeting(own, "localhost:1", "localhost:1", 1, wire.Line(socket.socketpair()[0]), b"").hub()
except meeting.TurnedAwayError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "process 0 needs 1,064 open files, one for each of 1,000 processes, and may have 300: raise" in said.stdout
    ), said


def test_eight_hundred_beats_a_second_are_enough():
    assert [watcher.beat(n, 30.0) for n in (2, 800, 4000, 8192)] == [1.0, 1.0, 5.0, 10.0]


@pytest.mark.parametrize(
    ("content", "mode", "told"),
    [
        ("0123456789abcdef\n", 0o600, None),
        ("0123456789abcdef", 0o640, "others can read the secret of your jobs; chmod 600"),
        ("short", 0o600, "5 characters can be guessed"),
        (None, 0, "there is no such file"),
    ],
)
def test_the_secret_is_in_a_file_that_only_its_user_reads(monkeypatch, tmp_path, content, mode, told):
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    path = tmp_path / "secret"
    monkeypatch.setenv(secret.FILE, str(path))
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    if told is None:
        assert secret.found() == "0123456789abcdef"
        monkeypatch.setenv(secret.VARIABLE, "of the environment")
        assert secret.found() == "of the environment"
    else:
        with pytest.raises(mm.UsageError, match=told):
            secret.found()


def test_without_a_secret_there_is_none(monkeypatch, tmp_path):
    for name in (secret.VARIABLE, secret.FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert secret.found() == ""
    assert json.dumps(HELLO)  # what a watcher says first can be said
