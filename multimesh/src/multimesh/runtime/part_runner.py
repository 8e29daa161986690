"""Execution of one process's part of a compiled plan."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from multimesh.plan import fingerprint
from multimesh.processes import agree
from multimesh.processes.arrays import absent, is_here, is_key, place
from multimesh.processes.liveness import watch
from multimesh.runtime.actions import Action, owner, processes
from multimesh.runtime.between import exchange
from multimesh.runtime.compile import CompiledPlan
from multimesh.runtime.resharding import Call, move_arguments
from multimesh.runtime.runner import Runner, is_placed


class PartRunner(Runner):
    """The execution of one process's part of a compiled plan, which several processes compare before it runs.

    Threads that call wait for each other, as all processes must run their plans in one order.
    """

    def __init__(self, compiled: CompiledPlan, names: Sequence[str], name: str, number: int | None):
        """Prepare a run. All processes know the plan by ``number``, which is None for a plan within one process."""
        plan, self._name = compiled.plan, name
        self._owners = processes(plan)
        self._partners = frozenset[int]().union(*self._owners)
        self._exchange: exchange.Exchange | None = None
        donated = {slot for run in plan.runs for slot in plan.donated_by(run)}
        visible = {slot for _, slot in plan.inputs} | {value for kind, value in plan.outputs if kind == "slot"}
        self._lent = frozenset(donated | visible)  # a later kernel, or one of the next call, may reuse their buffers
        self._shown = frozenset(visible)
        self._known: dict[Any, Call] = {}
        self._sources: dict[tuple[Any, ...], bool] = {}  # layouts of arguments to whether another process takes part
        if number is not None:
            self._exchange = exchange.Exchange(number, plan.settings["options"].transport)
            self._everyone = self._exchange.transport.everyone
        super().__init__(compiled, names)
        for slot in visible:
            if not is_here(plan.layouts[slot].device_set):
                self.blank[slot] = absent(plan.slots[slot], plan.layouts[slot])
        if self._exchange is not None:
            self._exchange.start()

    @property
    def _shared(self) -> exchange.Exchange:
        """The exchange with other processes, which agree on a plan within one process when they first take part."""
        if self._exchange is None:
            plan = self.compiled.plan
            number = agree.agree_on_plan(self._name, fingerprint.Lines(plan))
            self._exchange = exchange.Exchange(number, plan.settings["options"].transport)
        return self._exchange

    def __call__(self, args: Sequence[Any], moved: Mapping[int, NamedSharding] = MappingProxyType({})) -> list[Any]:
        """See `Runner`."""
        with exchange.turn:
            if self._exchange is None:  # others have no part in it
                return super().__call__(args, moved)
            watch.begin_step(self._partners)
            results = super().__call__(args, moved)
            watch.count_step()
            return results

    def _put(self, arrays: Sequence[Any], layouts: Sequence[NamedSharding]) -> Sequence[Any]:
        return [place(x, layout) for x, layout in zip(arrays, layouts, strict=True)]

    def _mover(self, action: Action) -> Call:
        plan, layouts = self.compiled.plan, self.compiled.plan.layouts
        if len(frozenset().union(*(self._owners[submesh] for submesh in action.submeshes))) == 1:
            return super()._mover(action) if is_here(layouts[action.ins[0]].device_set) else lambda *_: ()
        sources, targets = ([layouts[slot] for slot in slots] for slots in (action.ins, action.outs))
        avals, lent = [plan.slots[slot] for slot in action.ins], [slot in self._lent for slot in action.ins]
        shown = [slot in self._shown for slot in action.outs]
        return self._shared.mover(action.number, sources, targets, avals, lent, shown)

    def staged(self, args: Sequence[Any]) -> list[Any]:
        """See `Runner.staged`."""
        sources = tuple(x.sharding if is_placed(x) else None for x in args)
        if sources not in self._sources:
            self._sources[sources] = self._compare(args, sources)
        if self._sources[sources]:
            self._shared.begin()
        return super().staged(args)

    def _place(self, inputs: Sequence[tuple[int, int, NamedSharding]], args: Sequence[Any]) -> Sequence[Any]:
        local = [entry for entry in inputs if not is_placed(args[entry[0]]) and entry[2].is_fully_addressable]
        arrays = jax.device_put([args[arg] for arg, _, _ in local], [layout for _, _, layout in local])
        placed = {slot: array for (_, slot, _), array in zip(local, arrays, strict=True)}
        return [
            placed[slot] if slot in placed else self._moved_to(slot, args[arg], layout) for arg, slot, layout in inputs
        ]

    def _compare(self, args: Sequence[Any], sources: tuple[Any, ...]) -> bool:
        """Return whether several processes take part in a call; they then compare places and values of arguments."""
        owners = frozenset().union(*self._owners, *(map(owner, s.device_set) for s in sources if s is not None))
        if len(owners) == 1:
            return False
        lines = [
            f"{name} {_sum_values(x) if source is None else fingerprint.text(source)}"
            for name, x, source in zip(self._names, args, sources, strict=True)
        ]
        number = sum(self._sources.values())
        agree.agree_on(f"arguments of plan {self._shared.plan}, {number}", lines)
        return True

    def _moved_to(self, number: int, x: Any, layout: NamedSharding) -> Any:
        """See `Runner`. A value without a place is the same in all processes."""
        source = x.sharding if is_placed(x) else None
        if source == layout:
            return x
        if source is None:
            return place(x, layout)
        key = (number, source, layout)
        if key not in self._known:
            self._known[key] = self._mover_to(number, x, source, layout)
        (result,) = self._known[key](x)
        return absent(x, layout) if result is None else result

    def _mover_to(self, number: int, x: Any, source: jax.sharding.Sharding, layout: NamedSharding) -> Call:
        """Return a function that moves a caller's value; if one process has all devices, no other takes part."""
        if len({owner(device) for device in source.device_set | layout.device_set}) == 1:
            return (lambda x: move_arguments([x], [layout])) if is_here(layout.device_set) else lambda _: (None,)
        first = len(self.compiled.plan.instructions)  # after the numbers of all actions
        move = self._shared.mover(first + number, [source], [layout], [x], [True], [True])
        self._shared.start()
        return move


def _sum_values(x: Any) -> str:
    """Return a checksum of a value of the host, which must be the same in all processes."""
    data = np.ascontiguousarray(jax.random.key_data(x) if is_key(x) else x)
    return f"of the host, with values of checksum {zlib.crc32(data.reshape(-1).view(np.uint8)):08x}"
