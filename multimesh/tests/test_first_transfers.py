"""First transfers between processes: a job whose processes cannot send each other arrays ends with a line."""

import re

import pytest
from multimesh.runtime.actions import ProcessTransfer
from multimesh.runtime.between import exchange
from test_distributed import FULL, JOIN, START, _name, address, job  # noqa: F401 - fixtures

STEP = """
import signal, socket, threading
import jax.numpy as jnp
from multimesh.processes import agree
from multimesh.runtime.between import transports
from multimesh.runtime.between import exchange

front, back = (jax.sharding.Mesh(np.array([d]), "x") for d in jax.devices()[:2])
def loss(w, x):
    if TRACING: time.sleep(4)
    x = mm.task(lambda w, x: jnp.tanh(x @ w), "first", mesh=front)(w, x)
    return mm.task(lambda x: (x**2).sum(), "second", mesh=back)(x)
step = mm.jit(loss)
args = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)
"""
OWN_PORT = """
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{port}")
"""
STOP = """
if rank == WHO:
    meet = agree.barrier
    def then_stop(name, *given):
        meet(name, *given)
        time.sleep(600)
    agree.barrier = then_stop
"""
DEAF = """
if rank == 0:
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = [socket.socket() for _ in range(CALLERS)]  # a full queue: what comes then gets no answer at all
    for caller in waiting:
        caller.setblocking(False)
        caller.connect_ex(server.getsockname())
    def put(key, value, put=agree.put):
        deaf = f"127.0.0.1:{server.getsockname()[1]}".encode()
        put(key, deaf if key.startswith("multimesh/transfer/") else value)
    agree.put = put
"""
CUT = """
def cut(server):
    while True:
        server.accept()[0].close()
if rank == 0:
    threading.Thread(target=cut, args=(server,), daemon=True).start()
"""
RUN = "print(step(*args), flush=True)\n"
BACK = "step = mm.jit(jax.grad(loss))\n"
NOTICES = {"MULTIMESH_TRANSFER_TIMEOUT": "3"}
FAULTS = {  # the transport, what one does before its first transfer, and by whom nothing is sent
    "the sender is still": ("pull", STOP.replace("WHO", "0"), 0),
    "nobody answers": ("pull", DEAF.replace("CALLERS", "0"), 0),
    "a port is filtered": ("pull", DEAF.replace("CALLERS", "3"), 0),
    "a connection is cut": ("pull", DEAF.replace("CALLERS", "0") + CUT, 0),
    "the other way": ("pull", BACK + STOP.replace("WHO", "1"), 1),
    "another transport": ("device_put", STOP.replace("WHO", "0"), 0),
}
ADVICE = {
    "pull": r"transport='pull' reaches process \d at .*no firewall",
    "device_put": ".*MULTIMESH_TRANSPORT=pull in",
}


def script(text, tracing="False"):
    join = JOIN.replace(START, START + OWN_PORT.replace("with socket", "import socket\nwith socket"))
    return join + STEP.replace("TRACING", tracing) + text


@pytest.mark.telling("a port is filtered", "another transport", "a connection is cut")
@pytest.mark.multiprocess
@pytest.mark.parametrize("fault", FAULTS)
def test_a_first_transfer_that_never_comes_ends_the_job_with_a_line(job, fault):  # noqa: F811
    """The job stood still for ever, as with NCCL where it refuses."""
    transport, breaks, source = FAULTS[fault]
    runs = job(script(breaks + RUN), environ=lambda rank: NOTICES | {"MULTIMESH_TRANSPORT": transport})
    ways = rf"from {_name(source)} to {_name(1 - source)}"
    event, wait = "did not arrive within 3 s", ".*MULTIMESH_TRANSFER_TIMEOUT"
    if CUT in breaks:
        event, wait = r"failed: \S.*", "(?!.*TIMEOUT)"  # XLA says that it was closed, or that it is not connected
    message = rf"LostProcessError: the first transfer {ways} {event}; {ADVICE[transport]}"
    for e in runs:
        assert re.search(f"{message}{wait}", e.log), runs
    because = f"multimesh: {_name(source)} ends because {_name(1 - source)} failed: {message}"
    assert re.search(because, runs[source].log), runs
    assert [e.code for e in runs] == [17, 17], runs


SLOW = """
if rank == 0:
    compiled = []
    def mover(*given, made=exchange.Exchange.mover):
        compiled.append(given)
        time.sleep(4 if len(compiled) == 2 else 0)  # the first is of the plan, this one of an argument
        return made(*given)
    exchange.Exchange.mover = mover
"""
ELSEWHERE = """
far = lambda x, device: jax.make_array_from_single_device_arrays(
    x.shape, jax.sharding.SingleDeviceSharding(device),
    [jax.device_put(x, device)] if device.process_index == rank else [], dtype=x.dtype)
args = [far(x, jax.devices()[1]) for x in args]
"""
ONCE = """
tried = transports.get_transport(None).tried
assert len(tried) == WAYS, tried
exchange._send_all = None  # from here on no way is new
mm.jit(lambda *args: loss(*args) + 1)(*args)
for _ in range(3):
    step(*args)
print("the end", flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("tracing", "before", "ways"),
    [
        ("rank", "", 1),
        pytest.param("False", SLOW + ELSEWHERE, 2, marks=FULL),
    ],
)
@pytest.mark.parametrize("transport", ["pull", pytest.param("device_put", marks=FULL)])
def test_a_slow_job_is_not_ended_and_each_way_is_tried_once(job, transport, tracing, before, ways):  # noqa: F811
    """One traces or compiles for longer than the limit of a first transfer."""
    body = script(before + RUN + ONCE.replace("WAYS", str(ways)), tracing)
    runs = job(body, environ=lambda rank: NOTICES | {"MULTIMESH_TRANSPORT": transport})
    assert [e.code for e in runs] == [0, 0], runs
    assert all("the end" in e.log for e in runs), runs


def test_neighbors_connect_at_once():
    """Each process of a chain has two neighbors: it would wait for one that waits for another, and so on."""
    for gap in (1, 2, 4):
        ways = [ProcessTransfer(*ends, ()) for n in range(16 - gap) for ends in ((n, n + gap), (n + gap, n))]
        waves = 0
        queue = sorted(ways, key=exchange._turn)
        while queue:
            busy, later = set(), []
            for transfer in queue:  # a process makes its transfers in this order, one at a time
                ready = busy.isdisjoint((transfer.source, transfer.target))
                busy |= {transfer.source, transfer.target}
                later += [] if ready else [transfer]
            queue, waves = later, waves + 1
        assert waves == 4
