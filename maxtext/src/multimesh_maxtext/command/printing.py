"""Output that never blocks: a reader who has stopped reading, such as a paused pager, does not hold up a run."""

from __future__ import annotations

import io
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_PATIENCE = 2.0  # seconds without any progress after which a reader is given up, at the end

_writing = threading.RLock()  # rich has threads that write


class UnblockedOutput(io.TextIOBase):
    """A text stream in place of another one. What its reader does not take yet is written with what follows."""

    def __init__(self, stream: TextIO) -> None:
        """Write with a descriptor of its own, as all that have the stream's would get errors else."""
        super().__init__()
        self._encoding, self._waiting = stream.encoding, bytearray()
        self.fileno, self.isatty, self.writable = stream.fileno, stream.isatty, stream.writable  # type: ignore[method-assign]
        self._descriptor = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)

    def write(self, text: str) -> int:
        """Write text now or later. Raises ``BrokenPipeError`` where nobody reads any more."""
        with _writing, suppress(BlockingIOError):
            self._waiting += text.encode(self._encoding, "backslashreplace")
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        return len(text)

    def drain(self) -> None:
        """Wait until all is written, or the reader takes nothing for a while."""
        length, since = len(self._waiting), time.monotonic()
        while self._waiting and time.monotonic() - since < _PATIENCE:
            time.sleep(0.01)
            self.write("")
            if len(self._waiting) < length:
                length, since = len(self._waiting), time.monotonic()


@contextmanager
def unblock_output() -> Iterator[None]:
    """Let stdout and stderr not block where they are pipes or terminals; at the end wait for readers who still read."""
    streams, outputs = (sys.stdout, sys.stderr), dict[tuple[int, int], UnblockedOutput]()

    def replace(stream: TextIO) -> TextIO:
        status = os.fstat(stream.fileno())
        reader = status.st_dev, status.st_ino
        with suppress(OSError):  # a terminal of another user
            if reader not in outputs and (stat.S_ISFIFO(status.st_mode) or stream.isatty()):
                outputs[reader] = UnblockedOutput(stream)
        return outputs.get(reader, stream)  # type: ignore[return-value]

    try:
        sys.stdout, sys.stderr = map(replace, streams)
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for output in outputs.values():
            output.drain()
