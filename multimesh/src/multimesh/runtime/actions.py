"""The actions of a plan, those that one process takes part in, and what they send from one process to another.

All processes have the same plan, and each runs the kernels of its submeshes. Actions are grouped and numbered on the
whole plan: processes that grouped transfers differently would wait for each other for ever. All processes work out
alone, with the same result, which pieces of arrays go where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from multimesh.core.grouping import group
from multimesh.plan.instructions import Free, Run, Send, Transfer
from multimesh.plan.plan import Plan
from multimesh.runtime.resharding import Copy, Resharding

Owner = Callable[[jax.Device], int]  # the process of a device


def owner(device: jax.Device) -> int:
    """Return the process of a device."""
    return int(device.process_index)


@dataclass(frozen=True)
class Action:
    """One call of the runtime: a kernel to run, or arrays to move."""

    number: int  # its place in the whole plan, the same in all processes
    submeshes: tuple[int, ...]  # of the kernel, or those that the arrays leave and reach
    kernel: int | None  # index into Plan.kernels; None for arrays that move
    ins: tuple[int, ...]  # slots that it reads
    outs: tuple[int, ...]  # slots that it writes
    instructions: tuple[int, ...]  # numbers of its RUN or its SENDs in Plan.instructions
    frees: tuple[int, ...] = ()  # slots that are empty afterwards


def actions(plan: Plan, group: Callable[[Transfer], Any]) -> tuple[Action, ...]:
    """Return all actions of a plan in its order. Transfers of one group between two kernels are one action."""
    steps: list[Action] = []
    moves: dict[Any, int] = {}  # since the last kernel: group to the place in steps
    for number, instruction in enumerate(plan.instructions):
        match instruction:
            case Run(submesh, kernel=kernel, ins=ins, outs=outs):
                steps.append(Action(len(steps), (submesh,), kernel, ins, outs, (number,)))
                moves.clear()
            case Send(transfer=index):
                transfer = plan.transfers[index]
                at = moves.setdefault(group(transfer), len(steps))
                if at == len(steps):
                    steps.append(Action(at, (transfer.source, transfer.target), None, (), (), ()))
                ins, outs = steps[at].ins + transfer.ins, steps[at].outs + transfer.outs
                steps[at] = replace(steps[at], ins=ins, outs=outs, instructions=(*steps[at].instructions, number))
            case Free(ins=emptied):
                steps[-1] = replace(steps[-1], frees=steps[-1].frees + emptied)
    return tuple(steps)


def processes(plan: Plan, owner: Owner = owner) -> tuple[frozenset[int], ...]:
    """Return the processes of each submesh: those with a device of it."""
    return tuple(frozenset(map(owner, mesh.devices.flat)) for mesh in plan.submeshes)


def all_actions(plan: Plan, owner: Owner = owner) -> tuple[Action, ...]:
    """Return all actions; transfers between two kernels are one, with several processes one a pair of submeshes."""
    several = len(frozenset().union(*processes(plan, owner))) > 1
    return actions(plan, lambda transfer: (transfer.source, transfer.target) if several else ())


def project(plan: Plan, process: int, owner: Owner = owner, everyone: bool = False) -> tuple[Action, ...]:
    """Return the actions of one process: kernels of its submeshes, and moves to or from them, or of ``everyone``."""
    local = {submesh for submesh, owners in enumerate(processes(plan, owner)) if process in owners}
    steps: list[Action] = []
    for action in all_actions(plan, owner):
        frees = tuple(slot for slot in action.frees if plan.slots[slot].submesh in local)
        if not local.isdisjoint(action.submeshes) or (everyone and action.kernel is None):
            steps.append(replace(action, frees=frees))
        elif frees:  # of what an earlier action of this process read or made
            steps[-1] = replace(steps[-1], frees=steps[-1].frees + frees)
    return tuple(steps)


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of one of the arrays of a call. It is compared by identity, so that a run can look it up."""

    array: int
    copy: Copy


@dataclass(frozen=True)
class ProcessTransfer:
    """The pieces that go from one process to another, or stay within one, in one call."""

    source: int
    target: int
    pieces: tuple[Piece, ...]


def process_transfers(reshardings: Sequence[Resharding], owner: Owner = owner) -> tuple[ProcessTransfer, ...]:
    """Return the transfers of a call, in the same order in all processes."""
    groups = group(
        ((owner(c.source), owner(c.target)), Piece(n, c)) for n, r in enumerate(reshardings) for c in r.copies
    )
    return tuple(ProcessTransfer(*ends, tuple(pieces)) for ends, pieces in sorted(groups.items()))


def by_devices(transfer: ProcessTransfer) -> list[tuple[jax.Device, jax.Device, tuple[Piece, ...]]]:
    """Group the pieces of a transfer by pairs of source and target devices."""

    groups = group(((piece.copy.source, piece.copy.target), piece) for piece in transfer.pieces)
    return [(*ends, tuple(groups[ends])) for ends in sorted(groups, key=lambda ends: (ends[0].id, ends[1].id))]
