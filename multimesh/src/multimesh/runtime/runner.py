"""Execution of a compiled plan: one pass over a flat list of calls, no decisions left to make."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh.core import _compat
from multimesh.core.submesh import describe
from multimesh.errors import UsageError
from multimesh.runtime.actions import Action, project
from multimesh.runtime.compile import CompiledPlan, first_invalid
from multimesh.runtime.resharding import Call, move_arguments, mover
from multimesh.stacked.row_blocks import gather, join_blocks, numbers, split_array

Calls = tuple[tuple[Call, tuple[int, ...], tuple[int, ...], tuple[int, ...], Action], ...]
"""Functions to call in order, each with the slots that it reads, writes and empties, and its action."""

Observer = Callable[[Action, Call], Call]
"""Wraps the function of an action; the wrapper may note start and end."""


def watch_calls(calls: Calls, observer: Observer) -> Calls:
    """Return calls whose functions an observer has wrapped."""
    return tuple((observer(action, call), ins, outs, frees, action) for call, ins, outs, frees, action in calls)


class Runner:
    """The execution of a compiled plan in one process.

    All state of a call is local to it: threads may share a runner, and an exception in the middle leaves nothing
    behind but donated arguments that were already consumed.
    """

    _everyone = False  # whether this process takes part in moves between others

    def __init__(self, compiled: CompiledPlan, names: Sequence[str]):
        self.compiled = compiled
        self._names = names
        self._moved: dict[int, int] = {}  # argument to the calls that moved it
        plan = compiled.plan
        self._inputs = tuple((arg, slot, plan.layouts[slot]) for arg, slot in plan.inputs)
        self.blank: list[Any] = [None] * len(plan.slots)  # slots before a call: only constants
        layouts = [plan.layouts[slot] for _, slot in plan.constants]
        # Copied as they are now: on CPUs jax.device_put may go on using NumPy's memory.
        arrays = [array.copy() if isinstance(array, np.ndarray) else array for array, _ in plan.constants]
        placed = self._put(arrays, layouts)
        for (_, slot), array in zip(plan.constants, placed, strict=True):
            self.blank[slot] = array
        self._outputs = tuple((k, jnp.array(value) if k == "literal" else value) for k, value in plan.outputs)
        self.calls = self.bound(project(plan, jax.process_index(), everyone=self._everyone))
        inputs = {slot for _, slot in plan.inputs}
        self._donated = inputs.intersection(slot for run in plan.runs for slot in plan.donated_by(run))
        self._aliases = _aliases(compiled, self._donated)
        self._stacks = plan.stacks
        self._cuts = self._block_specs() if plan.stacks else {}

    def __call__(self, args: Sequence[Any], moved: Mapping[int, NamedSharding] = MappingProxyType({})) -> list[Any]:
        """Run on flat arguments and return flat results, those in ``moved`` with the layout given there.

        It is an error if a donated argument and another one are the same buffer.
        """
        stacked = args
        try:
            args = self.in_blocks(args)
            env = self.staged(args)
            if self._aliases:
                self._check_buffers(env, args)
        except RuntimeError:
            blocks = numbers(len(stacked), self._stacks.arguments)
            self._refuse_deleted((blocks[n][0], x) for n, x in enumerate(stacked))
            raise
        self.run(env, self.calls)
        try:
            results = [
                env[value] if kind == "slot" else copy_buffer(args[value] if kind == "arg" else value)
                for kind, value in self._outputs
            ]
        except RuntimeError:
            self._refuse_deleted((arg, args[arg]) for kind, arg in self._outputs if kind == "arg")
            raise
        if self._aliases:
            _results.update((id(x), x) for x in results)
        for position, layout in moved.items():
            results[position] = self._moved_to(len(self.blank) + position, results[position], layout)
        return results if not self._stacks else self._join_stacks(results, stacked, args)

    def in_blocks(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of a call with the blocks of stacks in their place."""
        if not self._cuts:
            return args
        blocks: list[Any] = []
        for n, x in enumerate(args):
            if n in self._cuts:
                move = functools.partial(self._moved_to, len(self.blank) + len(self._outputs) + n)
                blocks += split_array(x, self._stacks.arguments[n], self._cuts[n], move)
            else:
                blocks.append(x)
        return blocks

    def _block_specs(self) -> dict[int, PartitionSpec]:
        """Return the spec of the blocks of each argument that is a stack."""
        plan = self.compiled.plan
        slots = dict(reversed(plan.inputs))
        count = len(self._names) - sum(len(s.meshes) - 1 for s in plan.stacks.arguments.values())
        specs: dict[int, PartitionSpec] = {}
        for n, at in enumerate(numbers(count, plan.stacks.arguments)):
            if n in plan.stacks.arguments:
                first = next((slots[leaf] for leaf in at if leaf in slots), None)
                specs[n] = PartitionSpec() if first is None else plan.layouts[first].spec
        return specs

    def _join_stacks(self, results: list[Any], stacked: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Return the results with the array of each stack in the place of its blocks."""
        stacks = self._stacks.results
        count = len(results) - sum(len(s.meshes) - 1 for s in stacks.values())
        joined = list(gather(results, count, stacks, join_blocks))
        if self._aliases:
            _results.update((id(x), x) for x in joined)
        return joined

    def run(self, env: list[Any], calls: Calls) -> None:
        """Make the calls of a plan in order. ``env`` has the arrays of all slots."""
        with _compat.explicit_transfers():
            for call, ins, outs, frees, action in calls:
                try:
                    results = call(*[env[i] for i in ins])
                except Exception as error:
                    kind = _compat.invalid_value(error)
                    if kind is None or action.kernel is None:
                        self._refuse_deleted((arg, env[slot]) for arg, slot, _ in self._inputs if slot in ins)
                        raise
                    raise self._invalid(action.kernel, [env[i] for i in ins], kind) from None
                for slot, array in zip(outs, results):  # noqa: B905 - a process has no results of what it only sends
                    env[slot] = array
                del results
                for slot in frees:
                    env[slot] = None

    def bound(self, actions: Iterable[Action]) -> Calls:
        """Return the call of a function for each action of this process."""
        move, kernels = self._mover, self.compiled.executables
        return tuple((move(a) if a.kernel is None else kernels[a.kernel], a.ins, a.outs, a.frees, a) for a in actions)

    def _put(self, arrays: Sequence[Any], layouts: Sequence[NamedSharding]) -> Sequence[Any]:
        return jax.device_put(list(arrays), list(layouts))

    def _moved_to(self, number: int, x: Any, layout: NamedSharding) -> Any:
        """Return an array of the caller, or for the caller, with a layout. ``number`` stands for its place in a call.

        Those of arguments are their slots; then come results, and arguments that are stacks.
        """
        return jax.device_put(x, layout)

    def _place(self, inputs: Sequence[tuple[int, int, NamedSharding]], args: Sequence[Any]) -> Sequence[Any]:
        """Return arguments with the layouts of these inputs: argument, slot and layout."""
        return move_arguments([args[arg] for arg, _, _ in inputs], [layout for _, _, layout in inputs])

    def _mover(self, action: Action) -> Call:
        sources, targets = ([self.compiled.plan.layouts[slot] for slot in slots] for slots in (action.ins, action.outs))
        return mover(sources, targets, [self.compiled.plan.slots[slot] for slot in action.ins])

    def _check_buffers(self, env: Sequence[Any], args: Sequence[Any]) -> None:
        """Refuse a donated buffer that two arguments share: XLA refuses it on one device, and aborts on several.

        Asking an array for its buffer takes as long as a dispatch. Results of runners have a buffer each: among them
        it is enough to look for an array that is given twice. XLA never writes to the memory of NumPy.
        """
        for inputs, shards in self._aliases:
            arrays = [(arg, slot, env[slot]) for arg, slot in inputs if isinstance(args[arg], jax.Array)]
            unique = all(_results.get(id(x)) is x for _, _, x in arrays)
            owners: dict[Any, tuple[int, bool]] = {}
            for arg, slot, x in arrays:
                donated = slot in self._donated
                buffers = ((s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards[shards])
                for buffer in [id(x)] if unique else buffers:
                    other, also = owners.setdefault(buffer, (arg, donated))
                    if other == arg or not (donated or also):
                        continue
                    raise UsageError(
                        f"{self._names[other]} and {self._names[arg]} are the same buffer, and one of them is donated; "
                        "give one of them as a copy: jnp.copy(x)"
                    )

    def _refuse_deleted(self, args: Iterable[tuple[int, Any]]) -> None:
        """Refuse an argument, given with its number, that has no buffer any more."""
        for number, x in args:
            if isinstance(x, jax.Array) and x.is_deleted():
                raise UsageError(
                    f"{self._names[number]} was donated to an earlier call (donate_argnums=) or deleted, and has no "
                    "data any more; use what that call returned in its place, or donate a copy: jnp.copy(x)"
                ) from None

    def _invalid(self, number: int, args: Sequence[Any], kind: str) -> FloatingPointError:
        """Return the error of ``jax_debug_nans`` or ``jax_debug_infs`` for a kernel, with task and the user's line."""
        kernel = self.compiled.plan.kernels[number]
        with jax.debug_nans(False), jax.debug_infs(False):
            op = first_invalid(kernel, self.compiled.plan, args, {"nan": jnp.isnan, "inf": jnp.isinf}[kind])
        if op is None:
            return FloatingPointError(
                f"invalid value ({kind}) encountered in kernel {kernel.name!r}; for the operation and its line run "
                "without donate_argnums"
            )
        task = f"task {op.task.name!r}" if op.task else f"an operation outside tasks (kernel {kernel.name!r})"
        line = _compat.user_line(op.source) or "a line that JAX did not record"
        return FloatingPointError(f"{line}: {task}: invalid value ({kind}) encountered in {op.prim.name}")

    def staged(self, args: Sequence[Any]) -> list[Any]:
        """Return the arrays of all slots before a call: arguments, moved to their layouts, and constants."""
        env = list(self.blank)
        moved: list[tuple[int, int, NamedSharding]] = []
        for entry in self._inputs:
            arg, slot, layout = entry
            x = args[arg]
            sharding = getattr(x, "sharding", None)
            if sharding is layout or sharding == layout:
                env[slot] = x
            else:
                moved.append(entry)
        if moved:
            for (_, slot, _), array in zip(moved, self._place(moved, args), strict=True):
                env[slot] = array
            for arg in dict.fromkeys(arg for arg, _, _ in moved if self._moved.get(arg, 0) < 2):
                self._note_move(arg, args[arg])
        return env

    def _note_move(self, arg: int, x: Any) -> None:
        """Warn once, at the second call, of an argument that the caller placed where no task reads it."""
        if not is_placed(x) or self._names[arg].startswith("argument "):
            return  # without a name it is one of `transforms`, which may lie anywhere
        uses = [layout for number, _, layout in self._inputs if number == arg]
        if any(x.sharding.is_equivalent_to(layout, x.ndim) for layout in uses):
            return
        self._moved[arg] = self._moved.get(arg, 0) + 1
        if self._moved[arg] == 2:
            places = " and ".join(map(_where, uses))
            _compat.warn_at(
                _compat.caller_line(),
                f"{self._names[arg]} ({x.nbytes:,} bytes) lies on {_where(x.sharding)} "
                f"and is moved to {places} in every call; place it there once, with jax.device_put",
            )


def is_placed(x: Any) -> bool:
    """Return whether the caller placed a value on devices."""
    return isinstance(x, jax.Array) and x.committed


def _where(sharding: jax.sharding.Sharding) -> str:
    """Short text of a layout: its mesh and spec, or its devices; and its memory, if that is not the devices' own."""
    default = next(iter(sharding.device_set)).default_memory().kind
    memory = f" in {sharding.memory_kind}" if sharding.memory_kind not in (None, default) else ""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return f"{describe(sharding.mesh)} as {sharding.spec}{memory}"
    ids = sorted(device.id for device in sharding.device_set)
    return f"device{'s' * (len(ids) > 1)} {','.join(map(str, ids))}{memory}"


_copy = jax.jit(lambda x: x)  # every result has a buffer of its own


def copy_buffer(x: Any) -> Any:
    """Return a value with a buffer of its own, if it has any in this process."""
    remote = isinstance(x, jax.Array) and not x.is_fully_addressable and not x.sharding.addressable_devices
    return x if remote else _copy(x)


_Alike = tuple[tuple[int, int], ...]


def _aliases(compiled: CompiledPlan, donated: set[int]) -> tuple[tuple[_Alike, slice], ...]:
    """Return groups of inputs of a type, as (argument, slot), that may share a donated buffer, and shards to compare.

    If they are on the same devices, their first shards are enough.
    """
    kinds: dict[Any, dict[tuple[jax.Device, ...], list[tuple[int, int]]]] = {}
    for arg, slot in compiled.plan.inputs:
        value, layout = compiled.plan.slots[slot], compiled.plan.layouts[slot]
        if value.nbytes and layout.addressable_devices:
            kind = layout.shard_shape(value.shape), value.dtype, layout.memory_kind
            devices = tuple(layout.devices_indices_map(value.shape))
            kinds.setdefault(kind, {}).setdefault(devices, []).append((arg, slot))
    groups: list[tuple[_Alike, slice]] = []
    for on in kinds.values():
        if sum(map(len, on)) == len(frozenset().union(*on)):
            groups += [(tuple(pairs), slice(1)) for pairs in on.values()]
        else:
            groups.append((tuple(pair for pairs in on.values() for pair in pairs), slice(None)))
    several = (group for group in groups if len({arg for arg, _ in group[0]}) > 1)
    return tuple(group for group in several if any(slot in donated for _, slot in group[0]))


# Results of runners by identity; they may come back as arguments.
_results: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
