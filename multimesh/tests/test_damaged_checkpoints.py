"""Checkpoints that cannot lie: bytes that changed, files that are gone, two jobs that save to one path."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import checkpoint_cases
import damage
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.checkpoints import shard_files
from multimesh.processes import agree
from pipelines import assert_same
from spawning import run

import multimesh as mm

CASES = Path(checkpoint_cases.__file__)


def state():
    """Shards of several shapes on several devices, values on the host, a key of random numbers."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    w = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    at = {name: NamedSharding(mesh, spec) for name, spec in (("w", P("a", "b")), ("m", P("b")), ("v", P()))}
    placed = {name: jax.device_put(w, layout) for name, layout in at.items()}
    return placed | {"step": 7, "host": np.arange(5), "scalar": np.float32(3), "rng": jax.random.key(1)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "1"
    mm.distributed.save(path, state())
    return path


def test_no_damage_is_silent(saved):
    """200 of them, in all files: each is one line with the name of the file, from `restore` and from `verify`."""
    tree = state()
    for seed in range(200):
        file, data = damage.damage(saved, random.Random(seed))
        for read in (lambda: mm.distributed.restore(saved, tree), lambda: mm.distributed.verify(saved)):
            with pytest.raises(mm.errors.DamagedError, match=re.escape(str(file))) as raised:
                read()
            assert "\n" not in str(raised.value), seed
        file.write_bytes(data)
    mm.distributed.verify(saved)
    assert_same(mm.distributed.restore(saved, tree), tree)


def test_the_shard_is_named(saved):
    """Also where only the half of it is read, and the other one is not where the damage is."""
    file = saved / "process-0.shards"
    data = file.read_bytes()
    _, table = shard_files.read_table(saved)
    assert {shard.bounds for shard in table["w"]} == {((a, a + 2), (b, b + 3)) for a in (0, 2) for b in (0, 3)}
    shard = table["w"][-1]
    for changed, why in (
        (data[: shard.offset] + b"\0" + data[shard.offset + 1 :], "its bytes are not those that were saved"),
        (data + b"\0", f"the file has {len(data) + 1} bytes in place of {len(data)}"),
    ):
        file.write_bytes(changed)
        with pytest.raises(mm.UsageError, match=rf"1/process-0\.shards: shard \[.*\] of \w+: {why}; copy"):
            mm.distributed.restore(saved, state())
        file.write_bytes(data)


def test_blocks_that_are_not_read_are_not_compared(tmp_path, monkeypatch):
    """A process that is to hold some rows of a large shard reads these; `verify` reads all."""
    monkeypatch.setattr(shard_files, "BLOCK", 64)
    x = np.arange(64, dtype=np.float32).reshape(16, 4)  # 16 bytes a row
    mm.distributed.save(tmp_path / "1", {"x": x})
    (shard,) = shard_files.read_table(tmp_path / "1")[1]["x"]
    assert len(shard.sums) == 4
    file = tmp_path / "1" / shard.file
    data = bytearray(file.read_bytes())
    data[100] ^= 1  # in row 6
    file.write_bytes(data)
    for rows in ((0, 4), (1, 3), (8, 16), (9, 10)):
        found = shard_files.read(tmp_path / "1", [shard], x.dtype, (rows, (1, 3)))
        np.testing.assert_array_equal(found, x[slice(*rows), 1:3])
    for rows in ((0, 5), (4, 8), (7, 8)):
        with pytest.raises(mm.errors.DamagedError, match=r"shard \[0:16, 0:4\] of x"):
            shard_files.read(tmp_path / "1", [shard], x.dtype, (rows, (0, 4)))
    with pytest.raises(mm.errors.DamagedError):
        mm.distributed.verify(tmp_path / "1")


def test_of_a_folder_the_newest_whole_checkpoint_is_restored(tmp_path, capsys):
    """One line for each that is damaged; with none left the error. Other folders are not looked at."""
    for n in (8, 9, 10, 11):
        mm.distributed.save(tmp_path / "ck" / str(n), {"step": n})
    (tmp_path / "ck" / "logs").mkdir()
    assert mm.distributed.restore(tmp_path / "ck", {"step": 0}) == {"step": 11}
    (tmp_path / "ck" / "11" / shard_files.TABLE).unlink()
    (tmp_path / "ck" / "10" / "process-0.shards").write_bytes(b"1234567")
    assert mm.distributed.restore(tmp_path / "ck", {"step": 0}) == {"step": 9}
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"multimesh: .*/11/multimesh.json: missing; .*; going on from .*/ck/10", first)
    assert re.fullmatch(r"multimesh: .*/10/process-0.shards: shard \[\] of step: .*; going on from .*/ck/9", second)
    with pytest.raises(mm.UsageError, match="has step as int, `like` as float"):
        mm.distributed.restore(tmp_path / "ck", {"step": 0.0})
    for n in (8, 9):
        (tmp_path / "ck" / str(n) / "process-0.shards").unlink()
    with pytest.raises(mm.errors.DamagedError, match=r"/8/process-0.shards: .*No such file"):
        mm.distributed.restore(tmp_path / "ck", {"step": 0})


def test_a_newer_format_is_named(saved):
    file = saved / shard_files.TABLE
    data = file.read_bytes()
    file.write_bytes(shard_files.seal(data.partition(b"\n")[2], shard_files.FORMAT + 1))
    with pytest.raises(mm.UsageError, match=r"is of a newer MultiMesh \(format 3\)"):
        mm.distributed.restore(saved, state())
    file.write_bytes(data)


def test_an_error_says_whose_it_is():
    """That of process 1 of three is not told as another's; one that all have is nobody's."""
    wrong = ["MultiMeshError", "No space left on device", "n5"]
    assert agree._verdict([None, wrong, None])[1] == "process 1 of 3 (n5): No space left on device"
    assert agree._verdict([wrong, wrong]) == wrong[:2]
    assert agree._verdict([None, None]) == []


@pytest.mark.multiprocess
@pytest.mark.parametrize("trials", [5, pytest.param(200, marks=pytest.mark.full)])
def test_two_jobs_that_save_to_one_path_never_make_a_mixture(tmp_path, trials):
    """One has saved, the other is told; what lies there is whole, and of the one that has saved."""
    late = [late for _, late in damage.two_writers(tmp_path, trials)]
    assert any(late) or trials < 20  # most meet in the middle
    assert {p.name for p in tmp_path.iterdir()} == {str(n) for n in range(trials)}


def test_who_loses_to_a_faster_job_is_told_at_once(tmp_path, monkeypatch):
    """It does not wait for files of its own as if another machine had written them: the faster job has removed them."""
    write, path = shard_files.write, tmp_path / "step-1"

    def overtaken(file, *args):
        rows = write(file, *args)
        file.parent.rename(path)
        return rows

    monkeypatch.setattr(shard_files, "write", overtaken)
    monkeypatch.setattr(shard_files.time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(mm.UsageError, match="there is a checkpoint of another job, which was faster"):
        mm.distributed.save(path, {"w": np.ones(3)})


@pytest.mark.multiprocess
def test_files_of_other_machines_may_be_seen_late(tmp_path):
    """A file, and a folder: as on NFS, which keeps what it knew of a folder for a minute at most."""
    for ended in run(2, 1, CASES, f"seen_late:{tmp_path}", timeout=100):
        assert ended.code == 0, ended.err[-4000:]


def test_a_rename_that_was_done_and_is_called_failed_is_a_success(tmp_path, monkeypatch):
    """NFS asks twice where an answer is lost, and finds the old name gone."""
    rename = Path.rename

    def twice(half, path):
        rename(half, path)
        rename(half, path)

    monkeypatch.setattr(Path, "rename", twice)
    mm.distributed.save(tmp_path / "1", {"n": 1})
    assert mm.distributed.restore(tmp_path, {"n": 0}) == {"n": 1}

    def fail(half, path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(
        mm.MultiMeshError, match=r"save to .*/2: Input/output error: .*; there is no checkpoint of that"
    ):
        mm.distributed.save(tmp_path / "2", {"n": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("seed", range(8))
def test_a_rename_that_copies_file_by_file_and_is_killed_is_told(tmp_path, monkeypatch, capsys, seed):
    """As of a bucket that is mounted: what was copied is refused, and the checkpoint before it is taken."""
    tree = {"w": np.arange(1000.0), "n": 2}
    mm.distributed.save(tmp_path / "1", tree)
    rng = random.Random(seed)

    def copied(half, path):
        path.mkdir()
        files = rng.sample(sorted(half.iterdir()), seed % 3)  # of two files
        for file in files:
            (path / file.name).write_bytes(file.read_bytes())
        if files and rng.random() < 0.5:
            os.truncate(path / file.name, 100)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", copied)
    with pytest.raises(KeyboardInterrupt):
        mm.distributed.save(tmp_path / "2", tree)
    files = {path.name: path.stat().st_size for path in (tmp_path / "2").iterdir()}
    whole = len(files) == 2 and 100 not in files.values()
    if whole:
        assert_same(mm.distributed.restore(tmp_path / "2", tree), tree)
    else:
        with pytest.raises(mm.UsageError):
            mm.distributed.restore(tmp_path / "2", tree)
    assert_same(mm.distributed.restore(tmp_path, tree), tree)
    assert ("going on from" in capsys.readouterr().err) == (bool(files) and not whole)


def test_what_a_killed_job_left_is_removed_by_the_next_save(tmp_path):
    """That of a job of this machine when the save begins; that of another machine when it ends; other names never."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = os.uname().nodename
    for name in (f"1@{host}-{ended.pid}-00", "1@n9-7-00", "1.5@n9-7-00", "11@n9-7-00"):
        (tmp_path / f"{name}.half-written").mkdir()
    mm.distributed.save(tmp_path / "1", {"x": 1})
    left = {"1.5@n9-7-00.half-written", "11@n9-7-00.half-written"}
    assert {p.name for p in tmp_path.iterdir()} == {"1", *left}
    assert json.loads((tmp_path / "1" / shard_files.TABLE).read_bytes().partition(b"\n")[2])["leaves"] == {"x": "int"}
