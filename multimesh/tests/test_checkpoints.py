"""Checkpoints of arrays on any devices, in one process and in several: values against NumPy, and kill -9 in between."""

import itertools
import re
import signal
from pathlib import Path

import checkpoint_cases
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.state import checkpoints
from pipelines import assert_same
from spawning import run

import multimesh as mm

CASES = Path(checkpoint_cases.__file__)
TREE = {"params": [{"w": np.ones((2, 3), np.float32)}], "step": 3}
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"),
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("complex64", "complex128"),
)


def test_every_dtype_comes_back(tmp_path):
    """It comes back on devices and as NumPy."""
    layout = NamedSharding(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")), P("a", "b"))
    values = {d: np.arange(32).reshape(8, 4).astype(jnp.dtype(d)) for d in DTYPES}
    with jax.enable_x64(True):
        tree = {"devices": jax.device_put(values, layout), "host": values}
        mm.distributed.save(tmp_path / "1", tree)
        restored = mm.distributed.restore(tmp_path / "1", tree)
    for d, kind in itertools.product(DTYPES, tree):
        assert restored[kind][d].dtype == jnp.dtype(d)
        assert np.asarray(restored[kind][d]).tobytes() == values[d].tobytes(), (d, kind)
        assert type(restored[kind][d]) is type(tree[kind][d])
        assert kind == "host" or restored[kind][d].sharding == layout


def test_layouts_come_back(tmp_path):
    """They have explicit axes, one device, or the host's memory; ``jax.set_mesh`` changes nothing."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    x, last = np.arange(64, dtype=np.float32).reshape(8, 8), jax.devices()[-1]
    tree = {
        "explicit": jax.device_put(x, NamedSharding(mesh, P("a", "b"))),
        "host": jax.device_put(x, NamedSharding(mesh, P("b"), memory_kind="pinned_host")),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("a"))),
        "one": jax.device_put(x, last),
        "key": jax.device_put(jax.random.key(1, impl="rbg"), last),
    }
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    for n, like in enumerate((tree, types)):
        with jax.set_mesh(mesh):
            mm.distributed.save(tmp_path / str(n), tree)
            restored = mm.distributed.restore(tmp_path / str(n), like)
        for name, z in tree.items():
            y = restored[name]
            assert y.sharding == z.sharding
            y, z = (jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (y, z))
            np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (TREE | {"b": 1}, "has b as nothing, `like` as int"),
        ({"params": TREE["params"]}, "has step as int, `like` as nothing"),
        (TREE | {"step": 3.0}, "has step as int, `like` as float"),
        (TREE | {"params": [{"w": np.ones((3, 2), np.float32)}]}, "params/0/w as float32[2,3], `like` as float32[3,2]"),
        (TREE | {"params": [{"w": jnp.ones((2, 3), jnp.bfloat16)}]}, "as float32[2,3], `like` as bfloat16[2,3]"),
        (TREE | {"step": "3"}, "has step as int, `like` as str"),
    ],
)
def test_the_first_difference_is_named(tmp_path, like, message):
    mm.distributed.save(tmp_path / "1", TREE)
    with pytest.raises(mm.UsageError, match=re.escape(message)) as error:
        mm.distributed.restore(tmp_path / "1", like)
    assert "\n" not in str(error.value)


def test_what_is_no_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("9", "10"):
        mm.distributed.save(f"ck/{name}", TREE)
    for path, message in (
        ("ck/11", rf"{tmp_path}/ck/11: .* has 9, 10$"),
        (tmp_path / "other" / "11", "nor is one beside"),
    ):
        with pytest.raises(mm.UsageError, match=message):
            mm.distributed.restore(path, TREE)
    half = tmp_path / "ck" / "12@n1-7-0000.half-written"
    half.with_name("10").rename(half)
    with pytest.raises(mm.UsageError, match="half-written"):
        mm.distributed.restore(half, TREE)
    assert_same(mm.distributed.restore("ck", TREE), TREE)


def test_orbax_reads_what_was_saved_and_restores_what_it_wrote(tmp_path):
    mm.distributed.save(tmp_path / "1", TREE)
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "1")
    np.testing.assert_array_equal(restored["params"]["0"]["w"], TREE["params"][0]["w"])
    assert restored["step"] == 3
    ocp.PyTreeCheckpointer().save(tmp_path / "2", TREE)
    with pytest.raises(mm.UsageError, match=r"restore it with Orbax and mm\.distributed\.orbax_handler"):
        mm.distributed.restore(tmp_path / "2", TREE)


def test_parameters_alone_are_restored(tmp_path):
    """The state is a dictionary, or a pair; a leaf that is missing or differs is named as ever."""
    params = jax.device_put({"w": np.arange(8.0, dtype=np.float32)}, jax.devices()[3])
    mm.distributed.save(tmp_path / "1", {"params": params, "moments": params, "step": 3})
    mm.distributed.save(tmp_path / "2", (params, params))
    restored = mm.distributed.restore(tmp_path / "1", {"params": params}, partial=True)
    assert_same(restored, {"params": params})
    assert restored["params"]["w"].sharding == params["w"].sharding
    assert_same(mm.distributed.restore(tmp_path / "2", (params, None), partial=True), (params, None))
    with pytest.raises(mm.UsageError, match="has params/c as nothing"):
        mm.distributed.restore(tmp_path / "1", {"params": {"c": params["w"]}}, partial=True)


@pytest.mark.parametrize("address", ["gs://bucket/ck/5", Path("s3://bucket/ck")])
def test_an_address_of_a_bucket_is_refused(tmp_path, monkeypatch, address):
    """It is no folder of this machine, in the working directory of all places."""
    monkeypatch.chdir(tmp_path)
    for call, *tree in (
        (mm.distributed.save, TREE),
        (mm.distributed.restore, TREE),
        (mm.distributed.verify,),
        (mm.distributed.record,),
    ):
        with pytest.raises(mm.UsageError, match=r"is an address of \w+, and no path of this machine"):
            call(address, *tree)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_is_named(tmp_path):
    mm.distributed.save(tmp_path / "1", TREE)
    array = jnp.ones(3)
    array.delete()
    for tree, message in (
        ({"a": {"b": array}}, "a/b was donated or deleted"),
        ({"a": "text"}, "a is a str, which can't be saved"),
        ({"a": np.array(["text"])}, "a is a <U4[1], which can't be saved"),
        ({"a": jnp.ones(3, jnp.uint4)}, "a is a uint4[3], which can't be saved"),
        ({"a": np.ones((3, 0))}, "a has no elements"),
        ({"a": 2**70}, "a is a int, which can't be saved"),
        ({"a": {"b": 1}, "a.b": 2}, "leaves that are called 'a.b' and 'a/b'"),
        ({"a/b/c": 1, "a": 2}, "leaves that are called 'a/b/c' and 'a'"),
    ):
        with pytest.raises(mm.UsageError, match=re.escape(message)):
            mm.distributed.save(tmp_path / "2", tree)
    with pytest.raises(mm.UsageError, match="something already"):
        mm.distributed.save(tmp_path / "1", TREE)
    with pytest.raises(mm.UsageError, match="x is a float32"):
        jax.jit(lambda x: mm.distributed.save(tmp_path / "2", {"x": x}))(1.0)
    (tmp_path / "file").touch()
    with pytest.raises(mm.MultiMeshError, match=r"Not a directory: .*; there is no checkpoint of that name"):
        mm.distributed.save(tmp_path / "file" / "2", TREE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "file"]


@pytest.mark.parametrize("version", [None, "0.12.3"])
def test_without_orbax_one_line_names_the_package(tmp_path, monkeypatch, version):
    def version_of(name):
        if version is None:
            raise checkpoints.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(checkpoints.metadata, "version", version_of)
    for call in (
        mm.distributed.orbax_handler,
        mm.distributed.orbax_state_handler,
        lambda: mm.distributed.save(tmp_path / "1", TREE),
        lambda: mm.distributed.restore(tmp_path / "1", TREE),
    ):
        with pytest.raises(mm.errors.MissingPartError, match=r"0\.12\.4 .*pip install 'multimesh-jax\[checkpoints\]'"):
            call()
    assert not list(tmp_path.iterdir())


def run_cases(count, devices, *cases):
    for process in run(count, devices, CASES, *cases, timeout=240):
        assert process.code == 0, process.err[-4000:]


SAVED = {"2": 2, "1": 1, "0": 0}  # stages by folder; 0: two stages, each with devices of every process


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Checkpoints that two processes of two devices each saved, in several layouts."""
    folder = tmp_path_factory.mktemp("checkpoints")
    restores = [f"restored:{folder}/{a}:{b}" for a, b in (("2", 4), ("0", 1))]
    full = (f"disk_full:{tmp_path_factory.mktemp('full')}:{rank}" for rank in (0, 1))
    run_cases(2, 2, *(f"saved:{folder}/{name}:{stages}" for name, stages in SAVED.items()), *restores, *full)
    return folder


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SAVED)
def test_one_process_restores_what_several_saved(four, name):
    like, expected = checkpoint_cases.state(8 if name == "2" else None)
    checkpoint_cases.assert_restored(mm.distributed.restore(four / name, like), like, expected)


@pytest.mark.multiprocess
@pytest.mark.full
@pytest.mark.parametrize(("count", "devices"), [(4, 1), (1, 4), (2, 2), (2, 1)])
def test_other_processes_and_stages_restore_what_several_saved(four, count, devices):
    stages = [n for n in (0, 1, 2, 4) if n <= count * devices and (n or devices > 1)]
    run_cases(count, devices, *(f"restored:{four}/{name}:{n}" for name in SAVED for n in stages))


@pytest.mark.multiprocess
@pytest.mark.full
def test_several_processes_restore_what_one_saved(tmp_path):
    mm.distributed.save(tmp_path / "1", checkpoint_cases.state(4)[0])
    run_cases(2, 2, f"restored:{tmp_path}/1:2", f"restored:{tmp_path}/1:0")


PHASES = checkpoint_cases.PHASES
WHERE = [(phase, rank) for phase, (*_, who) in PHASES.items() for rank in (0, 1) if who == "all" or rank == 0]
WHERE += [(str(seconds), rank) for seconds in (0.05, 0.2, 0.5) for rank in (0, 1)]


@pytest.mark.multiprocess
@pytest.mark.telling("in arrays-1-background", "rename-0-waited for")
@pytest.mark.parametrize("how", ["waited for", "background"])
@pytest.mark.parametrize(("where", "rank"), WHERE)
def test_a_process_killed_while_saving_leaves_whole_checkpoints_only(tmp_path, where, rank, how):
    processes = run(2, 2, CASES, f"killed_saving:{tmp_path}:{rank}:{where}:{how}", timeout=60)
    assert processes[rank].code == -signal.SIGKILL, processes
    goes_on_with_whole_ones(tmp_path)


@pytest.mark.multiprocess
@pytest.mark.full
@pytest.mark.parametrize(("where", "rank"), [("in arrays", 0), ("tree", 0), ("0.3", 1)])
def test_ctrl_c_during_a_save_in_the_background_leaves_whole_checkpoints_only(tmp_path, where, rank):
    processes = run(2, 2, CASES, f"killed_saving:{tmp_path}:{rank}:{where}:background:SIGINT", timeout=60)
    assert [process.code for process in processes] == [130, 130], processes
    goes_on_with_whole_ones(tmp_path)


def goes_on_with_whole_ones(tmp_path):
    """Assert that each named checkpoint is whole; the half of one is refused, and the next save writes over it."""
    names = {p.name for p in tmp_path.iterdir() if p.name.isdigit()}
    assert "0" in names
    for name in names:
        n = int(name)
        like = {"step": 0, "w": [np.zeros((64, 64), np.float32)] * 2}
        restored = mm.distributed.restore(tmp_path / name, like)
        assert restored["step"] == n
        assert all((w == n).all() for w in restored["w"])
    assert mm.distributed.restore(tmp_path, like)["step"] == max(map(int, names))
    half = [p for p in tmp_path.iterdir() if p.name not in names]
    for path in half:
        with pytest.raises(mm.UsageError, match="half-written"):
            mm.distributed.restore(path, like)
    n = len(names)
    mm.distributed.save(tmp_path / str(n), TREE)  # goes on where it ended, over what was half-written
    assert mm.distributed.restore(tmp_path / str(n), TREE)["step"] == 3
    assert all(p.name.isdigit() for p in tmp_path.iterdir())
