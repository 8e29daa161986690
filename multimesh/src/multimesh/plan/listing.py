"""The text of a plan, as wide as a terminal: the runs of each submesh, in order."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from jax.sharding import AxisType

from multimesh.core.grouping import group
from multimesh.core.submesh import describe
from multimesh.core.text import amount
from multimesh.plan.instructions import PlanData, Run

_NARROWEST = 40
_ROWS = 24  # submeshes or stages shown; of more, the first and the last
_HELD = 4  # arguments on several submeshes shown
_NAME = 14  # characters of the name of a kernel outside of loops
_KINDS = {"F": "forward", "B": "backward", "W": "weight gradients", "FB": "forward and backward in one kernel"}


def text(plan: PlanData) -> str:
    """Return submeshes, totals, and a line for each submesh, no wider than the terminal."""
    width = max(_NARROWEST, shutil.get_terminal_size().columns)
    count, size = plan.traffic()
    peaks = plan.peak_bytes()
    meshes = [
        _cut(f"submesh {i}: {describe(mesh)}, peak {amount(peaks[i], 'bytes')}", width)
        for i, mesh in enumerate(plan.submeshes)
    ]
    total = f"{len(plan.kernels)} kernels, {len(plan.runs)} runs, {count} arrays ({amount(size, 'bytes')}) sent"
    heading = [_cut(line, width) for cuts in plan.cuts for line in _middle(cuts.short(), "stages")]
    lines = [
        *_middle(meshes, "submeshes"),
        *heading,
        *textwrap.wrap(total, width),
        *textwrap.wrap(_spread_note(plan), width),
        *_middle(_reshards(plan, width), "reshards"),
    ]
    runs: list[list[Run]] = [[] for _ in plan.submeshes]
    for run in plan.runs:
        runs[run.submesh].append(run)
    stages = [sorted({run.cell.stage for run in row if run.cell}) for row in runs]
    several = any(len(numbers) > 1 for numbers in stages)
    legend = _legend(plan, several)
    if legend:
        lines += textwrap.wrap(legend, width)
    moved = not several and any(numbers not in ([], [i]) for i, numbers in enumerate(stages))
    heads = [f"{i}, stage {numbers[0]}" if moved and numbers else str(i) for i, numbers in enumerate(stages)]
    wide = max(map(len, heads))
    rows = [
        f"{head:<{wide}} | {_row([_cell(plan, run, several) for run in row], width - wide - 3)}"
        for head, row in zip(heads, runs, strict=True)
    ]
    chosen = [_cut(line, width) for choice in plan.choices for line in ("", *str(choice).splitlines())]
    return "\n".join([*lines, *_middle(rows, "submeshes"), *chosen])


def _spread_note(plan: PlanData) -> str:
    """Return a sentence on arguments that are on several submeshes, the largest first, by number of the leaf."""
    on = group((leaf, plan.slots[slot].submesh) for leaf, slot in plan.inputs)
    size = {leaf: plan.slots[slot].nbytes for leaf, slot in plan.inputs}
    several = sorted((leaf for leaf in on if len(on[leaf]) > 1), key=lambda leaf: -size[leaf])
    named = [f"{leaf} ({amount(size[leaf], 'bytes')}) on {', '.join(map(str, on[leaf]))}" for leaf in several[:_HELD]]
    more = [f"{len(several) - _HELD} more"] * (len(several) > _HELD)
    return f"arguments on several submeshes: {'; '.join([*named, *more])}" if several else ""


def _reshards(plan: PlanData, width: int) -> list[str]:
    """Return a line for each kind of array that is sent between submeshes whose types differ, with both layouts."""
    notes: dict[str, None] = {}
    for sent in plan.transfers if plan.layouts else ():
        ends = plan.submeshes[sent.source], plan.submeshes[sent.target]
        if ends[0].abstract_mesh == ends[1].abstract_mesh or not any(AxisType.Explicit in m.axis_types for m in ends):
            continue
        for one, other in zip(sent.ins, sent.outs, strict=True):
            slot = plan.slots[one]
            specs = f"{plan.layouts[one].spec} becomes {plan.layouts[other].spec}"
            notes[f"{sent.source} to {sent.target}: {slot.dtype}{[*slot.shape]} {specs}"] = None
    return [_cut(line, width) for line in (["reshards between submeshes:", *notes] if notes else [])]


def _legend(plan: PlanData, several: bool) -> str:
    """Return an explanation of the cells, with the phases that occur."""
    present = {plan.shown(run.cell) for run in plan.runs}
    number = "s.m" if several else "m"
    named = _KINDS | ({"FB": "both in one kernel"} if {"F", "B"} <= present else {})
    kinds = ", ".join(f"{kind}{number} {meaning}" for kind, meaning in named.items() if kind in present)
    return f"{kinds}, of {'stage s, ' if several else ''}microbatch m" if kinds else ""


def _cell(plan: PlanData, run: Run, several: bool) -> str:
    if run.cell is None:
        return _cut(plan.name(run), _NAME)
    return f"{plan.shown(run.cell)}{f'{run.cell.stage}.' if several else ''}{run.cell.microbatch}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _row(cells: Sequence[str], width: int) -> str:
    """Return the cells of a submesh in a line; if not all fit, those of both ends."""
    line = " ".join(cells)
    if len(line) <= width:
        return line
    for count in range(len(cells) - 1, 0, -1):
        first, last = cells[: (count + 1) // 2], cells[len(cells) - count // 2 :]
        line = " ".join([*first, f"... {len(cells) - count} more ...", *last])
        if len(line) <= width:
            return line
    return _cut(f"{len(cells)} runs", width)


def _middle(lines: Sequence[str], noun: str) -> list[str]:
    if len(lines) <= _ROWS:
        return list(lines)
    half = _ROWS // 2
    return [*lines[:half], f"... {len(lines) - 2 * half} more {noun} ...", *lines[-half:]]
