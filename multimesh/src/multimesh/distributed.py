"""Several processes that run one plan: what they tell each other through the key-value store of ``jax.distributed``."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable

import jax

from multimesh import _compat
from multimesh.errors import UsageError

WAIT = 600.0
"""Seconds that a process waits for the others to come to the same place."""

_plans = itertools.count(1)


def several() -> bool:
    """Whether this is one of several processes."""
    return jax.process_count() > 1


def barrier(name: str, timeout: float = WAIT) -> None:
    """Wait until every process is here; ``name`` is used once."""
    _compat.key_value_store().wait_at_barrier(f"multimesh/{name}", int(1000 * timeout))


def agree(what: str, lines: Iterable[str], timeout: float = WAIT) -> None:
    """Compare lines with all other processes; ``what`` is used once.

    Raises
    ------
    UsageError
        In every process, where they are not the same.
    """
    store, me, count = _compat.key_value_store(), jax.process_index(), jax.process_count()
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    store.key_value_set(f"multimesh/{what}/{me}", digest)
    said = [store.blocking_key_value_get(f"multimesh/{what}/{rank}", int(1000 * timeout)) for rank in range(count)]
    odd = [str(rank) for rank, other in enumerate(said) if other != said[0]]
    if odd:
        raise UsageError(
            f"{what}: process {', '.join(odd)} made something else than process 0; start all of them with the same "
            "code, flags and versions"
        )


def agree_on_plan(name: str, lines: Iterable[str]) -> int:
    """Compare the lines of a plan's fingerprint with all other processes; the number of the plan, alike in all."""
    number = next(_plans)
    agree(f"plan {number} ({name})", lines)
    return number
