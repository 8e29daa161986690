"""A line that grows while a long wait lasts: on a terminal, and in ``logging`` elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

_QUIET = 1.0  # seconds: what is over by then is not told
_PAUSE = 15.0  # seconds between two entries of a log


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Tell how many of ``total`` things are done; the function that it gives counts one, in any thread.

    A terminal gets one line on its standard error, which is taken away in the end. Elsewhere the logger ``multimesh``
    gets an entry at level INFO once a second has passed, one each quarter of a minute, and one in the end.
    """
    start, lock, done, width, due = time.monotonic(), threading.Lock(), 0, 0, _QUIET
    terminal = sys.stderr.isatty()
    log = logging.getLogger("multimesh")

    def count() -> None:
        nonlocal done, width, due
        with lock:
            done += 1
            elapsed = time.monotonic() - start
            if elapsed < _QUIET:
                return
            line = f"{label}: {done} of {total}, {elapsed:.0f} s"
            if terminal:
                print(f"\r{line}", end="", file=sys.stderr, flush=True)
                width = len(line)
            elif elapsed >= due:
                log.info("%s", line)
                width, due = 1, elapsed + _PAUSE

    try:
        yield count
    finally:
        if width and terminal:
            print(f"\r{' ' * width}\r", end="", file=sys.stderr, flush=True)
        elif width:
            log.info("%s: %d of %d, %.1f s, done", label, done, total, time.monotonic() - start)
