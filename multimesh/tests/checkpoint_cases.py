"""What each of several processes does in `test_checkpoints`: states that are saved, restored, or lost on the way."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.processes import arrays, shard_files
from process_arrays import REPLICATED, crossed, meshes, on
from process_cases import is_key, main

import multimesh as mm


def state(stages: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A training state over so many stages, and the same in NumPy; with None a state in one place."""
    where = [Mesh(np.array(jax.devices()[:1]), ("data",))] if stages is None else crossed() if not stages else []
    where = where or meshes(stages or 1)
    want: dict[str, Any] = {"step": 7, "rate": 0.1, "done": False, "none": None, "rng": jax.random.key(5)}
    want |= {"numpy": np.arange(5, dtype=np.int16), "plain": jnp.arange(3), "empty": np.zeros((0, 8), np.float32)}
    got = dict(want)
    for n in range(4):
        x, mesh = np.random.default_rng(n).normal(size=(8, 8)), where[n * len(where) // 4]
        named = {"w": (x.astype(np.float32), P("data")), "b": (x.astype(jnp.bfloat16), REPLICATED)}
        named |= {"mask": (x > 0, P(None, "data")), "count": (np.int32(n), REPLICATED)}
        named |= {"q": (x.astype(jnp.float8_e4m3fn), P("data")), "t": (x.astype(jnp.int4), P("data"))}
        named |= {"none": (x[:0], P("data"))}
        want[f"layer{n}"] = {k: value for k, (value, _) in named.items()} | {
            "key": jax.random.split(jax.random.key(n), 8)
        }
        got[f"layer{n}"] = {k: on(mesh, value, spec) for k, (value, spec) in named.items()}
        layout = NamedSharding(mesh, P("data"))
        got[f"layer{n}"]["key"] = arrays.place(jax.random.split(jax.random.key(n), 8), layout)
    return got, want


def assert_restored(got: dict[str, Any], like: dict[str, Any], want: dict[str, Any]) -> None:
    """What was restored lies as ``like``, with the values of ``want``."""
    for name in ("step", "rate", "done", "none"):
        assert got[name] == want[name]
        assert type(got[name]) is type(want[name])
    for x, y, w in zip(*(jax.tree.leaves(tree) for tree in (got, like, want)), strict=True):
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
    got, _ = state(int(stages))
    mm.distributed.save(folder, got)
    with pytest.raises(mm.UsageError, match="something already"):
        mm.distributed.save(folder, got)
    with pytest.raises(mm.UsageError, match=r"process \d(, \d)* of \d differs.*step: "):
        mm.distributed.save(folder + "-other", {**got, "step": 1.0 if jax.process_index() else 1})


def restored(folder: str, stages: str) -> None:
    """... and restored over other stages, from arrays and from their types."""
    like, want = state(int(stages))
    assert_restored(mm.distributed.restore(folder, like), like, want)
    types = jax.tree.map(lambda x: _type(x) if isinstance(x, jax.Array) and x.committed else x, like)
    assert_restored(mm.distributed.restore(folder, types), like, want)
    wrong = jax.tree.map(lambda x: x, like)
    wrong["layer2"]["w"] = wrong["layer2"]["b"]
    with pytest.raises(mm.UsageError, match=r"has layer2/w as float32\[8,8\], `like` as bfloat16\[8,8\]"):
        mm.distributed.restore(folder, wrong)


def _type(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def disk_full(folder: str) -> None:
    """Process 1 can't write: all processes are told so, with its name and the system's reason; nothing is left."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    if jax.process_index() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))
    try:
        with pytest.raises(
            mm.MultiMeshError, match=r"^process 1 of 2 \(.+\): mm.distributed.save to .*: File too large: "
        ):
            mm.distributed.save(f"{folder}/1", state(2)[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    mm.distributed.barrier("process 0 has removed what was written")
    assert list(Path(folder).iterdir()) == []


def killed_saving(folder: str, rank: str, where: str) -> None:
    """Save one checkpoint after the other until a process kills itself somewhere on the way."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def then_kill(*args: Any, **kwargs: Any) -> Any:
        whole(*args, **kwargs)
        kill()

    def placed(n: int) -> Any:
        return {"step": n, "w": [on(mesh, np.full((64, 64), n, np.float32), P("data")) for mesh in meshes()]}

    mm.distributed.save(f"{folder}/0", placed(0))
    if jax.process_index() == int(rank):
        places: dict[str, tuple[Any, str]] = {"rename": (Path, "rename"), "table": (shard_files, "write_table")}
        place, name = places.get(where, (shard_files, "write"))
        whole = getattr(place, name)
        if where in ("write", "table", "rename"):
            setattr(place, name, then_kill)
        elif where == "begin":
            setattr(place, name, lambda *args, **kwargs: kill())
        else:
            threading.Timer(float(where), kill).start()
    for n in range(1, 1000):
        mm.distributed.save(f"{folder}/{n}", placed(n))


if __name__ == "__main__":
    main(globals())
