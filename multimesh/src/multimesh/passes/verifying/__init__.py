"""Invariants of a program, its parts and its plan after every pass: one function a rule.

A rule takes what a pass made and yields a `Fault` for each place where that is broken. Nothing here changes anything.
Set ``MULTIMESH_VERIFY=1`` to run the rules after every pass; otherwise none of them costs anything. A fault is a bug of
MultiMesh, never of the user: the error names the pass, the value and the user's line, and asks for a report.

The rules of the plan refuse the rest, such as a fragment that reads a value that nothing gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from multimesh.core import _compat
from multimesh.errors import internal_error
from multimesh.passes.verifying.rules import RULES, Fault, tasks_are_at_home


def verify(name: str, result: Any) -> None:
    """Raise an error for the first rule that an `ir.Program`, its `Parts` or a `Plan` breaks after a pass."""
    for rule, fault in faults(name, result):
        line = (
            fault.source if isinstance(fault.source, str) else _compat.user_line(fault.source) if fault.source else ""
        )
        raise internal_error(
            f"pass {name!r} broke the rule {rule!r}: {fault.message}{f'; it comes from {line}' if line else ''}"
        )


def faults(name: str, result: Any) -> Iterator[tuple[str, Fault]]:
    """Yield each fault of a pass's result, with the name of the rule."""
    copied = name in ("recompute_transfers", "replace_schedules")  # operations of tasks, to where they are read
    for rule in RULES[type(result)]:
        if not copied or rule is not tasks_are_at_home:
            yield from ((rule.__name__, fault) for fault in rule(result))
