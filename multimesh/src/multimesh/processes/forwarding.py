"""Forwards what several processes print, a whole line at a time. Nothing here imports JAX."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

_CHUNK = 1 << 16
_LONGEST = 1 << 20  # bytes of a line; a longer one is broken
_PATIENCE = 1.0  # seconds that a process outside of the job, which inherited a pipe, may hold up the end

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?!\Z))")
"""A line, or a state of a progress bar. A carriage return at the end may be half of an end of line."""


@dataclass
class _Stream:
    target: int
    label: bytes
    rest: bytes = b""

    def lines(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that are complete now; no data means that the stream has ended."""
        text, end = self.rest + data, 0
        for found in _LINE.finditer(text):
            yield self.label + found[0]
            end = found.end()
        self.rest = text[end:]
        if self.rest and (not data or len(self.rest) > _LONGEST):
            yield self.label + self.rest.rstrip(b"\r\n") + b"\n"
            self.rest = b""


class Forwarder:
    """Writes the lines of processes to our own output and error output, each line at once.

    One thread reads all pipes, so no two lines run into each other.
    """

    def __init__(self) -> None:
        """Begin without processes."""
        self._pipes = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._forward, daemon=True)

    def add(self, process: subprocess.Popen[bytes], label: str) -> None:
        """Forward the lines of a process that was started with pipes, each with a label before it."""
        for target, pipe in ((1, process.stdout), (2, process.stderr)):
            if pipe:
                self._pipes.register(pipe, selectors.EVENT_READ, _Stream(target, label.encode()))

    def start(self) -> None:
        """Begin to write. No process can be added from here on."""
        self._thread.start()

    def finish(self) -> None:
        """Wait until all is written. The processes have ended."""
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE)

    def _forward(self) -> None:
        while self._pipes.get_map():
            for key, _ in self._pipes.select():
                pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
                data = os.read(pipe.fileno(), _CHUNK)
                for line in key.data.lines(data):
                    _write(key.data.target, line)
                if not data:
                    self._pipes.unregister(pipe)
                    pipe.close()


def _write(target: int, line: bytes) -> None:
    while line:
        line = line[os.write(target, line) :]
