"""A check of some steps only, whose process 1 has a fault: ``check_cases.py FAULT STEP,STEP FLAG ...``, under spawn."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

ODD = os.environ.get("MULTIMESH_PROCESS") == "1"


def have_another_jax() -> None:
    import jax

    jax.__version__ = "9.9"


def have_another_folder() -> None:
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")


def be_slow() -> None:
    """Share one core with programs that spin and come first, while it computes."""
    from multimesh.commands.check import rates

    products, spin = rates.products, "import os\nwhile os.getppid() != 1: pass"

    def slow(bench: Any) -> Any:
        spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
        core = sorted(os.sched_getaffinity(0))[:1]
        for number in (*(process.pid for process in spinning), *map(int, os.listdir("/proc/self/task"))):
            os.sched_setaffinity(number, core)
        for thread in map(int, os.listdir("/proc/self/task")):  # XLA's own compute
            os.setpriority(os.PRIO_PROCESS, thread, 12)
        try:
            return products(bench)
        finally:
            for process in spinning:
                process.kill()

    rates.products = slow


def be_deaf() -> None:
    """Give others a port of which nothing comes back: its queue is full."""
    from multimesh.processes import agree

    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    sockets = [server, *(socket.socket() for _ in range(3))]
    for caller in sockets[1:]:
        caller.setblocking(False)
        caller.connect_ex(server.getsockname())
    put = agree.put
    address = f"127.0.0.1:{sockets[0].getsockname()[1]}".encode()
    agree.put = lambda key, value: put(key, address if key.startswith("multimesh/transfer/") else value)


def be_stopped() -> None:
    from multimesh.commands.check import rates

    rates.products = lambda bench: os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    from multimesh.commands.check import rates

    rates.products = lambda bench: time.sleep(600)


FAULTS = {case.__name__: case for case in (have_another_jax, have_another_folder, be_slow, be_deaf, be_stopped, hang)}


def main(fault: str, names: str, *flags: str) -> None:
    os.environ["SLURMD_NODENAME"] = "n1" if ODD else "n0"
    if ODD and fault in FAULTS:
        FAULTS[fault]()
    import dataclasses

    from multimesh.__main__ import parser
    from multimesh.commands.check import run

    list_steps = run.steps
    limit = 8.0 if fault in ("hang", "be_deaf") else 60.0

    def steps(quick: bool) -> list[run.Step]:
        return [dataclasses.replace(s, limit=limit) for s in list_steps(quick) if s.name in names.split(",")]

    run.steps = steps
    run.run(parser().parse_args(["check", *flags]))


if __name__ == "__main__":
    main(*sys.argv[1:])
