"""Checkpoints that cannot lie: bytes that changed, files that are gone, two jobs that save to one path."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.processes import agree, shard_files
from pipelines import assert_same

import multimesh as mm


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


def damaged(path: Path, seed: int) -> tuple[Path, bytes]:
    """Flip a bit of one of the files, cut its end off or delete it; return the file and what it had."""
    rng = random.Random(seed)
    file = rng.choice(sorted(path.iterdir()))
    data = file.read_bytes()
    at, how = rng.randrange(len(data)), rng.choice(["flip", "flip", "truncate", "delete"])
    if how == "delete":
        file.unlink()
    else:
        flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        file.write_bytes(flipped if how == "flip" else data[:at])
    return file, data


def test_no_damage_is_silent(saved):
    """200 of them, in all files: each is one line with the name of the file, from `restore` and from `verify`."""
    tree = state()
    for seed in range(200):
        file, data = damaged(saved, seed)
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
    file.write_bytes(shard_files._sealed(data.partition(b"\n")[2], shard_files.FORMAT + 1))
    with pytest.raises(mm.UsageError, match=r"is of a newer MultiMesh \(format 3\)"):
        mm.distributed.restore(saved, state())
    file.write_bytes(data)


def test_an_error_says_whose_it_is():
    """That of process 1 of three is not told as another's; one that all have is nobody's."""
    wrong = ["MultiMeshError", "No space left on device", "n5"]
    assert agree._verdict([None, wrong, None])[1] == "process 1 of 3 (n5): No space left on device"
    assert agree._verdict([wrong, wrong]) == wrong[:2]
    assert agree._verdict([None, None]) == []


WRITER = """
import sys, numpy as np, multimesh as mm
own = int(sys.argv[1])
tree = {str(n): np.full((32, 32), own) for n in range(12)}
for line in sys.stdin:
    try:
        mm.distributed.save(line.strip(), tree)
        print("saved", flush=True)
    except mm.UsageError as error:
        print(f"told: {error}", flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("trials", [5, pytest.param(200, marks=pytest.mark.full)])
def test_two_jobs_that_save_to_one_path_never_make_a_mixture(tmp_path, trials):
    """One has saved, the other is told; what lies there is whole, and of the one that has saved."""
    argv, env = [sys.executable, "-c", WRITER], os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    start = [subprocess.Popen([*argv, str(n)], env=env, stdin=-1, stdout=-1, text=True, bufsize=1) for n in (0, 1)]
    late = 0
    try:
        for trial in range(trials):
            path = tmp_path / str(trial)
            for writer in start:
                writer.stdin.write(f"{path}\n")
            said = [writer.stdout.readline().strip() for writer in start]
            winner = said.index("saved")
            loser = said[1 - winner]
            there = r"(something already|a checkpoint of another job, which was faster)"
            assert re.fullmatch(rf"told: mm.distributed.save to {path}: there is {there}; give .*", loser)
            late += "another job" in loser
            found = mm.distributed.restore(path, {str(n): np.zeros((32, 32), int) for n in range(12)})
            assert all((x == winner).all() for x in found.values()), trial
    finally:
        for writer in start:
            writer.stdin.close()
            writer.wait()
    assert late or trials < 20  # most meet in the middle
    assert {p.name for p in tmp_path.iterdir()} == {str(n) for n in range(trials)}


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
