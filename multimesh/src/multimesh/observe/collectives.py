"""Counts the bytes that the collectives of a compiled program make."""

from __future__ import annotations

import collections
import math
import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_OP = re.compile(r" = (\(.*?\)|\S+) ([\w-]+)\(")
_CALLED = re.compile(
    r"(?:body|to_apply|branch_computations|true_computation|false_computation)=\{?([^}\s]+(?:, %[^}\s]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")


def collective_bytes(hlo: str) -> dict[str, float]:
    """Bytes of the results of each kind of collective on a device, in one run of a program.

    The body of a loop counts as often as XLA knows that it runs, or else once.

    Parameters
    ----------
    hlo
        Optimized HLO, as ``as_text()`` of a compiled function gives it.
    """
    made: dict[str, dict[str, float]] = collections.defaultdict(dict)
    calls: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    entry = name = ""
    for line in hlo.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            entry = name if head[1] else entry
        elif op := _OP.search(line):
            kind = op[2].removesuffix("-done")  # what began with -start is counted where it ends
            if kind in KINDS:
                made[name][kind] = made[name].get(kind, 0.0) + _bytes(op[1])
            elif op[2] in ("while", "call", "conditional"):
                trips = int(found[1]) if (found := _TRIPS.search(line)) else 1
                inner = [part.strip("%, ") for group in _CALLED.findall(line) for part in group.split(",")]
                calls[name] += [(each, trips) for each in inner]
    return dict(_total(entry, made, calls))


def _total(
    name: str, made: dict[str, dict[str, float]], calls: dict[str, list[tuple[str, int]]]
) -> collections.Counter[str]:
    total = collections.Counter(made.get(name, {}))
    for called, times in calls.get(name, ()):
        for kind, size in _total(called, made, calls).items():
            total[kind] += times * size
    return total


def _bytes(types: str) -> float:
    """Bytes of an array, or of a tuple of them, as HLO writes its type: ``f32[8,64]{1,0}``."""
    sizes = (
        (int(bits or 8), math.prod(int(n) for n in dims.split(",") if n)) for _, bits, dims in _ARRAY.findall(types)
    )
    return sum(bits * number / 8 for bits, number in sizes)
