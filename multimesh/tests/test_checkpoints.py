"""Checkpoints of arrays on any devices, in one process and in several: values against NumPy, and kill -9 in between."""

import itertools
import re
import signal
import sys
from pathlib import Path

import checkpoint_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import assert_same
from spawning import run

import multimesh as mm

CASES = Path(checkpoint_cases.__file__)
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"),
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4", "uint8", "uint16", "uint32"),
    *("uint64", "complex64", "complex128"),
)


def test_every_dtype_comes_back(tmp_path):
    """On devices and as NumPy, also where Orbax has no such dtype."""
    layout = NamedSharding(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")), P("a", "b"))
    values = {d: np.arange(32).reshape(8, 4).astype(jnp.dtype(d)) for d in DTYPES}
    with jax.enable_x64(True):
        tree = {"devices": jax.device_put(values, layout), "host": values}
        mm.distributed.save(tmp_path / "1", tree)
        back = mm.distributed.restore(tmp_path / "1", tree)
    for d, kind in itertools.product(DTYPES, tree):
        assert back[kind][d].dtype == jnp.dtype(d)
        assert np.asarray(back[kind][d]).tobytes() == values[d].tobytes(), (d, kind)
        assert type(back[kind][d]) is type(tree[kind][d])
        assert kind == "host" or back[kind][d].sharding == layout


def test_a_path_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mm.distributed.save("ck/20", TREE)
    assert_same(mm.distributed.restore("ck/20", TREE), mm.distributed.restore(tmp_path / "ck" / "20", TREE))
    with pytest.raises(mm.UsageError, match=rf"{tmp_path}/ck/21: no checkpoint .* has 20"):
        mm.distributed.restore("ck/21", TREE)


def test_layouts_come_back(tmp_path):
    """Of explicit axes, of one device, in the host's memory; also inside of ``jax.set_mesh``."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    x, last = np.arange(64, dtype=np.float32).reshape(8, 8), jax.devices()[-1]
    tree = {
        "explicit": jax.device_put(x, NamedSharding(mesh, P("a", "b"))),
        "host": jax.device_put(x, NamedSharding(mesh, P("b"), memory_kind="pinned_host")),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("a"))),
        "one": jax.device_put(x, last),
        "key": jax.device_put(jax.random.key(1, impl="rbg"), last),
        "uint4": jax.device_put(x.astype(jnp.uint4), last),
    }
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    for n, like in enumerate((tree, types)):
        with jax.set_mesh(mesh):
            mm.distributed.save(tmp_path / str(n), tree)
            back = mm.distributed.restore(tmp_path / str(n), like)
        for name, z in tree.items():
            y = back[name]
            assert y.sharding == z.sharding
            y, z = (jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (y, z))
            np.testing.assert_array_equal(y, z)


TREE = {"params": [{"w": np.ones((2, 3), np.float32)}], "step": 3}


@pytest.mark.parametrize(
    ("like", "told"),
    [
        (TREE | {"b": 1}, "has no b (int), which `like` has"),
        ({"params": TREE["params"]}, "has step (int), which `like` lacks"),
        (TREE | {"step": 3.0}, "has step as int, `like` as float"),
        (TREE | {"params": [{"w": np.ones((3, 2), np.float32)}]}, "params/0/w as float32[2,3], `like` as float32[3,2]"),
        (TREE | {"params": [{"w": jnp.ones((2, 3), jnp.bfloat16)}]}, "as float32[2,3], `like` as bfloat16[2,3]"),
        (TREE | {"step": "3"}, "step is a str; arrays, numbers and None can be saved"),
    ],
)
def test_the_first_difference_is_named(tmp_path, like, told):
    mm.distributed.save(tmp_path / "1", TREE)
    with pytest.raises(mm.UsageError, match=re.escape(told)) as raised:
        mm.distributed.restore(tmp_path / "1", like)
    assert "\n" not in str(raised.value)


def test_what_is_no_checkpoint_is_named(tmp_path):
    for name in ("9", "10"):
        mm.distributed.save(tmp_path / name, TREE)
    assert {p.name for p in (tmp_path / "9").iterdir()} == {"multimesh.json", "process-0.shards"}
    with pytest.raises(mm.UsageError, match=r"no checkpoint of mm.distributed.save is there; .* has 9, 10$"):
        mm.distributed.restore(tmp_path / "11", TREE)
    with pytest.raises(mm.UsageError, match="nor is one beside it"):
        mm.distributed.restore(tmp_path / "other" / "11", TREE)
    half = tmp_path / "12@n1-7-0000.half-written"
    (tmp_path / "10").rename(half)
    with pytest.raises(mm.UsageError, match="half-written"):
        mm.distributed.restore(half, TREE)
    (tmp_path / "9" / "multimesh.json").write_text('{\n "format": 1,')
    with pytest.raises(mm.UsageError, match="of an older MultiMesh"):
        mm.distributed.restore(tmp_path / "9", TREE)


def test_what_cannot_be_saved_is_named(tmp_path):
    mm.distributed.save(tmp_path / "1", TREE)
    gone = jnp.ones(3)
    gone.delete()
    for tree, told in (
        ({"a": {"b": gone}}, "a/b was donated or deleted"),
        ({"a": "text"}, "a is a str"),
        ({"a": np.array(["text"])}, "a is a ndarray of <U4"),
        ({"a": 2**70}, "a is an int of more than 64 bits"),
        ({"a": {"b": 1}, "a/b": 2}, "two leaves that are called 'a/b'"),
    ):
        with pytest.raises(mm.UsageError, match=re.escape(told)):
            mm.distributed.save(tmp_path / "2", tree)
    with pytest.raises(mm.UsageError, match="something already"):
        mm.distributed.save(tmp_path / "1", TREE)
    with pytest.raises(mm.UsageError, match="x has no value yet"):
        jax.jit(lambda x: mm.distributed.save(tmp_path / "2", {"x": x}))(1.0)
    (tmp_path / "file").touch()
    with pytest.raises(mm.MultiMeshError, match=r"Not a directory: .*; there is no checkpoint of that name"):
        mm.distributed.save(tmp_path / "file" / "2", TREE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "file"]


def test_handlers_for_orbax_are_there():
    from orbax.checkpoint import type_handlers, v1

    assert isinstance(mm.distributed.orbax_handler(), type_handlers.ArrayHandler)
    assert issubclass(mm.distributed.orbax_state_handler(), v1.handlers.PyTreeHandler)


def test_without_orbax_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "multimesh.checkpoints.orbax_arrays", None)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.delitem(sys.modules, "multimesh.checkpoints.orbax_arrays")
    with pytest.raises(mm.MultiMeshError, match=r"mm\.distributed\.orbax_handler needs a package: pip install orbax-"):
        mm.distributed.orbax_handler()


def passed(count, devices, *cases):
    for ended in run(count, devices, CASES, *cases, timeout=240):
        assert ended.code == 0, ended.err[-4000:]


SAVED = {"2": 2, "1": 1, "0": 0}  # stages by folder; 0: two stages, each with devices of every process


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What two processes of two devices each saved, in several layouts."""
    folder = tmp_path_factory.mktemp("checkpoints")
    back = [f"restored:{folder}/{a}:{b}" for a, b in (("2", 4), ("0", 1))]
    full = f"disk_full:{tmp_path_factory.mktemp('full')}"
    passed(2, 2, *(f"saved:{folder}/{name}:{stages}" for name, stages in SAVED.items()), *back, full)
    return folder


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SAVED)
def test_one_process_restores_what_several_saved(four, name):
    like, want = checkpoint_cases.state(8 if name == "2" else None)
    checkpoint_cases.assert_restored(mm.distributed.restore(four / name, like), like, want)


@pytest.mark.multiprocess
@pytest.mark.full
@pytest.mark.parametrize(("count", "devices"), [(4, 1), (1, 4), (2, 2), (2, 1)])
def test_other_processes_and_stages_restore_what_several_saved(four, count, devices):
    stages = [n for n in (0, 1, 2, 4) if n <= count * devices and (n or devices > 1)]
    passed(count, devices, *(f"restored:{four}/{name}:{n}" for name in SAVED for n in stages))


@pytest.mark.multiprocess
@pytest.mark.full
def test_several_processes_restore_what_one_saved(tmp_path):
    mm.distributed.save(tmp_path / "1", checkpoint_cases.state(4)[0])
    passed(2, 2, f"restored:{tmp_path}/1:2", f"restored:{tmp_path}/1:0")


PHASES = checkpoint_cases.PHASES
WHERE = [(phase, rank) for phase, (*_, who) in PHASES.items() for rank in (0, 1) if who == "all" or rank == 0]
WHERE += [(str(seconds), rank) for seconds in (0.05, 0.1, 0.2, 0.3, 0.5, 0.8) for rank in (0, 1)]


@pytest.mark.multiprocess
@pytest.mark.telling("in arrays-1-background", "rename-0-waited for")
@pytest.mark.parametrize("how", ["waited for", "background"])
@pytest.mark.parametrize(("where", "rank"), WHERE)
def test_a_process_killed_while_saving_leaves_whole_checkpoints_only(tmp_path, where, rank, how):
    ended = run(2, 2, CASES, f"killed_saving:{tmp_path}:{rank}:{where}:{how}", timeout=60)
    assert ended[rank].code == -signal.SIGKILL, ended
    assert "was killed by SIGKILL" in ended[1 - rank].err
    goes_on_with_whole_ones(tmp_path)


@pytest.mark.multiprocess
@pytest.mark.full
@pytest.mark.parametrize(("where", "rank"), [("in arrays", 0), ("in arrays", 1), ("table", 0), ("0.3", 1)])
def test_ctrl_c_during_a_save_in_the_background_leaves_whole_checkpoints_only(tmp_path, where, rank):
    ended = run(2, 2, CASES, f"killed_saving:{tmp_path}:{rank}:{where}:background:SIGINT", timeout=60)
    assert [process.code for process in ended] == [130, 130], ended
    assert "failed: KeyboardInterrupt" in ended[1 - rank].err
    goes_on_with_whole_ones(tmp_path)


def goes_on_with_whole_ones(tmp_path):
    """What has its name is whole, from the first on; what has not is refused, and the next save writes over it."""
    found = {p.name for p in tmp_path.iterdir() if p.name.isdigit()}
    assert "0" in found
    for name in found:
        n = int(name)
        like = {"step": 0, "w": [np.zeros((64, 64), np.float32)] * 2}
        back = mm.distributed.restore(tmp_path / name, like)
        assert back["step"] == n
        assert all((w == n).all() for w in back["w"])
    half = [p for p in tmp_path.iterdir() if p.name not in found]
    for path in half:
        with pytest.raises(mm.UsageError, match="half-written"):
            mm.distributed.restore(path, like)
    n = len(found)
    mm.distributed.save(tmp_path / str(n), TREE)  # goes on where it ended, over what was half-written
    assert mm.distributed.restore(tmp_path / str(n), TREE)["step"] == 3
    assert all(p.name.isdigit() for p in tmp_path.iterdir())
