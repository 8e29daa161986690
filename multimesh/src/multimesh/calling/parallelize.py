"""``parallelize``: a compiled function, and functions that make its arguments in the derived layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from multimesh.calling.aot import Compiled
from multimesh.calling.jitted import Jitted
from multimesh.core import _compat, checks
from multimesh.core.grouping import group
from multimesh.errors import MultiMeshError, UsageError
from multimesh.marking import contexts
from multimesh.processes import arrays
from multimesh.processes.agree import several
from multimesh.processes.arrays import is_here

Make = Callable[[], Any]


def parallelize(
    fn: Callable[..., Any],
    *,
    init_params: Make,
    get_input_batch: Make | None = None,
    initial_batch: Any = None,
    devices: Any = None,
) -> tuple[Jitted, Make] | tuple[Jitted, Make, Make]:
    """Compile ``fn(params, batch)``, and place parameters and batch in the layouts that its constraints derive.

    Every parameter is made on the submesh of its task. The sharding constraints there give its layout (see
    `autoshard`). No device ever holds more than its shard.

    Parameters
    ----------
    fn
        A function of parameters and a batch, with tasks. Its constraints name logical axes.
    init_params
        A function without arguments that returns the parameters, in no layout. Its JAX computations are compiled once
        for each submesh, with the parameters of that submesh only.
    get_input_batch
        A function without arguments that returns a batch. If it returns NumPy arrays, it is called for every batch, and
        the arrays are sent to the devices that read them.
    initial_batch
        A batch, or a pytree of ``jax.ShapeDtypeStruct``, instead. Leaves with a ``NamedSharding`` keep it.
    devices
        The devices that tasks may use, in any nesting; by default all.

    Returns
    -------
    fn, init_params, get_input_batch
        ``fn`` as a `jit` under ``autoshard``, already compiled; then functions without arguments, whose results lie
        where ``fn`` reads them. With ``initial_batch`` only the first two. Under `ignore_transforms` the functions as
        given.

    Raises
    ------
    UsageError
        If arguments do not fit together.
    MultiMeshError
        If nothing in ``fn`` is a task, or it can't be partitioned.

    Examples
    --------
    >>> step, init, get_batch = mm.parallelize(step, init_params=init, get_input_batch=load)  # doctest: +SKIP
    >>> params = init()
    >>> loss = step(params, get_batch())
    """
    for name, value in (("the first argument", fn), ("init_params", init_params), ("get_input_batch", get_input_batch)):
        if value is not None and not callable(value):
            raise UsageError(f"parallelize: {name} must be callable, got {type(value).__name__}")
    if (get_input_batch is None) == (initial_batch is None):
        raise UsageError("parallelize: give either get_input_batch= or initial_batch=, not both or neither")
    jitted = Jitted(fn, devices=devices, autoshard=True)
    if contexts.ignoring():
        return (jitted, init_params) if get_input_batch is None else (jitted, init_params, get_input_batch)
    params = _Initializer(init_params, "init_params")
    batch = _Initializer(get_input_batch, "get_input_batch", fresh=True) if get_input_batch is not None else None
    shapes = params.shapes, initial_batch if batch is None else batch.shapes
    name = getattr(fn, "__name__", type(fn).__name__)
    if why := checks.misfit(fn, None, None):
        raise UsageError(f"parallelize: {name} must take parameters and a batch: {why}")
    compiled = jitted.prepare(*shapes)
    if not isinstance(compiled, Compiled):
        raise MultiMeshError(
            f"parallelize: nothing in {name} is a task, so there are no submeshes to lay its arguments out on; "
            "wrap parts of it in multimesh.task"
        )
    default = NamedSharding(compiled.plan.submeshes[0], jax.sharding.PartitionSpec())
    placed = tuple(sharding or default for sharding in compiled.lowered.input_shardings)
    count = len(jax.tree.leaves(params.shapes))
    make_params = functools.partial(params.make, placed[:count])
    return (jitted, make_params) if batch is None else (jitted, make_params, lambda: batch.make(placed[count:]))


class _Initializer:
    """A function without arguments, traced once; ``shapes`` is the tree of its results.

    Results that it holds and does not compute with JAX (NumPy arrays) are sent. If it computes none, or if it must give
    ``fresh`` ones, it is called each time.
    """

    def __init__(self, fn: Make, name: str, *, fresh: bool = False):
        self._fn, self._name = fn, name
        if why := checks.misfit(fn):
            raise UsageError(f"parallelize: {name} must be a function without arguments: {why}")
        try:
            closed, self.shapes = jax.make_jaxpr(fn, return_shape=True)()
        except TypeError as error:
            if "valid JAX type" not in str(error):
                raise
            raise UsageError(f"parallelize: {name} must return a pytree of arrays: {error}") from None
        constants = _compat.constant_results(closed)
        self._closed = None if len(constants) == len(closed.out_avals) or (fresh and constants) else closed

    def make(self, shardings: tuple[NamedSharding, ...]) -> Any:
        """Call it, and place every leaf in its sharding."""
        tree = jax.tree.structure(self.shapes)
        if self._closed is None:
            values, layouts = self._fn(), jax.tree.unflatten(tree, shardings)
            if jax.tree.structure(values) != tree or _types(values) != _types(self.shapes):
                raise UsageError(f"parallelize: {self._name} now returns other shapes or types than at first")
            return jax.tree.map(arrays.place, values, layouts) if several() else jax.device_put(values, layouts)
        pairs = zip(jax.tree.leaves(self.shapes), shardings, strict=True)
        leaves = [None if is_here(sharding.device_set) else arrays.absent(shape, sharding) for shape, sharding in pairs]
        for i, constant in _compat.constant_results(self._closed).items():
            leaves[i] = arrays.place(constant, shardings[i])
        for maker, positions in self._makers(shardings):
            for i, leaf in zip(positions, maker(), strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(tree, leaves)

    @functools.cache  # noqa: B019 - lives as long as the functions that `parallelize` returns
    def _makers(self, shardings: tuple[NamedSharding, ...]) -> tuple[tuple[Any, tuple[int, ...]], ...]:
        return tuple(compile_initializers(self._closed, shardings))


def compile_initializers(closed: Any, shardings: Sequence[NamedSharding]) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Compile a function for each submesh of this process, and yield it with the positions of the results it makes."""
    constants = _compat.constant_results(closed)
    local = ((s.mesh, i) for i, s in enumerate(shardings) if i not in constants and is_here(s.device_set))
    for positions in group(local).values():
        maker = jax.jit(_compat.part(closed, positions), out_shardings=[shardings[i] for i in positions])
        yield maker.lower().compile(), tuple(positions)


def _types(tree: Any) -> list[Any]:
    return [(np.shape(x), jax.dtypes.result_type(x)) for x in jax.tree.leaves(tree)]
