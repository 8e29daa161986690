"""Measurements during a step, made at the calls that the running Python code makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax


def device_bytes() -> dict[jax.Device, int]:
    """Bytes of live arrays on every device."""
    bytes_of = dict.fromkeys(jax.devices(), 0)
    for x in jax.live_arrays():
        if x.is_deleted():
            continue
        size = x.dtype.itemsize
        for n in x.sharding.shard_shape(x.shape):
            size *= n
        for d in x.sharding.device_set:
            bytes_of[d] += size
    return bytes_of


def at_every_call(f: Callable[[], Any], hook: Callable[[int], None]) -> Any:
    """Run ``f()``; ``hook(k)`` runs at the k-th call of a function, Python's or C's, and may raise."""
    count = 0

    def profile(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1
            hook(count)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        return f()
    finally:
        sys.setprofile(before)


def calls(f: Callable[[], Any]) -> int:
    """Return the number of calls that ``f()`` makes."""
    last = 0

    def hook(k: int) -> None:
        nonlocal last
        last = k

    at_every_call(f, hook)
    return last


def peak_bytes(f: Callable[[], Any], *, every: int = 20) -> dict[jax.Device, int]:
    """The most bytes that each device held at any time of ``f()`` beyond what it held before."""
    start = device_bytes()
    peak = dict(start)

    def hook(k: int) -> None:
        if k % every == 0:
            for d, n in device_bytes().items():
                peak[d] = max(peak[d], n)

    at_every_call(f, hook)
    return {d: peak[d] - start[d] for d in peak}
