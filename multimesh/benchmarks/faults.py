"""What the others say when a process is lost, after how long, and with which code: a table, of real processes.

``python multimesh/benchmarks/faults.py [FAULT ...]`` starts two processes for each fault. The second one has it.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

JOB = """
import os, sys, signal, time
import jax, numpy as np
import multimesh as mm
from multimesh.processes.initialize import begin_step, count_step

rank = int(sys.argv[1])
job = mm.distributed.initialize(sys.argv[2], 2, rank)
for step in range(100000):
    begin_step()
    count_step()
    mm.distributed.barrier(f"step {step}")  # each waits for all
    if step == 20 and rank == 1:
        print("fault", time.time(), flush=True)
        FAULT
"""


@dataclass(frozen=True)
class Fault:
    """What the second process does, the code that the first must end with, its words, and seconds that it may take."""

    code: str
    ends: int
    told: str
    within: float


SOON = {"MULTIMESH_STOP_TIMEOUT": "5", "MULTIMESH_STALL_TIMEOUT": "5"}
"""Timeouts that are long by default."""

FAULTS = {
    "an exception": Fault("raise ValueError('a fault')", 1, r"failed .*ValueError: a fault", 5),
    "sys.exit(3)": Fault("sys.exit(3)", 3, r"failed .*SystemExit: 3", 5),
    "os._exit(3)": Fault("os._exit(3)", 3, r"ended with exit code 3", 3),
    "SIGKILL": Fault("os.kill(os.getpid(), signal.SIGKILL)", 17, r"was killed by SIGKILL", 3),
    "SIGTERM": Fault("os.kill(os.getpid(), signal.SIGTERM)", 17, r"was killed by SIGTERM", 3),
    "abort": Fault("os.abort()", 17, r"was killed by SIGABRT", 3),
    "Ctrl-C": Fault("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 130, r"failed .*KeyboardInterrupt", 8),
    "SIGSTOP": Fault("os.kill(os.getpid(), signal.SIGSTOP)", 17, r"has been stopped \(SIGSTOP\)", 12),
    "it hangs": Fault("time.sleep(600)", 17, r"has been after step", 12),
}


def try_fault(fault: Fault, place: Path) -> tuple[float, int, str]:
    """Start both processes; return seconds from the fault to the end of the first, its code, and its line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    script = place / "job.py"
    script.write_text(JOB.replace("FAULT", fault.code))
    env = os.environ | SOON | {"JAX_PLATFORMS": "cpu", "MULTIMESH_JOB_SECRET": secrets.token_hex(16)}
    outputs = [(place / f"{rank}.txt").open("w+") for rank in range(2)]
    started = [
        subprocess.Popen([sys.executable, str(script), str(rank), address], env=env, stdout=out, stderr=out)
        for rank, out in enumerate(outputs)
    ]
    try:
        code = started[0].wait(180)
        ended = time.time()
    finally:
        for process in started:
            process.kill()
            process.wait()
    first, second = (Path(out.name).read_text() for out in outputs)
    for out in outputs:
        out.close()
    begun = re.search(r"^fault ([\d.]+)$", second, re.MULTILINE)
    line = re.search(r"^multimesh: .* ends because (.*)$", first, re.MULTILINE)
    return ended - float(begun[1]) if begun else float("nan"), code, line[1] if line else first[-200:]


def main() -> int:
    wrong = 0
    print(f"{'what happens':14}{'seconds':>8}{'code':>6}  {'verdict':8}what process 0 says of process 1")
    for name in sys.argv[1:] or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            seconds, code, line = try_fault(FAULTS[name], Path(folder))
        fault = FAULTS[name]
        good = bool(re.search(fault.told, line)) and code == fault.ends and seconds < fault.within
        wrong += not good
        said = re.sub(r"^process 1 of 2 \(.*?\) ", "", line)
        print(f"{name:14}{seconds:8.1f}{code:6}  {'good' if good else 'WRONG':8}{said}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
