"""One save at a time goes on in the background. Its error comes up at the next call, or when the process ends."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_thread = ThreadPoolExecutor(1, thread_name_prefix="multimesh-save")  # Python waits for it before it ends
_last: Future[None] | None = None


def begin(work: Callable[[], None]) -> None:
    """Start ``work`` beside this thread. Call `finish` before."""
    global _last
    _last = _thread.submit(work)


def busy() -> bool:
    """Return whether the work goes on."""
    return _last is not None and not _last.done()


def finish() -> None:
    """Wait until the work is done; raise its error, once. Ctrl-C ends the wait, not the work."""
    global _last
    if _last is None:
        return
    concurrent.futures.wait([_last])
    done, _last = _last, None
    done.result()


@atexit.register
def _end() -> None:
    """Tell an error that nobody has heard of, in one line, and end with its code."""
    if _last is None or not _last.done() or not (error := _last.exception()):
        return
    sys.stderr.write(f"multimesh: {error}\n")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(getattr(error, "exit_code", 1))
