"""Checkpoints that cannot lie: bytes that changed, files that are gone, two jobs that save to one path."""

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
from multimesh.state.checkpoints import TREE
from pipelines import assert_same

import multimesh as mm

LEAVES = 12
WRITER = """
import sys, numpy as np, multimesh as mm
value, leaves = map(int, sys.argv[1:])
tree = {str(n): np.full((32, 32), value) for n in range(leaves)}
for line in sys.stdin:
    try:
        mm.distributed.save(line.strip(), tree)
        print("saved", flush=True)
    except mm.UsageError as error:
        print(f"told: {error}", flush=True)
"""


def damage(path: Path, rng: random.Random) -> tuple[Path, bytes]:
    """Flip a bit of one of the files of a folder, cut its end off or delete it; return the file and what it had."""
    file = rng.choice(sorted(file for file in path.rglob("*") if file.is_file()))
    data = file.read_bytes()
    at, how = rng.randrange(len(data) or 1), rng.choice(["flip", "flip", "cut", "delete"])
    if how == "delete" or not data:
        file.unlink()
    else:
        flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        file.write_bytes(flipped if how == "flip" else data[:at])
    return file, data


def state():
    """Shards of several shapes on several devices, values on the host, a key of random numbers."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    w = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    at = {name: NamedSharding(mesh, spec) for name, spec in (("w", P("a", "b")), ("m", P("b")), ("v", P()))}
    placed = {name: jax.device_put(w, layout) for name, layout in at.items()}
    return placed | {"step": 7, "host": np.arange(5), "scalar": np.float32(3), "rng": jax.random.key(1)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "1"
    mm.distributed.save(path, state())
    return path


@pytest.mark.longer
def test_no_damage_is_silent(checkpoint):
    """200 of them, in all files: each is one line with the name of the file, from `restore` and from `verify`."""
    tree = state()
    for seed in range(200):
        file, data = damage(checkpoint, random.Random(seed))
        for read in (lambda: mm.distributed.restore(checkpoint, tree), lambda: mm.distributed.verify(checkpoint)):
            with pytest.raises(mm.errors.DamagedError, match=re.escape(str(file))) as error:
                read()
            assert "\n" not in str(error.value), seed
        file.write_bytes(data)
    mm.distributed.verify(checkpoint)
    assert_same(mm.distributed.restore(checkpoint, tree), tree)


def test_of_a_folder_the_newest_whole_checkpoint_is_restored(tmp_path, capsys):
    """One line for each that is damaged; with none left the error. Other folders are not looked at."""
    for n in (8, 9, 10, 11):
        mm.distributed.save(tmp_path / "ck" / str(n), {"step": n})
    (tmp_path / "ck" / "logs").mkdir()
    assert mm.distributed.restore(tmp_path / "ck", {"step": 0}) == {"step": 11}
    (tmp_path / "ck" / "11" / TREE).unlink()
    (tmp_path / "ck" / "10" / "step" / "0").write_bytes(b"1234567")
    assert mm.distributed.restore(tmp_path / "ck", {"step": 0}) == {"step": 9}
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"multimesh: .*/11/_METADATA: No such file or directory; .*; going on from .*/ck/10", first)
    assert re.fullmatch(r"multimesh: .*/10/step/0: the file has 7 bytes in .* 8; .*; going on from .*/ck/9", second)
    with pytest.raises(mm.UsageError, match="has step as int, `like` as float"):
        mm.distributed.restore(tmp_path / "ck", {"step": 0.0})
    for n in (8, 9):
        (tmp_path / "ck" / str(n) / "step" / "0").unlink()
    with pytest.raises(mm.errors.DamagedError, match=r"/8/step/0: .*No such file"):
        mm.distributed.restore(tmp_path / "ck", {"step": 0})


@pytest.mark.multiprocess
@pytest.mark.parametrize("trials", [5, pytest.param(200, marks=pytest.mark.full)])
def test_two_jobs_that_save_to_one_path_never_make_a_mixture(tmp_path, trials):
    """One has saved, the other is told; what lies there is whole, and of the one that has saved."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(n), str(LEAVES)], env=env, stdin=-1, stdout=-1, text=True, bufsize=1
        )
        for n in (0, 1)
    ]
    try:
        for trial in range(trials):
            path = tmp_path / str(trial)
            for writer in both:
                print(path, file=writer.stdin)
            logs = [(writer.stdout or sys.stdin).readline().strip() for writer in both]
            winner = logs.index("saved")
            assert re.fullmatch(rf"told: mm.distributed.save to {path}: there is something .*", logs[1 - winner]), logs
            restored = mm.distributed.restore(path, {str(n): np.zeros((32, 32), int) for n in range(LEAVES)})
            assert all((x == winner).all() for x in restored.values())
    finally:
        for writer in both:
            (writer.stdin or sys.stdout).close()
            writer.wait()
    assert {p.name for p in tmp_path.iterdir() if p.name.isdigit()} == {str(n) for n in range(trials)}


def test_what_cannot_be_renamed_is_told_and_removed(tmp_path, monkeypatch):
    def fail(half, path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(mm.MultiMeshError, match=r"Input/output error: .*; there is no checkpoint of that"):
        mm.distributed.save(tmp_path / "2", {"n": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(8))
def test_a_rename_that_copies_file_by_file_and_is_killed_is_told(tmp_path, monkeypatch, seed):
    """As of a bucket that is mounted: what was copied is refused, and the checkpoint before it is taken."""
    tree = {"w": np.arange(1000.0), "n": 2}
    mm.distributed.save(tmp_path / "1", tree)
    rng = random.Random(seed)

    def copy_files(half, path):
        path.mkdir()
        files = sorted(file for file in half.rglob("*") if file.is_file())
        for file in rng.sample(files, min(seed, len(files))):
            copy = path / file.relative_to(half)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(file.read_bytes())
            if rng.random() < 0.2:
                os.truncate(copy, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", copy_files)
    with pytest.raises(KeyboardInterrupt):
        mm.distributed.save(tmp_path / "2", tree)
    complete = seed == 7 and all(path.stat().st_size > 1 for path in (tmp_path / "2").rglob("*") if path.is_file())
    if complete:
        assert_same(mm.distributed.restore(tmp_path / "2", tree), tree)
    else:
        with pytest.raises(mm.UsageError):
            mm.distributed.restore(tmp_path / "2", tree)
    assert_same(mm.distributed.restore(tmp_path, tree), tree)


def test_what_a_killed_job_left_is_removed_by_the_next_save(tmp_path):
    """The save removes it when it ends, and never other names."""
    for name in ("1@n9-7-00", "1.5@n9-7-00", "11@n9-7-00"):
        (tmp_path / f"{name}.half-written").mkdir()
    mm.distributed.save(tmp_path / "1", {"x": 1})
    leftovers = {"1.5@n9-7-00.half-written", "11@n9-7-00.half-written"}
    assert {p.name for p in tmp_path.iterdir()} == {"1", *leftovers}
