"""Plans of each schedule against one program, a checkpoint on another grid, and a process that is killed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import multimesh as mm
from multimesh import launch
from multimesh.check.steps import Bench
from multimesh.check.verdicts import ABSENT, OK, Row, make_failure
from multimesh.errors import DisagreementError, LostProcessError, UsageError
from multimesh.processes import agree

WIDTH, TOLERANCE = 32, 1e-4
SOON = 10.0  # seconds in which a death must be told
SILENCE = 4  # seconds
_TWO = """
import os, signal, sys, time
import multimesh as mm

rank = int(sys.argv[1])
mm.distributed.initialize(sys.argv[2], 2, rank)
mm.distributed.barrier("met")
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return the next activations, rows over the devices of the stage."""
    return mm.with_sharding_constraint(jnp.tanh(x @ w), PartitionSpec("data"))


def schedules(bench: Bench) -> Any:
    """Run a step of each schedule; returns how far it is from one program, and the seconds until it was there."""
    if bench.stages < 2:
        return "there is one stage"
    found: dict[str, Any] = {}
    for schedule in mm.schedules.PUBLISHED:
        if bench.quick and schedule.name != "1f1b":
            continue
        bench.doing = f"compiling a plan of {schedule.name}"
        begun = time.monotonic()
        try:
            found[schedule.name] = {"far": _far(bench, schedule), "seconds": time.monotonic() - begun}
        except UsageError as error:  # it has no table for so many stages
            if schedule.name == "1f1b":
                raise
            found[schedule.name] = {"refused": str(error)}
    return found


def _far(bench: Bench, schedule: Any) -> float:
    """Return the largest relative difference of the loss and of a gradient from those of one program."""
    placement = schedule.placement(bench.stages)
    homes = [bench.meshes[placement[s % len(placement)]] for s in range(bench.stages * schedule.usual)]
    draw = np.random.default_rng(0).normal
    weights = [(draw(size=(WIDTH, WIDTH)) / 6).astype(np.float32) for _ in homes]
    size, count = 2 * bench.per_stage, 2 * bench.stages
    x = draw(size=(size * count, WIDTH)).astype(np.float32)

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for number, (mesh, w) in enumerate(zip(homes, weights, strict=True)):
            last = number == len(homes) - 1
            x = mm.task((lambda w, x: (layer(w, x) ** 2).sum()) if last else layer, f"stage{number}", mesh=mesh)(w, x)
        return x

    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        return mm.microbatch(jax.value_and_grad(loss), argnum=1, size=size, schedule=schedule)(weights, x)

    with mm.ignore_transforms():
        want = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(weights, x))
    pipeline = mm.jit(step)
    got = pipeline(weights, x)
    bench.doing = f"running a plan of {schedule.name}"
    got = mm.distributed.gather(pipeline(weights, x))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def judge_schedules(bench: Bench, every: Sequence[Any]) -> list[Row]:
    """Compare all with one program."""
    name, found = "plans", every[0]
    if isinstance(found, str):
        return [Row(name, ABSENT, found)]
    far = {schedule: each["far"] for schedule, each in found.items() if "far" in each}
    worst = max(far, key=lambda schedule: (far[schedule] != far[schedule], far[schedule]))  # NaN is the worst
    took = max(each["seconds"] for said in every for each in said.values() if "far" in each)
    which = ", ".join(far) if len(far) < 4 else f"{len(far)} schedules"
    text = f"{which}: loss and gradients differ from one program by at most {far[worst]:.1e}, in {worst}"
    if not far[worst] <= TOLERANCE:
        remedy = "report it with --report; the products or transfers of a device may be wrong"
        return [make_failure(name, text, remedy, DisagreementError.exit_code)]
    return [Row(name, OK, f"{text}; {took:.1f} s the slowest", f"at most {TOLERANCE:.0e}")]


def checkpoint(bench: Bench) -> Any:
    """Save arrays that lie on all stages, verify them, and restore them on other stages in another layout."""
    if "shared folder" in bench.failed:
        return "the folder is not shared"
    name = agree.first_says("check: checkpoint", f".multimesh-check-{time.time_ns()}")
    folder, size = bench.folder / name, 8 * bench.per_stage
    values = [np.arange(size * size, dtype=np.float32).reshape(size, size) + stage for stage in range(bench.stages)]

    def on(mesh: Mesh, *axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    placed = [
        jax.make_array_from_callback(value.shape, on(mesh, "data"), value.__getitem__, dtype=value.dtype)
        for value, mesh in zip(values, bench.meshes, strict=True)
    ]
    begun = time.monotonic()
    try:
        bench.doing = f"saving a checkpoint in {bench.folder}"
        mm.distributed.save(folder, placed)
        bench.doing = "verifying the checkpoint"
        mm.distributed.verify(folder)
        bench.doing = "restoring the checkpoint on other stages"
        like = [
            jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=on(mesh, None, "data"))
            for value, mesh in zip(values, bench.meshes[::-1], strict=True)
        ]
        for value, array in zip(values, mm.distributed.restore(folder, like), strict=True):
            for shard in array.addressable_shards:
                if not (np.asarray(shard.data) == value[shard.index]).all():
                    raise DisagreementError(f"the checkpoint holds other values on {shard.device} than were saved")
    finally:
        agree.barrier("check: checkpoint read")
        if bench.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return {"seconds": time.monotonic() - begun}


def judge_checkpoint(bench: Bench, every: Sequence[Any]) -> list[Row]:
    """Say how long it took."""
    if isinstance(every[0], str):
        return [Row("checkpoint", ABSENT, every[0])]
    slowest = max(each["seconds"] for each in every)
    return [Row("checkpoint", OK, f"saved, verified, restored on other stages in another layout in {slowest:.1f} s")]


def kill_one(bench: Bench) -> Any:
    """On the machine of process 0, start two processes of their own, kill one, and read what the other says."""
    if bench.rank:
        return None
    bench.doing = "starting two processes of their own, one of which is killed"
    strange = re.compile("(SLURM|OMPI|PMI|PMIX|PALS|MPI|MULTIMESH|JAX)_")
    clean = {name: value for name, value in os.environ.items() if not strange.match(name)}
    env = clean | {"JAX_PLATFORMS": "cpu", "MULTIMESH_SILENCE_TIMEOUT": str(SILENCE)}
    command = [sys.executable, "-c", _TWO]
    address = f"127.0.0.1:{launch.free_port()}"
    victim = subprocess.Popen([*command, "1", address], env=env, stderr=subprocess.DEVNULL)
    other = subprocess.Popen([*command, "0", address], env=env, stderr=subprocess.PIPE, text=True)
    try:
        victim.wait()
        begun = time.monotonic()
        said = other.communicate()[1]
        return {"seconds": time.monotonic() - begun, "said": said[-500:], "code": other.returncode}
    finally:
        for process in (victim, other):
            process.kill()
            process.wait()


def judge_kill(bench: Bench, every: Sequence[Any]) -> list[Row]:
    """Say whether the death was told, and after how long."""
    found, name = every[0], "a process that is killed"
    told = re.search(
        r"process 1 of 2 \(.*?\) (was killed by SIGKILL|has been out of reach|ended without)", found["said"]
    )
    if not told or found["code"] != LostProcessError.exit_code or found["seconds"] > SOON:
        text = f"after {found['seconds']:.1f} s, with code {found['code']}: {found['said'].strip()[-200:]!r}"
        return [make_failure(name, text, "report it with --report", LostProcessError.exit_code)]
    return [Row(name, OK, f"named after {found['seconds']:.1f} s: {told[1]}", f"{SOON:.0f} s")]
