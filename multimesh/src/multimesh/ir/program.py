"""The intermediate representation: frozen operations over single-assignment values.

A `Program` is what every pass takes and returns. Its items are `Op` (one primitive) and `Loop` (a microbatch loop
with a body of its own). ``str(program)`` is a readable dump, used by the tests and the documentation of the passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jax.sharding import Mesh, PartitionSpec

from multimesh.core import _compat
from multimesh.core.submesh import Placement
from multimesh.stacked.row_blocks import Stacks

_numbers = itertools.count()


class Value:
    """A single-assignment value; compared by identity."""

    __slots__ = ("aval", "number")

    def __init__(self, aval: Any):
        self.aval = aval
        self.number = next(_numbers)

    def __repr__(self) -> str:
        return f"%{self.number}"

    @property
    def nbytes(self) -> int:
        """Size of the whole (unsharded) array in bytes."""
        return _compat.nbytes(self.aval)


Atom = Value | Any  # a Value, or a jaxpr Literal


@dataclass(frozen=True, eq=False)
class Op:
    """One primitive, applied. ``mesh`` is None until the operation is placed; ``after`` orders without moving data.

    With ``again``, `jax.checkpoint` repeats it in a backward pass.
    """

    prim: Any
    params: dict[str, Any]
    ins: tuple[Atom, ...]
    outs: tuple[Value, ...]
    task: Placement | None = None
    mesh: Mesh | None = None
    backward: bool = False
    ctx: Any = None
    source: Any = None
    after: tuple[Value, ...] = ()
    effects: bool = False
    again: bool = False

    @property
    def reads(self) -> Iterator[Value]:
        """Values among the inputs."""
        return values(self.ins)

    @property
    def needs(self) -> Iterator[Value]:
        """Values that must exist before it runs, read or not."""
        return itertools.chain(self.reads, self.after)

    def __str__(self) -> str:
        where = f" @{self.task.name}" if self.task else f" @{self.mesh.devices.flat[0]}" if self.mesh else ""
        outs = ", ".join(f"{v}:{_short(v.aval)}" for v in self.outs)
        ins = " ".join(str(i) if isinstance(i, Value) else str(i.val) for i in self.ins)
        return f"{outs} = {self.prim.name} {ins}{where}{' [backward]' if self.backward else ''}"


@dataclass(frozen=True, eq=False)
class Sum:
    """A result of a loop: ``init`` plus the sum over microbatches of the body's ``leaf``.

    Gradients are such results, and those of ``reduce="sum"`` and ``"mean"`` (`Total`).
    With ``over``, both have a leading dimension more, a term for each device along these axes of the submesh.
    """

    out: Value
    init: Atom | None
    leaf: Atom
    over: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Carry:
    """A state that one iteration of a loop leaves to the next: ``init`` goes into the first, ``out`` is the last
    ``leaf``.

    Like a sum's, ``init`` may be a literal. It is None where no iteration reads the state.
    """

    out: Value
    init: Any
    leaf: Atom


@dataclass(frozen=True)
class LoopMark:
    """The arguments of a ``microbatch`` call: number, schedule, user's line, with a state or not, dtype of sums."""

    count: int
    schedule: Any
    where: str = ""
    carries: bool = False
    accumulate: Any = None


@dataclass(frozen=True, eq=False)
class Loop:
    """A microbatch loop. Its iterations are independent but for ``carries``."""

    mark: LoopMark
    uid: str
    ops: tuple[Op, ...]
    consts: dict[Value, Atom]  # body value to the value outside
    slices: dict[Value, Value]  # body value to the value outside of which iteration k reads row k
    sums: tuple[Sum, ...]
    stacks: dict[Value, Atom]  # value outside to the body value that it stacks
    linked: dict[Value, Value] = field(default_factory=dict)  # body value to that of an earlier loop, row by row
    carries: dict[Value, Carry] = field(default_factory=dict)  # by the body value that reads each
    backward: bool = False
    source: Any = None
    submeshes: tuple[Mesh, ...] = ()  # in the order of a microbatch

    @property
    def reads(self) -> Iterator[Value]:
        """Values outside that the loop reads."""
        inits = (*(s.init for s in self.sums), *(c.init for c in self.carries.values()))
        return values((*self.consts.values(), *self.slices.values(), *inits))

    needs = reads

    @property
    def outs(self) -> tuple[Value, ...]:
        """Values outside that the loop makes."""
        return (*(s.out for s in self.sums), *self.stacks, *(c.out for c in self.carries.values()))

    @property
    def leaves(self) -> tuple[Atom, ...]:
        """Body values that leave an iteration: summed, stacked, or carried to the next."""
        return (*(s.leaf for s in self.sums), *self.stacks.values(), *(c.leaf for c in self.carries.values()))

    def __str__(self) -> str:
        head = f"{', '.join(map(str, self.outs))} = loop x{self.mark.count} {self.mark.schedule}"
        constants = [f"{inner} <- {outer}" for inner, outer in self.consts.items() if isinstance(outer, Value)]
        cut = [f"{inner} <- {outer}[k]" for inner, outer in self.slices.items()]
        sums = [f"{s.out} += {s.leaf}" for s in self.sums] + [f"{o} = stack {i}" for o, i in self.stacks.items()]
        carries = [f"{inner} <- {c.init}, then {c.leaf}; {c.out} the last" for inner, c in self.carries.items()]
        lines = [*constants, *cut, *map(str, self.ops), *sums, *carries]
        return "\n".join([head, *(f"  {line}" for line in lines)])


Item = Op | Loop


@dataclass(frozen=True, eq=False)
class Program:
    """A whole traced function: inputs, captured constants, items in topological order, outputs.

    ``home`` is the submesh of what no task decides, and ``input_homes`` has the submeshes that inputs lie on. A placed
    program has ``homes``, the submesh of every value that an operation or a loop makes, and may have ``specs``: those
    of inputs on submeshes that constraints say. Of ``stacks``, inputs and outputs are the blocks; ``pinned`` has the
    submesh of each block of an input, and of the rows of it that are read elsewhere.
    """

    inputs: tuple[Value, ...]
    consts: dict[Value, Any]
    items: tuple[Item, ...]
    outputs: tuple[Atom, ...]
    home: Mesh | None = None
    input_homes: Mapping[Value, Mesh] = field(default_factory=dict)
    homes: Mapping[Value, Mesh] = field(default_factory=dict)
    specs: Mapping[tuple[Value, Mesh], PartitionSpec] = field(default_factory=dict)
    stacks: Stacks = field(default_factory=Stacks)
    pinned: Mapping[Value, Mesh] = field(default_factory=dict)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Its loops, in the order of their numbers."""
        return tuple(item for item in self.items if isinstance(item, Loop))

    @property
    def linked(self) -> set[Value]:
        """Body values of loops that a later loop reads, iteration by iteration."""
        return {v for loop in self.loops for v in loop.linked.values()}

    def each_loop(self, change: Callable[[Loop], Loop]) -> Program:
        """Return the program with ``change`` applied to every loop."""
        return replace(self, items=tuple(change(i) if isinstance(i, Loop) else i for i in self.items))

    def __str__(self) -> str:
        lines = [f"inputs {' '.join(f'{v}:{_short(v.aval)}' for v in self.inputs)}", *map(str, self.items)]
        return "\n".join([*lines, f"outputs {' '.join(map(str, self.outputs))}"])


def _short(aval: Any) -> str:
    return aval.str_short(short_dtypes=True) if hasattr(aval, "str_short") else str(aval)


def shape(atom: Atom) -> tuple[int, ...]:
    """Return the shape of a value or literal; () for a token or anything else without a shape."""
    return tuple(getattr(atom.aval, "shape", ()))


def nbytes(atom: Atom) -> float:
    """Return the bytes of a value or literal."""
    return float(_compat.nbytes(atom.aval))


def is_value(atom: Atom) -> bool:
    """Return whether an atom, of a program or a jaxpr, is computed or an argument, not a literal."""
    return not hasattr(atom, "val")


def values(atoms: Iterable[Atom]) -> Iterator[Value]:
    """Return the values among atoms, without literals."""
    return (a for a in atoms if isinstance(a, Value))


AnyItem = TypeVar("AnyItem", Op, Item)


def live(items: Iterable[AnyItem], results: Iterable[Atom]) -> list[AnyItem]:
    """Return the items that the wanted values need, and those with effects, in order: dead code is dropped."""
    needed = set(values(results))
    items_read: list[AnyItem] = []
    for item in reversed(list(items)):
        effects = item.effects if isinstance(item, Op) else any(op.effects for op in item.ops)
        if effects or any(o in needed for o in item.outs):
            items_read.append(item)
            needed.update(item.needs)
    items_read.reverse()
    return items_read


def all_ops(program: Program) -> Iterator[Op]:
    """Yield the operations of a program and of the bodies of its loops, in order."""
    for item in program.items:
        yield from item.ops if isinstance(item, Loop) else (item,)


def has_tasks(program: Program) -> bool:
    """Return whether any operation of the program is in a task."""
    return any(op.task is not None for op in all_ops(program))


def task_meshes(program: Program) -> tuple[Mesh, ...]:
    """Return the submeshes of the tasks of a program, in the order of their first forward use."""
    ops = sorted(all_ops(program), key=lambda op: op.backward)
    return tuple(dict.fromkeys(op.task.mesh for op in ops if op.task is not None))
