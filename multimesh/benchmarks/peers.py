"""CPU time of a training step and of its first call: MultiMesh, JaxPP and SpectraX against one SPMD program, in turns.

All train the model of workload.py on the same devices, with the same microbatches and the same optimizer, from the same
parameters. A peer that is not installed, or that fails, is named with what it said. JaxPP is `NVIDIA/jaxpp`, SpectraX
is `spectrax-lib`: both need a JAX older than today's (docs/performance.md says which).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import optax
import report
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from step import Training, seconds
from workload import (
    OPTIMIZER,
    SMALL_2,
    SMALL_4,
    SPECS,
    TINY,
    Size,
    batch,
    init,
    loss_fn,
    pipeline,
    spmd,
    train_step,
)

WIDE_2 = Size("wide", width=192, sequence=32, stages=2)
CASES = [
    (TINY, "1f1b"),
    (SMALL_2, "1f1b"),
    *((SMALL_4, schedule) for schedule in ("1f1b", "zb-h1")),
    (dataclasses.replace(SMALL_4, chunks=2), "interleaved"),
    (WIDE_2, "1f1b"),
]
Contender = tuple[Callable[..., Any], tuple[Any, Any, Any]]


def specs(size: Size) -> dict[str, Any]:
    """Layout of each parameter on its submesh."""
    return {"embed": P(), "layers": [SPECS for _ in range(size.layers)], "head": P()}


def marked(size: Size, mark: Callable[[Any], Any], *, last: bool) -> Callable[..., Any]:
    """The loss of one microbatch, with a mark where each piece ends; where the ``last`` one ends too, if asked."""

    def stage(s: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn if s == size.pieces - 1 and not last else lambda *args: mark(fn(*args))

    return loss_fn(size, stage)


def jaxpp(size: Size, schedule: str) -> Contender:
    """One mesh with an axis of stages; `treduce` loops over microbatches that are cut beforehand."""
    import jaxpp.api as peer
    from jaxpp.schedules import Interleaved1F1B, Std1F1B, ZeroBubble

    tables = {
        "1f1b": lambda: Std1F1B(size.stages),
        "zb-h1": lambda: ZeroBubble(size.stages),
        "interleaved": lambda: Interleaved1F1B(size.pieces, size.stages),
    }
    mesh = Mesh(size.grid(), ("stages", "data", "model"))
    loss = marked(size, peer.mark_stage_end, last=True)
    layouts, rows = specs(size), {"x": P(None, "data"), "y": P(None, "data")}

    state_specs = (optax.ScaleByAdamState(P(), layouts, layouts), optax.EmptyState())

    def grads_of(params: Any, b: Any) -> Any:
        one = functools.partial(jax.value_and_grad(loss), params)
        losses, grads = peer.treduce(one, b, schedule=tables[schedule]())
        return losses.sum(), grads

    step = peer.mpmd_jit_with_loop(
        train_step(grads_of, size.microbatches),
        mpmd_mesh=peer.MpmdMesh(mesh, "stages"),
        in_specs=(layouts, state_specs, rows),
        out_specs=(layouts, state_specs, P()),
        donate_argnums=(0, 1),
    )
    everywhere = NamedSharding(mesh, P())
    params = jax.device_put(init(size), everywhere)
    state = jax.jit(OPTIMIZER.init, out_shardings=everywhere)(params)
    b = jax.tree.map(lambda x: x.reshape(size.rows, size.microbatches, *x.shape[1:]).swapaxes(0, 1), batch(size))
    return step, (params, state, jax.device_put(b, everywhere))


def spectrax(size: Size, schedule: str) -> Contender:
    """`sxjit` cuts the loss; the optimizer runs beside it, in one `jax.jit` for each submesh."""
    from spectrax.runtime import schedules
    from spectrax.runtime.mpmd import sxjit, sxstage_iter, sxvalue_and_grad
    from spectrax.runtime.types import MpMdMesh

    tables = {
        "1f1b": lambda: schedules.Std1F1B(microbatches=size.microbatches),
        "zb-h1": lambda: schedules.ZeroBubbleH1(microbatches=size.microbatches),
        "interleaved": lambda: schedules.InterleavedH1(
            microbatches=size.microbatches, virtual_stages=size.chunks, stage_layout="interleaved"
        ),
    }
    mesh = MpMdMesh(Mesh(size.grid(), ("pp", "data", "model")), "pp")
    loss = marked(size, sxstage_iter, last=False)
    meshes = size.submeshes()

    def shard(s: int, spec: P) -> NamedSharding:
        return NamedSharding(meshes[s % size.stages], spec)

    layouts = {
        "embed": shard(0, P()),
        "layers": [{k: shard(size.piece_of(i), p[k]) for k in p} for i, p in enumerate(specs(size)["layers"])],
        "head": shard(size.stages - 1, P()),
    }
    traced = sxjit(loss, mesh=mesh, schedule=tables[schedule](), batch_argnums=(1,))
    gradient = sxvalue_and_grad(traced, argnums=0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, grads: Any) -> Any:
        changes, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    def parts(tree: Any) -> list[Any]:
        layers: list[list[Any]] = [[] for _ in range(size.stages)]
        for i, p in enumerate(tree["layers"]):
            layers[size.piece_of(i) % size.stages].append(p)
        ends: list[dict[str, Any]] = [{} for _ in range(size.stages)]
        ends[0]["embed"], ends[-1]["head"] = tree["embed"], tree["head"]
        return [{"layers": names, **end} for names, end in zip(layers, ends, strict=True)]

    def join_pieces(pieces: list[Any]) -> dict[str, Any]:
        layers_of = [iter(piece["layers"]) for piece in pieces]
        layers = [next(layers_of[size.piece_of(i) % size.stages]) for i in range(size.layers)]
        return {"embed": pieces[0]["embed"], "layers": layers, "head": pieces[-1]["head"]}

    def step(params: Any, states: Any, b: Any) -> Any:
        value, (grads,) = gradient(params, b)
        pairs = [update(*group) for group in zip(parts(params), states, parts(grads), strict=True)]
        return join_pieces([p for p, _ in pairs]), [s for _, s in pairs], value

    placed = jax.device_put(init(size), layouts)
    states = [jax.jit(OPTIMIZER.init)(part) for part in parts(placed)]
    return step, (placed, states, batch(size))


CONTENDERS: dict[str, Callable[[Size, str], Contender]] = {
    "SPMD": lambda size, _: spmd(size),
    "MultiMesh": pipeline,
    "JaxPP": jaxpp,
    "SpectraX": spectrax,
}
PACKAGES = {"JaxPP": "jaxpp", "SpectraX": "spectrax-lib", "MultiMesh": "multimesh-jax", "JAX": "jax"}


def fault(error: Exception) -> str:
    """Return the error of a contender, in a line."""
    return f"{type(error).__name__}: {str(error)[:160]}".splitlines()[0]


def trainings(size: Size, schedule: str, faults: dict[str, str]) -> dict[str, Training]:
    """The contenders that can be made; the others are noted in ``faults``."""
    trained = {}
    for name, make in CONTENDERS.items():
        try:
            trained[name] = Training(*make(size, schedule))
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way, and the table says how
            faults[name] = fault(error)
    return trained


def measure(size: Size, schedule: str, count: int) -> tuple[dict[str, list[float]], dict[str, float], dict[str, str]]:
    """CPU seconds of the first call and then of each step, losses after one update, and faults, by contender."""
    faults: dict[str, str] = {}
    running = trainings(size, schedule, faults)
    times: dict[str, list[float]] = {name: [] for name in running}
    losses: dict[str, float] = {}
    for turn in range(count + 3):
        for name, training in list(running.items()):
            if not turn:
                jax.clear_caches()
            try:
                times[name].append(seconds(training))
                if turn == 1:  # later, Adam has made the rounding of the first gradients large
                    losses[name] = value(training.loss)
            except Exception as error:  # noqa: BLE001 - as above
                faults[name] = fault(error)
                del running[name], times[name]
    return times, losses, faults


def value(loss: Any) -> float:
    """The number in a loss; JaxPP's arrays hand theirs out by a property."""
    return float(getattr(loss, "to_mpmd_local_array", loss))


def versions() -> list[dict[str, Any]]:
    rows = []
    for name, package in PACKAGES.items():
        try:
            rows.append({"package": name, "version": metadata.version(package)})
        except metadata.PackageNotFoundError:
            rows.append({"package": name, "version": "not installed"})
    return rows


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--steps", type=int, default=20, help="steps of each program (default 20)")
    args = options.parse_args()
    steps, firsts, notes = [], [], []
    for size, schedule in CASES:
        case = {"size": size.name, "d": size.width, "pp": size.stages, "schedule": schedule}
        times, losses, faults = measure(size, schedule, args.steps)
        middle = {name: statistics.median(samples[3:]) for name, samples in times.items()}
        minima = {name: min(samples[3:]) for name, samples in times.items()}
        others = [name for name in CONTENDERS if name != "SPMD"]

        def ratio(of: dict[str, float], name: str) -> Any:
            return of[name] / of["SPMD"] if name in of else "-"

        steps.append(
            case
            | {"SPMD ms": 1e3 * middle["SPMD"]}
            | {name: ratio(middle, name) for name in others}
            | {f"{name} min": ratio(minima, name) for name in others}
        )
        first = {name: samples[0] for name, samples in times.items()}
        firsts.append(case | {"SPMD s": first["SPMD"]} | {name: ratio(first, name) for name in others})
        notes += [case | {"contender": name, "said": text} for name, text in faults.items()]
        gap = {name: abs(x - losses["SPMD"]) / losses["SPMD"] for name, x in losses.items()}
        notes += [case | {"contender": name, "said": f"loss differs by {d:.1e}"} for name, d in gap.items() if d > 1e-4]
    tables = {
        "Versions": versions(),
        "CPU time of a step, x one SPMD program (median, least)": steps,
        "CPU time of the first call, x one SPMD program": firsts,
        "Contenders that failed or differ": notes,
    }
    report.show({title: rows for title, rows in tables.items() if rows}, args.json)


if __name__ == "__main__":
    main()
