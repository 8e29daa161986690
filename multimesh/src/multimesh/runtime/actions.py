"""The actions of a plan, those that one process takes part in, and what they send from one process to another.

All processes have the same plan, and each runs the kernels of its submeshes. Actions are grouped and numbered on the
whole plan: processes that grouped transfers differently would wait for each other for ever. All processes work out
alone, with the same result, which pieces of arrays go where.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from multimesh.core.grouping import group
from multimesh.plan.instructions import Free, Run, Send, Transfer
from multimesh.plan.plan import Plan
from multimesh.runtime.transport import Piece, Way

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
    found: list[Action] = []
    moves: dict[Any, int] = {}  # since the last kernel: group to the place in found
    for number, instruction in enumerate(plan.instructions):
        match instruction:
            case Run(submesh, kernel=kernel, ins=ins, outs=outs):
                found.append(Action(len(found), (submesh,), kernel, ins, outs, (number,)))
                moves.clear()
            case Send(transfer=index):
                transfer = plan.transfers[index]
                at = moves.setdefault(group(transfer), len(found))
                if at == len(found):
                    found.append(Action(at, (transfer.source, transfer.target), None, (), (), ()))
                ins, outs = found[at].ins + transfer.ins, found[at].outs + transfer.outs
                found[at] = replace(found[at], ins=ins, outs=outs, instructions=(*found[at].instructions, number))
            case Free(ins=emptied):
                found[-1] = replace(found[-1], frees=found[-1].frees + emptied)
    return tuple(found)


def processes(plan: Plan, owner: Owner = owner) -> tuple[frozenset[int], ...]:
    """Return the processes of each submesh: those with a device of it."""
    return tuple(frozenset(map(owner, mesh.devices.flat)) for mesh in plan.submeshes)


def whole(plan: Plan, owner: Owner = owner) -> tuple[Action, ...]:
    """Return all actions of a plan.

    Transfers between two kernels are one; with several processes, one a submesh pair.
    """
    several = len(frozenset().union(*processes(plan, owner))) > 1
    return actions(plan, lambda transfer: (transfer.source, transfer.target) if several else ())


def project(plan: Plan, process: int, owner: Owner = owner, everyone: bool = False) -> tuple[Action, ...]:
    """Return the actions of one process: kernels of its submeshes and moves to or from them; with ``everyone`` all
    moves.
    """
    mine = {submesh for submesh, found in enumerate(processes(plan, owner)) if process in found}
    found: list[Action] = []
    for action in whole(plan, owner):
        frees = tuple(slot for slot in action.frees if plan.slots[slot].submesh in mine)
        if not mine.isdisjoint(action.submeshes) or (everyone and action.kernel is None):
            found.append(replace(action, frees=frees))
        elif frees:  # of what an earlier action of this process read or made
            found[-1] = replace(found[-1], frees=found[-1].frees + frees)
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Parcel:
    """A piece of one of the arrays of a call. It is compared by identity, so that a run can look it up."""

    array: int
    piece: Piece


@dataclass(frozen=True)
class Lane:
    """The parcels that go from one process to another, or stay within one, in one call."""

    source: int
    target: int
    parcels: tuple[Parcel, ...]


def lanes(ways: Sequence[Way], owner: Owner = owner) -> tuple[Lane, ...]:
    """Return the lanes of a call, in the same order in all processes."""
    found = group(((owner(p.source), owner(p.target)), Parcel(n, p)) for n, way in enumerate(ways) for p in way.pieces)
    return tuple(Lane(*ends, tuple(each)) for ends, each in sorted(found.items()))


def by_devices(lane: Lane) -> list[tuple[jax.Device, jax.Device, tuple[Parcel, ...]]]:
    """Group the parcels of a lane by pairs of source and target devices."""

    def pair(parcel: Parcel) -> tuple[Any, Any]:
        return parcel.piece.source.id, parcel.piece.target.id

    groups = (tuple(group) for _, group in itertools.groupby(sorted(lane.parcels, key=pair), pair))
    return [(group[0].piece.source, group[0].piece.target, group) for group in groups]
