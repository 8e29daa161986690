"""What the others say when a process is lost, after how long, and with which code: a table, of real processes.

``python multimesh/benchmarks/faults.py [--jax] [FAULT ...]`` starts two processes for each fault. One has it; the other
tells. "elsewhere" puts the process into a process namespace of its own, which needs root. With ``--jax`` they start by
``jax.distributed.initialize`` alone, with the same timeouts: what the processes do without MultiMesh.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

JOB = """
import ctypes, os, signal, socket, sys, time
from importlib import metadata

rank, address = int(sys.argv[1]), sys.argv[2]
odd = rank == FAULTY

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def fault():
    print("fault", time.time(), flush=True)

if odd:
    BEFORE
INITIALIZE
for step in range(100000):
    begin_step()
    count_step()
    barrier(f"step {step}")  # each waits for all
    if step == 200 and odd:
        fault()
        AFTER
    time.sleep(0.01)
"""


OURS = """
import multimesh as mm
from multimesh.processes.initialize import begin_step, count_step

mm.distributed.initialize(address, 2, rank)
barrier = mm.distributed.barrier
"""
JAX = """
import jax
from multimesh.core import _compat

jax.distributed.initialize(address, 2, rank, initialization_timeout=5, heartbeat_timeout_seconds=8)
begin_step = count_step = lambda: None
barrier = lambda name: _compat.key_value_store().wait_at_barrier(name, 600_000)
"""
PATIENCE = 60  # seconds, longer than any row may take


@dataclass(frozen=True)
class Fault:
    """What a process does after 200 steps, or before it starts; the code and the words of the other; seconds allowed.

    ``told`` is a pattern; ``codes`` are the exit codes that the other may have.
    """

    after: str
    codes: tuple[int, ...]
    told: str
    within: float = 10.0
    rank: int = 1
    before: str = "pass"
    apart: bool = False


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
HOLD = "ctypes.PyDLL(None).sleep(600)"  # keeps Python's lock
TAKEN = "server = socket.create_server(('', int(address.rpartition(':')[2]))); fault()"
OTHER_JAX = "known = metadata.version; metadata.version = lambda name: '9.9' if name == 'jax' else known(name); fault()"
OTHER_CODE = "mm.distributed.agree_on('plan', ['sin' if odd else 'cos'])"

FAULTS = {
    "an exception": Fault("raise ValueError('a fault')", (1,), r"failed .*ValueError: a fault"),
    "sys.exit(3)": Fault("sys.exit(3)", (3,), r"failed .*SystemExit: 3"),
    "raise SystemExit(3)": Fault("raise SystemExit(3)", (3,), r"failed .*SystemExit: 3"),
    "os._exit(3)": Fault("os._exit(3)", (3,), r"ended with exit code 3"),
    "SIGKILL": Fault(KILL, (17,), r"was killed by SIGKILL"),
    "SIGTERM": Fault("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", (17,), r"was killed by SIGTERM"),
    "abort": Fault("os.abort()", (17,), r"was killed by SIGABRT"),
    "Ctrl-C": Fault("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", (130,), r"failed .*KeyboardInterrupt"),
    "SIGSTOP": Fault(STOP, (17,), r"has been stopped \(SIGSTOP\)"),
    "it hangs": Fault("time.sleep(600)", (17,), r"has been after step"),
    "hangs with lock": Fault(HOLD, (17,), r"has been after step"),
    "SIGKILL elsewhere": Fault(KILL, (17,), r"was killed|has been out of reach", apart=True),
    "SIGSTOP elsewhere": Fault(
        "os.kill(os.getpid(), 19)", (17,), r"has been stopped|has been out of reach", apart=True
    ),
    "0: an exception": Fault("raise ValueError('a fault')", (1,), r"failed .*ValueError: a fault", rank=0),
    "0: sys.exit(3)": Fault("sys.exit(3)", (3,), r"failed .*SystemExit: 3", rank=0),
    "0: SIGTERM": Fault("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", (17,), r"was killed by SIG", rank=0),
    "0: Ctrl-C": Fault("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", (130,), r"KeyboardInterrupt", rank=0),
    "0: SIGKILL": Fault(KILL, (17, -6), r"was killed by SIGKILL|is gone|leader task", rank=0),
    "0: SIGKILL elsewhere": Fault(KILL, (17, -6), r"is gone|leader task|detected fatal", rank=0, apart=True),
    "0: os._exit(3)": Fault("os._exit(3)", (3, 17, -6), r"ended with exit|is gone|leader task", rank=0),
    "0: SIGSTOP": Fault(STOP, (17, -6), r"has been stopped|is gone|Heartbeat", 12, rank=0),
    "0: it hangs": Fault("time.sleep(600)", (17,), r"has been after step", rank=0),
    "0: hangs with lock": Fault(HOLD, (17,), r"has been after step", rank=0),
    "odd code": Fault(OTHER_CODE, (2, 1, 17), r"differs from|SIG|failed"),
    "odd JAX": Fault("pass", (2,), r"do not run the same; jax: .* has '9.9'", before=OTHER_JAX),
    "never came": Fault("pass", (2,), r"process 1 of 2 did not start within 5 s", before="fault(); sys.exit()"),
    "process 0 not there": Fault("pass", (2,), r"cannot meet process 0", before="fault(); sys.exit()", rank=0),
    "port is taken": Fault("pass", (2,), r"cannot listen .*Address already in use", before=TAKEN),
    "0: port is taken": Fault("pass", (2,), r"cannot meet process 0", before=TAKEN, rank=0),
    "a number twice": Fault("pass", (2,), r"cannot be of one job", before="fault(); rank = 0", rank=1),
}

SOON = {"MULTIMESH_START_TIMEOUT": "5"}
STALL = {"MULTIMESH_STALL_TIMEOUT": "5"}
"""Timeouts that are long by default, or never."""


def try_fault(fault: Fault, place: Path, initialize: str = OURS) -> tuple[float, int | None, str]:
    """Start both processes; return seconds from the fault to the end of the other, its code, and its line.

    They are infinite, and the code is None, if it does not end within `PATIENCE` seconds.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    script = place / "job.py"
    text = JOB.replace("INITIALIZE", initialize).replace("FAULTY", str(fault.rank))
    text = text.replace("BEFORE", fault.before).replace("AFTER", fault.after)
    if fault.after == OTHER_CODE:
        text = text.replace("and odd:", ":")
    script.write_text(text)
    env = os.environ | SOON | (STALL if "has been after" in fault.told else {}) | {"JAX_PLATFORMS": "cpu"}
    outputs = [(place / f"{rank}.txt").open("w+") for rank in range(2)]
    apart = [
        *(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@"; exit', "-"]
            if fault.apart
            else []
        )
    ]
    started = [
        subprocess.Popen(
            [*(apart if rank == fault.rank else []), sys.executable, str(script), str(rank), address],
            env=env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        for rank, out in enumerate(outputs)
    ]
    try:
        code, ended = started[1 - fault.rank].wait(PATIENCE), time.time()
    except subprocess.TimeoutExpired:
        code, ended = None, float("inf")
    finally:
        for process in started:
            process.kill()
            process.wait()
    said, faulty = (Path(outputs[rank].name).read_text() for rank in (1 - fault.rank, fault.rank))
    for out in outputs:
        out.close()
    begun = re.search(r"^fault ([\d.]+)$", faulty, re.MULTILINE)
    every = said.splitlines()
    told = [line for line in every if re.search(fault.told, line)] or [line for line in every if "    @ " not in line]
    return ended - float(begun[1]) if begun else float("nan"), code, told[-1] if told else ""


def main() -> int:
    wrong, alone = 0, "--jax" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--jax"]
    print(f"{'what happens':20}{'seconds':>8}{'code':>6}  {'verdict':8}what the other process says")
    for name in names or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            seconds, code, line = try_fault(FAULTS[name], Path(folder), JAX if alone else OURS)
        fault = FAULTS[name]
        good = bool(re.search(fault.told, line)) and code in fault.codes and seconds < fault.within
        verdict = "-" if alone else "good" if good else "WRONG"
        wrong += verdict == "WRONG"
        said = re.sub(r"^multimesh: (?:.* ends because )?(?:process \d of 2 \(.*?\) )?", "", line)
        print(f"{name:20}{seconds:8.1f}{code!s:>6}  {verdict:8}{said[:120]}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
