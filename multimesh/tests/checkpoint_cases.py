"""What each of several processes does in `test_checkpoints`: states that are saved, restored, or lost on the way."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.processes import agree, arrays
from multimesh.processes.arrays import is_key
from multimesh.state import file_sums, handlers
from process_arrays import REPLICATED, crossed, meshes, on
from process_cases import main

import multimesh as mm


def state(stages: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A training state over so many stages, and the same in NumPy; with None a state in one place."""
    submeshes = [Mesh(np.array(jax.devices()[:1]), ("data",))] if stages is None else crossed() if not stages else []
    submeshes = submeshes or meshes(stages or 1)
    expected: dict[str, Any] = {"step": 7, "rate": 0.1, "done": False, "none": None, "rng": jax.random.key(5)}
    expected |= {"numpy": np.arange(5, dtype=np.int16), "plain": jnp.arange(3)}
    tree = dict(expected)
    for n in range(4):
        x, mesh = np.random.default_rng(n).normal(size=(8, 8)), submeshes[n * len(submeshes) // 4]
        leaves = {"w": (x.astype(np.float32), P("data")), "b": (x.astype(jnp.bfloat16), REPLICATED)}
        leaves |= {"mask": (x > 0, P(None, "data")), "count": (np.int32(n), REPLICATED)}
        leaves |= {"q": (x.astype(jnp.float8_e4m3fn), P("data")), "t": (x.astype(jnp.int4), P("data"))}
        expected[f"layer{n}"] = {k: value for k, (value, _) in leaves.items()} | {
            "key": jax.random.split(jax.random.key(n), 8)
        }
        tree[f"layer{n}"] = {k: on(mesh, value, spec) for k, (value, spec) in leaves.items()}
        layout = NamedSharding(mesh, P("data"))
        tree[f"layer{n}"]["key"] = arrays.place(jax.random.split(jax.random.key(n), 8), layout)
    return tree, expected


def assert_restored(actual: dict[str, Any], like: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that ``actual`` lies as ``like`` and has the values of ``expected``."""
    for name in ("step", "rate", "done", "none"):
        assert actual[name] == expected[name]
        assert type(actual[name]) is type(expected[name])
    for x, y, w in zip(*(jax.tree.leaves(tree) for tree in (actual, like, expected)), strict=True):
        if not isinstance(y, jax.Array):
            assert type(x) is type(y)
            np.testing.assert_array_equal(x, w)
            continue
        assert (x.dtype, x.shape, x.committed) == (y.dtype, y.shape, y.committed)
        assert not y.committed or x.sharding.is_equivalent_to(y.sharding, y.ndim)
        x, w = (jax.random.key_data(v) if is_key(v) else v for v in (x, w))
        for shard in x.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(np.asarray(w)[shard.index]).tobytes()


def saved(folder: str, stages: str) -> None:
    """A state over stages is saved; then nothing may lie at that path, and all processes must save the same."""
    tree, _ = state(int(stages))
    mm.distributed.save(folder, tree)
    with pytest.raises(mm.UsageError, match="something already"):
        mm.distributed.save(folder, tree)
    with pytest.raises(mm.UsageError, match=r"process \d(, \d)* of \d differs.*step: "):
        mm.distributed.save(folder + "-other", {**tree, "step": 1.0 if jax.process_index() else 1})
    local_folder = f"{folder}-of-{jax.process_index()}"
    with pytest.raises(mm.UsageError, match=r"process \d(, \d)* of \d differs"):
        mm.distributed.save(local_folder, tree)
    assert not list(Path(folder).parent.glob(f"{Path(local_folder).name}*"))


def restored(folder: str, stages: str) -> None:
    """... and restored over other stages, from arrays and from their types."""
    like, expected = state(int(stages))
    assert_restored(mm.distributed.restore(folder, like), like, expected)
    types = jax.tree.map(lambda x: _type(x) if isinstance(x, jax.Array) and x.committed else x, like)
    assert_restored(mm.distributed.restore(folder, types), like, expected)
    wrong = jax.tree.map(lambda x: x, like)
    wrong["layer2"]["w"] = wrong["layer2"]["b"]
    with pytest.raises(mm.UsageError, match=r"has layer2/w as float32\[8,8\], `like` as bfloat16\[8,8\]"):
        mm.distributed.restore(folder, wrong)


def _type(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def disk_full(folder: str, rank: str) -> None:
    """A process can't write: all processes are told so, with its name and the system's reason; nothing is left."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if jax.process_index() == int(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(mm.MultiMeshError, match=rf"^process {rank} of 2 \(.+\): .*: File too large: "):
            mm.distributed.save(f"{folder}/1", state(2)[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    mm.distributed.barrier(f"process 0 has removed what {rank} has written")
    assert list(Path(folder).iterdir()) == []


PHASES = {  # of a save: what is done in it, whether a process is killed before or after that, and who does it
    "begin": (agree, "run_in_all", "before", "all"),
    "in arrays": (handlers, "begin_write", "after", "all"),
    "sums": (file_sums, "sum_files", "before", "all"),
    "tree": (handlers, "finish_write", "before", "first"),
    "checksums": (file_sums, "write_sums", "after", "first"),
    "rename": (Path, "rename", "before", "first"),
    "renamed": (Path, "rename", "after", "first"),
}


def killed_at(phase: str, by: int = signal.SIGKILL) -> None:
    """Let this process send itself a signal in a phase of its next save; a number is so many seconds from now."""

    def kill() -> None:
        os.kill(os.getpid(), by)

    def call_and_kill(*args: Any, **kwargs: Any) -> Any:
        setattr(place, name, original)
        if when == "before":
            kill()
        result = original(*args, **kwargs)
        if when == "after":
            kill()
        return result

    if phase not in PHASES:
        threading.Timer(float(phase), kill).start()
        return
    place, name, when, _ = PHASES[phase]
    original = getattr(place, name)
    setattr(place, name, call_and_kill)


def killed_saving(folder: str, rank: str, phase: str, how: str, by: str = "SIGKILL") -> None:
    """Save one checkpoint after the other until a process gets a signal somewhere on the way."""

    def state_of(n: int) -> Any:
        return {"step": n, "w": [on(mesh, np.full((64, 64), n, np.float32), P("data")) for mesh in meshes()]}

    mm.distributed.save(f"{folder}/0", state_of(0))
    if jax.process_index() == int(rank):
        killed_at(phase, signal.Signals[by])
    for n in range(1, 1000):
        mm.distributed.save(f"{folder}/{n}", state_of(n), background=how == "background")


def delayed(until: Callable[[], Any]) -> Callable[..., Any]:
    """Orbax's writing, which is complete after ``until``."""
    begin_write = handlers.begin_write

    def begin(*args: Any) -> Any:
        futures, files = begin_write(*args)
        return [*futures, SimpleNamespace(result=until)], files

    return begin


def saved_beside(folder: str) -> None:
    """Arrays that are donated while they are saved; a second save; and the error of one process in all of them."""
    first, last = 0, jax.process_count() - 1
    begin_write, go_on = handlers.begin_write, threading.Event()
    handlers.begin_write = delayed(lambda: go_on.wait(60))
    x = np.arange(96, dtype=np.float32).reshape(24, 4)
    state = {"w": on(meshes(1)[0], x, P("data")), "n": 1}
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    mm.distributed.save(f"{folder}/1", state, background=True)
    later = {"w": jax.block_until_ready(double(state["w"])), "n": 2}
    threading.Timer(0.1, go_on.set).start()
    mm.distributed.save(f"{folder}/2", later, background=True)
    before = mm.distributed.restore(f"{folder}/1", later)  # it waits for the second one
    assert Path(f"{folder}/2").is_dir()
    for number, tree in ((1, before), (2, mm.distributed.restore(f"{folder}/2", later))):
        assert tree["n"] == number
        for shard in tree["w"].addressable_shards:
            np.testing.assert_array_equal(shard.data, (number * x)[shard.index])

    def full() -> Any:
        raise OSError(28, "No space left on device", folder)

    handlers.begin_write = begin_write
    for failing_rank in {first, last}:
        handlers.begin_write = delayed(full) if jax.process_index() == failing_rank else begin_write
        mm.distributed.save(f"{folder}/3", later, background=True)
        handlers.begin_write = begin_write
        with pytest.raises(mm.MultiMeshError, match=f"save to {folder}/3: No space left on device") as error:
            mm.distributed.save(f"{folder}/4", later)
        assert last == 0 or str(error.value).startswith(f"process {failing_rank} of {last + 1} (")
    mm.distributed.save(f"{folder}/3", later, background=True)
    mm.distributed.wait_for_save()
    mm.distributed.barrier("process 0 has removed what was written")
    assert {p.name for p in Path(folder).iterdir()} == {"1", "2", "3"}


if __name__ == "__main__":
    main(globals())
