"""Runs a compiled plan: one pass over a flat list of steps, no decisions left to make."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from multimesh import _compat, _executables
from multimesh.compiling import CompiledPlan, first_invalid
from multimesh.errors import UsageError
from multimesh.submesh import describe
from multimesh.transport import Transport


class Runner:
    """Executes a compiled plan in one process.

    All state of a call is local to it: threads may share a runner, and an exception in the middle leaves nothing
    behind but donated arguments that were already consumed.
    """

    def __init__(self, compiled: CompiledPlan, names: Sequence[str]):
        self.compiled = compiled
        self._names = names
        self._moved: dict[int, int] = {}  # argument to the calls that moved it
        plan = compiled.plan
        self._inputs = tuple((arg, slot, compiled.layouts[slot]) for arg, slot in plan.inputs)
        layouts = [compiled.layouts[slot] for _, slot in plan.constants]
        placed = jax.device_put([_fixed(array) for array, _ in plan.constants], layouts)
        self._blank: list[Any] = [None] * len(plan.slots)
        for (_, slot), array in zip(plan.constants, placed, strict=True):
            self._blank[slot] = array
        self._outputs = tuple((k, jnp.array(value) if k == "literal" else value) for k, value in plan.outputs)
        self._transport = Transport()
        self.steps = tuple(_steps(compiled, self._transport))
        self._donated = _donated(compiled)
        self._aliases = _aliases(compiled, self._donated)

    @property
    def constants(self) -> dict[int, Any]:
        """Slots that hold the same array in every call."""
        return {slot: array for slot, array in enumerate(self._blank) if array is not None}

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Run on flat arguments; returns flat results.

        Raises
        ------
        UsageError
            Where a donated argument and another one are the same buffer.
        """
        env = self._staged(args)
        if self._aliases:
            self._check_buffers(env)
        with _executables.explicit_transfers():
            for call, ins, outs, frees in self.steps:
                try:
                    results = call(*[env[i] for i in ins])
                except Exception as error:
                    kind = _compat.invalid_value(error)
                    if kind is None:
                        raise
                    raise self._invalid(call, [env[i] for i in ins], kind) from None
                for slot, array in zip(outs, results):  # noqa: B905 - the lengths were fixed when the plan was made
                    env[slot] = array
                del results
                for slot in frees:
                    env[slot] = None
        results = [
            env[value] if kind == "slot" else _copy(args[value] if kind == "arg" else value)
            for kind, value in self._outputs
        ]
        if self._aliases:
            _results.update((id(x), x) for x in results)
        return results

    def _check_buffers(self, env: Sequence[Any]) -> None:
        """XLA would refuse a donated buffer that is there twice on one device, and end the process on several.

        Asking an array for its buffer takes as long as a dispatch. Results of runners have a buffer each: where all
        arrays of a kind are such, only one that is given twice is looked for.
        """
        for alike in self._aliases:
            arrays = [env[slot] for _, slot in alike]
            own = all(_results.get(id(x)) is x for x in arrays)
            found: dict[int, tuple[int, bool]] = {}
            for (arg, slot), x in zip(alike, arrays, strict=True):
                donated = slot in self._donated
                buffer = id(x) if own else x.addressable_data(0).unsafe_buffer_pointer()
                other, also = found.setdefault(buffer, (arg, donated))
                if other != arg and (donated or also):
                    raise UsageError(
                        f"{self._names[other]} and {self._names[arg]} are the same buffer, and one of them is donated; "
                        "give one of them as a copy: jnp.copy(x)"
                    )

    def _invalid(self, program: Any, args: Sequence[Any], kind: str) -> FloatingPointError:
        """What ``jax_debug_nans`` and ``jax_debug_infs`` raise of a program, with the task and the user's line."""
        kernel = self.compiled.plan.kernels[self.compiled.programs.index(program)]
        with jax.debug_nans(False), jax.debug_infs(False):
            op = first_invalid(kernel, self.compiled.plan, args, {"nan": jnp.isnan, "inf": jnp.isinf}[kind])
        if op is None:
            return FloatingPointError(
                f"invalid value ({kind}) encountered in program {kernel.name!r}; for the operation and its line run "
                "without donate_argnums"
            )
        task = f"task {op.task.name!r}" if op.task else f"an operation outside tasks (program {kernel.name!r})"
        line = _compat.user_line(op.source)
        return FloatingPointError(f"{line}: {task}: invalid value ({kind}) encountered in {op.prim.name}")

    def _staged(self, args: Sequence[Any]) -> list[Any]:
        env = list(self._blank)
        moved: list[tuple[int, int, Any]] = []
        for each in self._inputs:
            arg, slot, layout = each
            x = args[arg]
            sharding = getattr(x, "sharding", None)
            if sharding is layout or sharding == layout:
                env[slot] = x
            else:
                moved.append(each)
        if moved:
            placed = self._transport.put([args[arg] for arg, _, _ in moved], [layout for _, _, layout in moved])
            for (_, slot, _), array in zip(moved, placed, strict=True):
                env[slot] = array
            for arg in dict.fromkeys(arg for arg, _, _ in moved if self._moved.get(arg, 0) < 2):
                self._note_move(arg, args[arg], [(env[s] is args[arg], at) for a, s, at in self._inputs if a == arg])
        return env

    def _note_move(self, arg: int, x: Any, uses: Sequence[tuple[bool, Any]]) -> None:
        """Warn once, at the second call that moves it, of an argument that somebody placed where no task reads it."""
        placed = isinstance(x, jax.Array) and x.committed
        if not placed or any(here for here, _ in uses) or self._names[arg].startswith("argument "):
            return  # without a name it is one of `transforms`, which may lie anywhere
        self._moved[arg] = self._moved.get(arg, 0) + 1
        if self._moved[arg] == 2:
            there = " and ".join(_where(layout) for _, layout in uses)
            warnings.warn(
                f"{_compat.caller_line()}: {self._names[arg]} ({x.nbytes:,} bytes) lies on {_where(x.sharding)} "
                f"and is moved to {there} in every call; place it there once, with jax.device_put",
                stacklevel=2,
            )


def _where(sharding: jax.sharding.Sharding) -> str:
    """Short text of a layout: its mesh and spec, or its devices."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return f"{describe(sharding.mesh)} as {sharding.spec}"
    ids = sorted(device.id for device in sharding.device_set)
    return f"device{'s' * (len(ids) > 1)} {','.join(map(str, ids))}"


def _fixed(array: Any) -> Any:
    """A captured array as it is now: on CPUs ``jax.device_put`` may keep to NumPy's memory."""
    return array.copy() if isinstance(array, np.ndarray) else array


_copy = jax.jit(lambda x: x)  # every result has a buffer of its own


def _donated(compiled: CompiledPlan) -> frozenset[int]:
    """Slots of arguments whose buffers a program may reuse."""
    plan = compiled.plan
    given = {slot for _, slot in plan.inputs}
    runs = (step for step in plan.instructions if step.kind == "RUN" and step.kernel is not None)
    return frozenset(given.intersection(step.ins[i] for step in runs for i in plan.donations.get(step.kernel or 0, ())))


def _aliases(compiled: CompiledPlan, donated: frozenset[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Inputs, as (argument, slot), that may be one buffer: of one type, in shards of one shape, one of them donated."""
    kinds: dict[Any, list[tuple[int, int]]] = {}
    for arg, slot in compiled.plan.inputs:
        meant, layout = compiled.plan.slots[slot], compiled.layouts[slot]
        if meant.nbytes and layout.addressable_devices:
            kind = layout.shard_shape(meant.shape), meant.dtype, layout.memory_kind
            kinds.setdefault(kind, []).append((arg, slot))
    several = (tuple(alike) for alike in kinds.values() if len({arg for arg, _ in alike}) > 1)
    return tuple(alike for alike in several if any(slot in donated for _, slot in alike))


# Results of runners that may come back as arguments, by identity.
_results: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

_Step = tuple[Callable[..., Sequence[Any]], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _steps(compiled: CompiledPlan, transport: Transport) -> list[_Step]:
    """(call, inputs, outputs, frees) of programs and transfers in order; transfers between two programs are one call.

    Within a process a SEND does all of a transfer.
    """
    plan = compiled.plan
    steps: list[list[Any]] = []
    for step in plan.instructions:
        if step.kind == "RUN" and step.kernel is not None:
            program = compiled.programs[step.kernel]
            steps.append([program, step.ins, step.outs, ()])
        elif step.kind == "SEND":
            transfer = plan.transfers[step.transfer or 0]
            if not steps or steps[-1][0] is not None:
                steps.append([None, (), (), ()])
            steps[-1][1] += transfer.ins
            steps[-1][2] += transfer.outs
        elif step.kind == "FREE":
            steps[-1][3] += step.ins
    return [(call or _transfer(compiled, transport, ins, outs), ins, outs, frees) for call, ins, outs, frees in steps]


def _transfer(
    compiled: CompiledPlan, transport: Transport, ins: Sequence[int], outs: Sequence[int]
) -> Callable[..., Sequence[Any]]:
    sources, targets = ([compiled.layouts[slot] for slot in slots] for slots in (ins, outs))
    return transport.mover(sources, targets, [compiled.plan.slots[slot] for slot in ins])
