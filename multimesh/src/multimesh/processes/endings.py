"""How a process ended, as far as Linux tells. It needs the standard library only, as `watcher` does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct

EXIT_INFO = 8  # mask of the exit code, in PIDFD_GET_INFO


def state(pid: int) -> str:
    """State of a process in one letter (T: stopped); empty if the system does not tell."""
    return (_stat(pid) or [""])[0]


def death(pid: int, handle: int | None) -> tuple[str, int | None]:
    """Say how a process ended, as far as the system still knows. Also returns its exit code, or None."""
    fields = _stat(pid)
    code = int(fields[-1]) if fields else _code_after(handle)
    if not code:
        return "ended without a word: it was killed (perhaps for lack of memory), crashed, or left by os._exit", None
    if code & 127:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(code & 127, f'signal {code & 127}')}", None
    return f"ended with exit code {code >> 8}", code >> 8


def handle_of(pid: int) -> int | None:
    """A handle that keeps the exit code of a process, even if its parent asked for the code before us."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None


def _code_after(handle: int | None) -> int | None:
    """The exit code of a process whose parent has asked for it; Linux tells since 6.15 (PIDFD_GET_INFO)."""
    info = bytearray(struct.pack("<Q56x", EXIT_INFO))
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(-1 if handle is None else handle, 0xC0 << 24 | len(info) << 16 | 0xFF << 8 | 11, info)
    known, code = struct.unpack("<Q52xi", info)
    return code if known & EXIT_INFO else None


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
