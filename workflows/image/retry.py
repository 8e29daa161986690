"""Tries again what may succeed later: network faults, 429 and 5xx; nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from urllib3.exceptions import InvalidHeader
from urllib3.util.retry import Retry

from workflows import console, errors

T = TypeVar("T")


class Transient(Exception):
    """Something that may be gone the next time; ``after_s`` is how long the server asked to wait, if it said."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


@dataclass(frozen=True)
class Policy:
    """How often to try, and how long to wait in between.

    Attributes
    ----------
    first_s, most_s
        The first wait and the longest one; each is twice the one before, less up to a third so that many clients that
        failed together do not come back together.
    longest_order_s
        The longest wait that a server may ask for; more than that is an error that says so.
    """

    attempts: int = 6
    first_s: float = 1.0
    most_s: float = 60.0
    longest_order_s: float = 600.0

    def wait_s(self, attempt: int, order_s: float | None) -> float:
        """Return how long to wait after the failure of an attempt, counted from 1."""
        backoff: float = min(self.most_s, self.first_s * 2 ** (attempt - 1)) * random.uniform(2 / 3, 1)  # noqa: S311
        return backoff if order_s is None else max(order_s, backoff)


def call(action: Callable[[], T], policy: Policy, label: str, sleep: Callable[[float], None] = time.sleep) -> T:
    """Return what an action returns, trying again after each ``Transient``.

    Raises
    ------
    RegistryError
        It still failed the last time, or the server wants a longer wait than is reasonable.
    """
    attempt = 1
    while True:
        try:
            return action()
        except Transient as fault:
            if attempt == policy.attempts:
                raise errors.RegistryError(f"{label}: {fault}, {attempt} times; try again later") from fault
            if fault.after_s is not None and fault.after_s > policy.longest_order_s:
                raise errors.RegistryError(
                    f"{label}: {fault}; the server wants {fault.after_s:.0f} s of quiet; try again after that"
                ) from fault
            wait = policy.wait_s(attempt, fault.after_s)
            attempt += 1
            console.note(f"{label}: {fault}; attempt {attempt} of {policy.attempts} in {wait:.1f} s")
            sleep(wait)


def retry_after(header: str | None) -> float | None:
    """Read a ``Retry-After`` header: seconds, or a date; None if there is none that can be read."""
    try:
        return None if header is None else float(Retry().parse_retry_after(header))
    except InvalidHeader:
        return None
