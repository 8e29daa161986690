"""What is written about the train step, in the trainer's process: forecast, dumps, measured timelines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from multimesh.errors import MultiMeshError
from multimesh.jitted import Jitted
from multimesh.lowered import Lowered, Plain
from multimesh_maxtext import memory
from multimesh_maxtext.forecasting import needs
from multimesh_maxtext.handoff import Handoff


def unallocated(fn: Callable[[], Any], shardings: Any) -> Any:
    """Return the types of ``fn()`` with their shardings; scalars are arrays, because MaxText reads the step number."""

    def leaf(x: Any, sharding: Any) -> Any:
        if x.ndim == 0 and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return jax.device_put(jnp.zeros((), x.dtype), sharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, jax.eval_shape(fn), shardings)


def end_before_training(jitted: Jitted, handoff: Handoff, state: Any, batch: Any) -> None:
    """Write a forecast, or dump the compiled step, and end the process; return if neither is asked for."""
    if handoff.forecast:
        lowered = jitted.lower(state, batch)
        memory.write(needs(lowered, state), Path(handoff.forecast))
        sys.exit()
    if handoff.dump_only:
        lowered = jitted.lower(state, batch)
        lowered.compile()
        _dump(lowered, handoff)
        sys.exit()


def inspect(jitted: Jitted, handoff: Handoff, state: Any, batch: Any) -> None:
    """Write what is asked for about a step; the program that is compiled for it is that of the next call."""
    if not (handoff.dump or handoff.profile):
        return
    compiled = jitted.prepare(state, batch)
    if isinstance(compiled, Plain):
        raise MultiMeshError("--dump and --profile: nothing in this step is a task, so there is no plan to write")
    if handoff.dump:
        _dump(compiled.lowered, handoff)
    if handoff.profile:
        _profile(compiled, Path(handoff.profile), state, batch)


def _dump(lowered: Lowered, handoff: Handoff) -> None:
    folder = Path(handoff.dump)
    folder.mkdir(parents=True, exist_ok=True)
    plan = lowered.plan
    (folder / "plan.txt").write_text("\n".join([str(plan), *map(str, plan.instructions), plan.fingerprint(), ""]))
    (folder / "plan.json").write_text(plan.to_json())
    plan.to_svg(folder / "plan.svg")
    plan.to_perfetto(folder / "plan.perfetto.json")
    if handoff.dump_passes:
        dumps = {done.name: str(done) for done in lowered.passes()} | {"kernels": lowered.as_text()}
        for number, (name, text) in enumerate(dumps.items()):
            (folder / f"{number}-{name}.txt").write_text(text)


def _profile(compiled: Any, folder: Path, state: Any, batch: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    profile = compiled.profile(state, batch)
    (folder / "timeline.txt").write_text(f"{profile}\n")
    for name, timeline in (("measured", profile.measured), ("forecast", profile.forecast)):
        timeline.to_svg(folder / f"{name}.svg")
        timeline.to_perfetto(folder / f"{name}.perfetto.json")
