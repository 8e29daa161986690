"""The text of a compiled program, HLO: its computations, their operations, and how often each runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

ARRAY = re.compile(r"([a-z]+)(\d*)([a-z0-9]*)\[([\d,]*)\]")
"""The type of an array: letters, bits and the rest of its dtype, and its dimensions."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_OP = re.compile(r"%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((?:%?([\w.-]+))?")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|branch_computations|true_computation|false_computation)=\{?([^}\s]+(?:, %[^}\s]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLERS = ("while", "call", "conditional", "fusion", "async-start")


@dataclass(frozen=True)
class Operation:
    """An operation of a computation.

    ``first`` is the name of its first operand, ``type`` that of its result as HLO writes it, ``text`` the whole line.
    """

    name: str
    type: str
    kind: str
    first: str
    text: str


@dataclass(frozen=True)
class Computations:
    """The computations of a program.

    ``operations`` are those of each, ``calls`` the computations that it calls, and how often in one run of it. ``head``
    is the text before the first one, with the table of source lines.
    """

    head: str
    entry: str
    operations: Mapping[str, Sequence[Operation]]
    calls: Mapping[str, Sequence[tuple[str, int]]]

    def runs(self) -> Iterator[tuple[str, int]]:
        """Yield each computation, once for each place that calls it, and how often it runs there.

        The body of a loop counts as often as XLA knows that it runs, or else once.
        """
        return self._runs(self.entry, 1)

    def starts(self) -> dict[str, str]:
        """Return the line that starts each computation which runs beside the one that calls it."""
        begin = [op for operations in self.operations.values() for op in operations if op.kind == "async-start"]
        return {called: op.text for op in begin for called in _read_calls(op.text)}

    def _runs(self, name: str, times: int) -> Iterator[tuple[str, int]]:
        yield name, times
        for called, trips in self.calls.get(name, ()):
            yield from self._runs(called, times * trips)


def read_computations(hlo: str) -> Computations:
    """Return the computations of a program.

    ``hlo``: optimized HLO, as ``as_text()`` of a compiled function gives it.
    """
    operations: dict[str, list[Operation]] = {"": []}
    calls: dict[str, list[tuple[str, int]]] = {"": []}
    entry = name = ""
    for text in hlo.splitlines():
        if head := _HEAD.match(text):
            name = head[2]
            operations[name], calls[name] = [], []
            entry = name if head[1] else entry
        elif op := _OP.search(text):
            operations[name].append(Operation(op[1], op[2], op[3], op[4] or "", text))
            if op[3] in _CALLERS:
                trips = int(known[1]) if (known := _TRIPS.search(text)) else 1
                calls[name] += [(each, trips) for each in _read_calls(text)]
    return Computations(hlo.partition("\n%")[0], entry, operations, calls)


def _read_calls(text: str) -> list[str]:
    """Return the names of the computations that an operation calls."""
    parts = [part.strip("%, ") for group in _CALLED.findall(text) for part in group.split(",")]
    return [each for each in parts if each]


def read_arrays(types: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield dtype and shape of each array of a type: ``bf16``, ``(8, 64)``."""
    for letters, bits, rest, dims in ARRAY.findall(types):
        yield letters + bits + rest, tuple(int(n) for n in dims.split(",") if n)
