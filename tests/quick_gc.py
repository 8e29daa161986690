"""Python's garbage collector, which else looks at all modules and tests again and again, a good part of the time."""

from __future__ import annotations

import gc

YOUNG = 50_000  # objects made between collections; Python's own number is 2000


def pytest_collection_finish() -> None:
    """Leave all that is there once tests are collected out of later collections; every conftest imports this hook."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
