"""Give loops the schedules that stand for their own, as the search for ``auto`` tries one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multimesh import ir
from multimesh.schedules import Schedule


def replace_schedules(program: ir.Program, schedules: Mapping[int, Schedule]) -> ir.Program:
    """Return the program with the given schedules in the place of those of its loops, by the number of the loop."""
    if not schedules:
        return program
    number = {loop: n for n, loop in enumerate(program.loops)}

    def change(loop: ir.Loop) -> ir.Loop:
        schedule = schedules.get(number[loop], loop.mark.schedule)
        return replace(loop, mark=replace(loop.mark, schedule=schedule))

    return program.each_loop(change)
