"""How a training ends, or goes on, when something is done to it: a table, of real runs of ``run.py``.

``python maxtext/benchmarks/faults.py [FAULT ...]`` trains a small model in two processes for each fault, with
checkpoints. A disk that is full needs root.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    *("--num-layers=2", "--model-dims=32", "--num-heads=2", "--sequence-length=32", "--batch-size=4"),
    *("--microbatch-size=2", "dtype=float32", "learning_rate_schedule_steps=1000", "vocab_size=512"),
)
TWO = ("--spawn", "--nodes=2", "--cpus=1", "--pp=2")
STALL = ("--stall-timeout=10",)
ENDLESS = ("--num-steps=100000",)
PATIENCE = 300.0
RANKS = ("MULTIMESH_MAXTEXT_RANK", "MULTIMESH_MAXTEXT_LOCAL_RANK")

HANGS = """
import ctypes, signal, time
signal.signal(signal.SIGUSR2, lambda *_: time.sleep(600))
signal.signal(signal.SIGWINCH, lambda *_: ctypes.PyDLL(None).sleep(600))  # keeps Python's lock
"""
"""Python reads this as it starts in each process: a signal makes it hang."""


@dataclass
class Job:
    """A run in a folder of its own: its process, and what it printed."""

    place: Path
    process: subprocess.Popen[str]
    reader: int

    def said(self, name: str = "stderr") -> str:
        """Return what it printed until now."""
        return (self.place / name).read_text(errors="replace")

    def steps(self) -> int:
        """Return how many steps it did."""
        file = self.place / "out/metrics.jsonl"
        return file.read_text().count('"learning/loss"') if file.exists() else 0

    def wait_for_steps(self, count: int = 4) -> None:
        """Wait until it has done some steps."""
        end = time.monotonic() + PATIENCE
        while self.steps() < count:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"it did not train: {self.said()}")
            time.sleep(0.05)

    def trainer(self, rank: int) -> int:
        """Return the process of a trainer."""
        folder = self.place / "out" / (f"process-{rank}" if rank else "")
        own = f"metrics_file={folder / 'metrics.jsonl'}".encode()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if own in path.read_bytes().split(b"\0"):
                    return int(path.parent.name)
        raise RuntimeError(f"there is no trainer {rank}")


@dataclass(frozen=True)
class Fault:
    """A thing to do to a run, and its end.

    Attributes
    ----------
    do
        Called once the run has shown some steps; none if the start of the run is the fault.
    codes, told
        Exit codes that are right; a pattern of the last line.
    within
        Seconds.
    flags
        Further ones of the run.
    around
        A context in which the run is started: it gets the folder, and gives flags and variables.
    grid
        Flags of the processes and their devices.
    piped
        Whether its output goes into a pipe.
    """

    do: Callable[[Job], object] | None
    codes: tuple[int, ...]
    told: str
    within: float = 20.0
    flags: tuple[str, ...] = ()
    around: Callable[[Path], Iterator[tuple[list[str], dict[str, str]]]] | None = None
    grid: tuple[str, ...] = TWO
    piped: bool = False


def kill(rank: int, number: int) -> Callable[[Job], None]:
    """Return what sends a signal to a trainer."""
    return lambda job: os.kill(job.trainer(rank), number)


def tell(number: int) -> Callable[[Job], None]:
    """Return what sends a signal to the launcher."""
    return lambda job: job.process.send_signal(number)


def close_terminal(number: int) -> Callable[[Job], None]:
    """Return what sends a signal to all that a terminal would: the launcher and its processes."""
    return lambda job: os.killpg(job.process.pid, number)


def fill(place: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    disk = place / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
    try:
        yield [f"--checkpoint={disk}", "--checkpoint-every=1"], {}
    finally:
        subprocess.run(["umount", disk], check=True)


def damage(place: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Write checkpoints, and change a bit of each."""
    first = start(place, [*TWO, "--num-steps=3", "--checkpoint-every=1"], {})
    first.process.wait()
    kept = [path for path in (place / "ck").iterdir() if path.name.isdigit()]
    for step in kept:
        file = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    yield ["--resume"], {}
    left = sum(1 for path in (place / "ck").iterdir() if path.name.split(".")[0].isdigit())
    print(f"  {len(kept)} checkpoints before, {left} folders after", file=sys.stderr)


def take_port(place: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Listen where process 0 wants to: as a job whose port another one has."""
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        yield [], {"JAX_COORDINATOR_ADDRESS": address, **dict.fromkeys(RANKS, "0"), "MULTIMESH_MAXTEXT_SIZE": "2"}


def own_clock(place: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Give the run a clock of the day that `set_clock` sets."""
    library = place / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("clock.c")], check=True)
    yield [], {"LD_PRELOAD": str(library), "CLOCK_FILE": str(place / "clock")}


def set_clock(seconds: int) -> Callable[[Job], object]:
    """Return what sets the clock of the day of all processes."""
    return lambda job: (job.place / "clock").write_text(str(seconds))


LATE = r"process . of 2 .* (has been out of reach|was killed by SIGABRT)"
"""JAX's service takes silence by the clock of the day: an hour ahead is one of silence, and so is a negative time."""

FAULTS = {
    "process 1: SIGKILL": Fault(kill(1, signal.SIGKILL), (17,), r"process 1 of 2 .*was killed by SIGKILL"),
    "process 0: SIGKILL": Fault(kill(0, signal.SIGKILL), (17,), r"process 0 of 2 .*was killed by SIGKILL"),
    "process 1: SIGSTOP": Fault(kill(1, signal.SIGSTOP), (17,), r"process 1 of 2 .*has been stopped"),
    "process 0: SIGSTOP": Fault(kill(0, signal.SIGSTOP), (17,), r"process 0 of 2 .*has been stopped"),
    "process 1: it hangs": Fault(
        kill(1, signal.SIGUSR2), (17,), r"process 1 of 2 .*has been (in|after) step", 30, STALL
    ),
    "process 1: hangs with Python's lock": Fault(
        kill(1, signal.SIGWINCH), (17,), r"process 1 of 2 .*has been (in|after) step", 30, STALL
    ),
    "process 0: hangs with Python's lock": Fault(
        kill(0, signal.SIGWINCH), (17,), r"process 0 of 2 .*has been (in|after) step", 40, STALL
    ),
    "SIGTERM": Fault(tell(signal.SIGTERM), (18,), "a signal ended the run after .*; add --resume to go on"),
    "the clock goes back an hour": Fault(set_clock(-3600), (17,), LATE, around=own_clock),
    "the clock goes ahead by an hour": Fault(set_clock(3600), (17,), LATE, around=own_clock),
    "SIGHUP to all": Fault(close_terminal(signal.SIGHUP), (18,), "a signal ended the run after .*; add --resume"),
    "Ctrl-C to all": Fault(close_terminal(signal.SIGINT), (130,), "^interrupted; the trainer was stopped; "),
    "closed pipe": Fault(lambda job: os.close(job.reader), (141,), "nobody reads the output", piped=True),
    "disk full": Fault(None, (15,), "cannot be written .No space left on device.", 300, around=fill),
    "all checkpoints damaged": Fault(None, (15,), "no other checkpoint is there", 300, around=damage),
    "port in use": Fault(None, (2,), "Address already in use", 300, around=take_port, grid=TWO[1:]),
}


def start(place: Path, flags: list[str], variables: dict[str, str], *, piped: bool = False) -> Job:
    """Start a run; its output goes to files, or into a pipe."""
    line = [sys.executable, str(ROOT / "maxtext/run.py"), *SIZES, *ENDLESS, "--checkpoint-every=100000"]
    line += [f"--output={place / 'out'}", f"--checkpoint={place / 'ck'}", f"--text={ROOT / 'LICENSE'}", *flags]
    environment = {**os.environ, "PYTHONPATH": str(place), **variables}
    reader, writer = os.pipe()
    with (place / "stdout").open("w") as file, (place / "stderr").open("w") as err, os.fdopen(writer, "w") as pipe:
        out = pipe if piped else file
        process = subprocess.Popen(line, stdout=out, stderr=err, text=True, env=environment, start_new_session=True)
    return Job(place, process, reader)


def try_fault(fault: Fault, place: Path) -> tuple[float, int, str]:
    """Return seconds from the fault, or the start, to the end; the exit code, and the last line."""
    (place / "sitecustomize.py").write_text(HANGS)
    around = contextmanager(fault.around)(place) if fault.around else nothing()
    with around as (flags, variables):
        job = start(place, [*fault.grid, *fault.flags, *flags], variables, piped=fault.piped)
        begun = time.monotonic()
        try:
            if fault.do:
                job.wait_for_steps()
                begun = time.monotonic()
                fault.do(job)
            code = job.process.wait(PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGKILL)
        return time.monotonic() - begun, code, (job.said().splitlines() or [""])[-1]


@contextmanager
def nothing() -> Iterator[tuple[list[str], dict[str, str]]]:
    """Start the run as it is."""
    yield [], {}


def main() -> int:
    """Try the faults, print the table, and return 1 if a row is wrong."""
    wrong = 0
    print(f"{'what happens':38}{'seconds':>8}{'code':>6}  {'verdict':8}the last line")
    for name in sys.argv[1:] or FAULTS:
        fault = FAULTS[name]
        with tempfile.TemporaryDirectory() as folder:
            seconds, code, line = try_fault(fault, Path(folder))
        good = bool(re.search(fault.told, line)) and code in fault.codes and seconds < fault.within
        wrong += not good
        print(f"{name:38}{seconds:8.1f}{code:6}  {'good' if good else 'WRONG':8}{line}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
