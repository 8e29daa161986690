"""MaxText's train step as a pipeline: its accumulation of gradients is the loop over microbatches. Also the forecast,
the dump and the timelines of the step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import Mesh

import multimesh
from multimesh_maxtext.errors import UnsupportedError
from multimesh_maxtext.handoff import TrainerConfig
from multimesh_maxtext.trainer.foresight import forecast_stages
from multimesh_maxtext.trainer.placement import write_placement
from multimesh_maxtext.trainer.processes import everywhere

PARAMETERS = "ga_params"
"""MaxText carries this through its loop, and no microbatch changes it."""

_STATE = "rest_state"
"""MaxText hands this from a microbatch to the next: keys of random number generators, and counts of their uses."""

_REDUCED = {
    *("te_moe_capacity_overflow", "te_moe_max_total_recv_tokens", "te_moe_recv_capacity_per_rank"),
    *("moe_required_rbf", "moe_max_load_ratio", "moe_max_load_ratio_mean"),
}
"""Results of which MaxText takes the largest, the least or the mean over the microbatches, not the sum."""

_REPEATS = 2
"""``--schedule auto`` measures so many runs of a step for the costs of its kernels."""

measured: multimesh.schedules.Auto | None = None
"""The schedule ``auto`` with the costs that were measured, for later traces of the step."""

_CALLS = ("jit", "checkpoint", "remat2")
_IDENTITIES = ("multimesh_leave", "copy", "sharding_constraint")  # the first is how values leave a task


class StepFunction:
    """A train or evaluation step, with those methods of a jitted function that MaxText calls."""

    def __init__(self, fn: Callable[..., Any], donate_argnums: Any, config: TrainerConfig) -> None:
        """Make it; one that trains donates its state."""
        global measured
        measured = None
        self.__wrapped__, self._config = fn, config
        self._first = self._trains = donate_argnums != ()
        self._jitted: Any = multimesh.jit(fn, donate_argnums=donate_argnums)

    def __call__(self, state: Any, batch: Any) -> Any:
        """Run. The first call compiles; it writes the placement, and the plan and timelines that flags ask for."""
        first, self._first = self._first, False
        config = self._config
        with multimesh.context(autoshard=True):
            if first and config.chosen:
                self._write(self._choose(state, batch))
            if first and config.dump:
                _dump(self._jitted.prepare(state, batch), Path(config.dump))
            if first and config.profile:
                _profile(self._jitted.prepare(state, batch), Path(config.profile), state, batch)
            result = self._jitted(state, batch)
        if first:
            write_placement(Path(config.placement), stepped=result[0])
        return (result[0], everywhere(result[1])) if self._trains else everywhere(result)

    def lower(self, state: Any, batch: Any) -> SimpleNamespace:
        """Leave the compilation, of which MaxText only prints the memory, to the first call. Without one end here."""
        config = self._config
        if not (config.forecast or config.dump_only):
            ahead = SimpleNamespace(memory_analysis=lambda: None)
            ahead.compile = lambda **_options: ahead
            return ahead
        with multimesh.context(autoshard=True):
            lowered = self._jitted.lower(state, batch)
            if config.chosen:
                self._write(lowered.plan.choices[0])
            if config.forecast:
                Path(config.forecast).write_text(json.dumps(forecast_stages(lowered, state, config)))
            else:
                _dump(lowered.compile(), Path(config.dump))
        sys.exit()

    def _choose(self, state: Any, batch: Any) -> Any:
        """Choose the order of ``--schedule auto``; measure the kernels first where a second copy of the state fits."""
        global measured
        compiled, limit = self._jitted.prepare(state, batch), self._config.limit
        (choice,) = compiled.plan.choices
        if limit and any(need.total + need.arguments > limit for need in compiled.lowered.memory_estimate()):
            print("schedule auto: a second copy of the state does not fit, so costs are estimated, not measured")
            return choice
        schedule = compiled.profile(state, batch, repeats=_REPEATS).schedule
        better = schedule.choose(*choice.shape)
        if better.taken.table == choice.taken.table:
            return better
        measured = schedule
        self._jitted.clear_cache()  # forgets the step, to make it with the other schedule
        return self._jitted.prepare(state, batch).plan.choices[0]

    def _write(self, choice: Any) -> None:
        Path(self._config.chosen).write_text(json.dumps({**choice.to_json(), "text": str(choice)}))


@jax.custom_vjp
def like_flash_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return arrays of the types of an attention's result and its sums, with residuals of the same types.

    ``query``, ``key``, ``value``: of shape [batch, tokens, heads, width]; the kernel calls that ``BTNH``.
    """
    return _like_flash_forward(query, key, value)[0]


def _like_flash_forward(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    # Sums along the sequence: elementwise operations would be computed again rather than kept.
    weight = jnp.sum(key * value, (1, 2))[:, None, None]
    results = jnp.cumsum(query, 1) + weight, jnp.sum(jnp.cumsum(query, 1), -1, dtype=jnp.float32)
    return results, (query, key, value, *results)


def _like_flash_backward(residuals: Any, cotangents: Any) -> Any:
    query, key, value, result, sums = residuals
    mixed = jnp.cumsum(cotangents[0] * result + query * sums[..., None].astype(query.dtype), 1)
    weight = jnp.sum(mixed, (1, 2))[:, None, None]
    return mixed, jnp.cumsum(key, 1) + weight, jnp.cumsum(value, 1) + weight


like_flash_attention.defvjp(_like_flash_forward, _like_flash_backward)


def _dump(compiled: Any, folder: Path) -> None:
    if jax.process_index():  # of several processes, which all have the same plan, the first writes it
        return
    plan, lowered = compiled.plan, compiled.lowered
    _draw(plan, folder / "plan")
    (folder / "costs.json").write_text(json.dumps(compiled.cost_analysis(), indent=1))
    (folder / "plan.txt").write_text("\n".join([str(plan), *map(str, plan.instructions), plan.fingerprint(), ""]))
    (folder / "plan.json").write_text(plan.to_json())
    dumps = {program.name: str(program) for program in lowered.passes()} | {"kernels": lowered.as_text()}
    for number, (name, text) in enumerate(dumps.items()):
        (folder / f"{number:02}-{name}.txt").write_text(text)


def _profile(compiled: Any, folder: Path, state: Any, batch: Any) -> None:
    profile = compiled.profile(state, batch)
    if jax.process_index():  # the first of several processes, which all have the same, speaks for them
        return
    _draw(profile.measured, folder / "measured")
    _draw(profile.simulated, folder / "simulated")
    (folder / "timeline.txt").write_text(f"{profile}\n")


def _draw(timeline: Any, file: Path) -> None:
    """Write a plan or a timeline as pictures and for Perfetto."""
    file.parent.mkdir(parents=True, exist_ok=True)
    timeline.to_svg(file.with_suffix(".svg"))
    timeline.to_html(file.with_suffix(".html"))
    timeline.to_perfetto(file.with_suffix(".perfetto.json"))


def accumulate_microbatches(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: dict[str, Any],
    batch: Any,
    *,
    length: int,
    home: Callable[[Any], Mesh],
    **loop: Any,
) -> tuple[dict[str, Any], Any]:
    """Run MaxText's accumulation over microbatches as the microbatch loop.

    A pipeline has no order in which one microbatch could hand its state to the next. But MaxText's state only counts,
    so microbatch i gets its counters from i.

    ``body``: MaxText's, of carry and microbatch: the carry's sums grow from zero, its parameters stay.
    ``batch``: arrays whose first dimension is the rows of the step. Microbatch i takes rows i, i + length, ..., in
    MaxText as in `multimesh.microbatch`, which gets the arguments of the ``loop``.
    ``home``: submesh of a leaf of the state, by its path.

    Raises ``UnsupportedError`` where the state does more than count.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    sums = {key: value for key, value in init.items() if key not in (PARAMETERS, _STATE)}
    arguments = init, jax.tree.map(lambda x: x[: rows // length], batch)
    traced, result = jax.make_jaxpr(body, return_shape=True)(*arguments)
    strides = _read_strides(traced, arguments, result)
    leaves, tree = jax.tree.flatten(init[_STATE])

    def before(microbatch: jax.Array) -> Any:
        """State that a microbatch starts with."""
        moved = [x + stride * microbatch if stride else x for x, stride in zip(leaves, strides, strict=True)]
        return jax.tree.unflatten(tree, moved)

    def final(path: Any, x: Any, stride: int) -> Any:
        """State after all microbatches, on its submesh: only the next step reads it, so no layer says where it lies."""
        if not stride:
            return x
        return multimesh.task(lambda x: x + stride * length, "count", mesh=home(path))(x)

    def one(rows_and_number: Any) -> tuple[Any, Any]:
        rows, number = rows_and_number
        # Zeros made here are folded by the compiler; those of `init` would be arrays that every microbatch reads.
        zeros = jax.tree.map(jnp.zeros_like, sums)
        carry = {**zeros, PARAMETERS: init[PARAMETERS], _STATE: before(number[0])}
        results = jaxpr_as_fun(traced)(*jax.tree.leaves((carry, rows)))
        carry, aux = jax.tree.unflatten(jax.tree.structure(result), results)
        return {key: carry[key] for key in sums}, aux

    # Cut as the rows are, this gives each microbatch its number.
    numbers = jnp.arange(rows, dtype=jnp.uint32) % length
    stacked = jax.tree_util.tree_map_with_path(
        lambda path, x: x.dtype == jnp.bool_ or any(getattr(part, "key", None) in _REDUCED for part in path[:1]),
        result[1],
    )
    reductions = "sum", jax.tree.map(lambda stack: "stack" if stack else "sum", stacked)
    total, aux = multimesh.microbatch(one, size=rows // length, reduce=reductions, **loop)((batch, numbers))
    # MaxText reduces over the microbatches once more; a sum is one row.
    aux = jax.tree.map(lambda stack, x: x if stack else jnp.asarray(x)[None], stacked, aux)
    state = jax.tree_util.tree_map_with_path(final, init[_STATE], jax.tree.unflatten(tree, strides))
    return {**total, PARAMETERS: init[PARAMETERS], _STATE: state}, aux


def _read_strides(traced: Any, arguments: Any, result: Any) -> list[int]:
    """Return by how much a traced microbatch advances each leaf of the state."""
    tree = jax.tree.structure(arguments)
    counts = _count(traced.jaxpr, [(number, 0) for number in range(tree.num_leaves)])
    before = jax.tree.unflatten(tree, range(tree.num_leaves))[0][_STATE]
    after = jax.tree.structure(before).flatten_up_to(jax.tree.unflatten(jax.tree.structure(result), counts)[0][_STATE])
    for (path, number), count in zip(jax.tree_util.tree_leaves_with_path(before), after, strict=True):
        if count is None or count[0] != number:
            raise UnsupportedError(
                f"{jax.tree_util.keystr(path)} changes with every microbatch, but counts nothing: stages cannot hand "
                "it on; use --batch-size and --microbatch-size for one microbatch, or --backend spmd"
            )
    return [advance for _, advance in after]


_Count = tuple[int, int] | None
"""A counter: the number of the argument with its first value, and its advance. ``None``: no counter."""


def _count(jaxpr: Any, arguments: Sequence[_Count]) -> list[_Count]:
    """Return the argument and the constant of each result that adds them, as counters do; None for any other."""
    counters: dict[Any, _Count] = dict(zip(jaxpr.invars, arguments, strict=True))

    def look(atom: Any) -> _Count:
        return None if isinstance(atom, Literal) else counters.get(atom)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        results: list[_Count] = [None] * len(eqn.outvars)
        if name in _CALLS:
            inside = eqn.params["jaxpr"]
            results = _count(getattr(inside, "jaxpr", inside), [look(atom) for atom in eqn.invars])
        elif name in _IDENTITIES:
            results = [look(eqn.invars[0])]
        elif name == "add" and isinstance(eqn.invars[1], Literal):
            before = look(eqn.invars[0])
            results = [before and (before[0], before[1] + int(eqn.invars[1].val))]
        counters |= zip(eqn.outvars, results, strict=True)
    return [look(atom) for atom in jaxpr.outvars]
