"""How another process of this machine does, and how it ended, as far as Linux tells."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time

EXIT_INFO = 8  # mask of the exit code, in PIDFD_GET_INFO


class Neighbor:
    """Another process on this machine."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank, self._pid, self._handle = rank, pid, -1
        self._stopped: float | None = None  # since when
        with contextlib.suppress(AttributeError, OSError):
            self._handle = os.pidfd_open(pid)  # keeps the exit code, even if its parent asks for it before us

    def ended(self, seconds: float) -> bool:
        """Wait for its end; whether it came."""
        if self._handle < 0:
            time.sleep(seconds)
            return False
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def stopped(self) -> float:
        """Return the seconds since it was first seen stopped (SIGSTOP, Ctrl-Z, a debugger); 0 if it is not."""
        if self._handle < 0 or (_stat(self._pid) or [""])[0] != "T":
            self._stopped = None
            return 0.0
        self._stopped = self._stopped or time.monotonic()
        return time.monotonic() - self._stopped

    def kill(self, why: str) -> None:
        """End it, although it is stopped, and leave a line in its output."""
        with contextlib.suppress(OSError), open(f"/proc/{self._pid}/fd/2", "a") as output:
            output.write(f"multimesh: {why}\n")
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def death(self) -> tuple[str, int | None]:
        """Say how it ended, as far as the system still knows. Also returns its exit code, or None."""
        fields = _stat(self._pid)
        code = int(fields[-1]) if fields and fields[0] == "Z" else self._code()
        if not code:
            return "ended without a word: killed (perhaps for lack of memory), crashed, or left by os._exit", None
        if code & 127:
            names = {number.value: number.name for number in signal.Signals}
            before = f", stopped (SIGSTOP) for {time.monotonic() - self._stopped:.0f} s" if self._stopped else ""
            return f"was killed by {names.get(code & 127, f'signal {code & 127}')}{before}", None
        return f"ended with exit code {code >> 8}", code >> 8

    def _code(self) -> int | None:
        """Its exit code after its parent has asked for it; Linux tells since 6.15 (PIDFD_GET_INFO)."""
        info = bytearray(struct.pack("<Q56x", EXIT_INFO))
        with contextlib.suppress(OSError, ValueError):
            fcntl.ioctl(self._handle, 0xC0 << 24 | len(info) << 16 | 0xFF << 8 | 11, info)
        known, code = struct.unpack("<Q52xi", info)
        return code if known & EXIT_INFO else None


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
