"""Servers inside of the test process, on an event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving(start: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Have a server for the length of a block; ``start`` returns when it listens."""
    loop, started = asyncio.new_event_loop(), threading.Event()

    async def begin() -> None:
        await start()
        started.set()

    def work() -> None:
        loop.create_task(begin())
        loop.run_forever()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.set_exception_handler(lambda loop, context: None)  # connections that are open are cut, which is no news
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
