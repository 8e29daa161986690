"""Does a checkpoint lie? Bytes that changed, files that are cut off or gone, and two jobs that save to one path.

``damage.py [--trials N] [--json]``. A trial flips a bit of a file of a checkpoint, cuts its end off, or deletes it, at
random. ``named``: it is told in one line with the name of the file; ``told``: in other words; ``harmless``: what is
restored is what was saved; ``silent``: it is not, and nobody says so. Orbax alone, without `mm.distributed.record`, is
beside it where it is installed. A trial of two writers starts two saves to one path: one has saved, the other is told,
and what is there is of one of them only, or the benchmark fails.
"""

from __future__ import annotations

import collections
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import report
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

LEAVES = 12
WRITER = """
import sys, numpy as np, multimesh as mm
own, leaves = map(int, sys.argv[1:])
tree = {str(n): np.full((32, 32), own) for n in range(leaves)}
for line in sys.stdin:
    try:
        mm.distributed.save(line.strip(), tree)
        print("saved", flush=True)
    except mm.UsageError as error:
        print(f"told: {error}", flush=True)
"""


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    options = report.parser(__doc__)
    options.add_argument("--trials", type=int, default=200)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"checkpoint of": name, "trials": args.trials} | damages(path, restore, args.trials)
            for name, path, restore in checkpoints(Path(folder))
        ]
        said = collections.Counter(late for _, late in two_writers(Path(folder) / "two", args.trials))
    told = {"told while it wrote": said[True], "told at its beginning": said[False]}
    report.show({"damage": rows, "two writers": [{"trials": args.trials} | told]}, args.json)


def state() -> dict[str, Any]:
    """Arrays over four devices, in several layouts."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    values = {f"w{n}": np.random.default_rng(n).normal(size=(40, 50)).astype(np.float32) for n in range(4)}
    specs = (P("a", "b"), P("b"), P(), P(None, "a"))
    return {
        name: jax.device_put(x, NamedSharding(mesh, spec))
        for (name, x), spec in zip(values.items(), specs, strict=True)
    }


def checkpoints(folder: Path) -> Iterator[tuple[str, Path, Callable[[], Any]]]:
    """Whose checkpoint it is, where it is, and what restores it after it was verified, if it is."""
    tree = state()
    ours = folder / "ours"
    mm.distributed.save(ours, tree)
    yield "mm.distributed.save", ours, lambda: mm.distributed.restore(ours, tree)
    try:
        from orbax.checkpoint import v1 as ocp
    except ModuleNotFoundError:
        return
    for name, recorded in (("Orbax, with mm.distributed.record", True), ("Orbax alone", False)):
        path = folder / f"orbax-{recorded}"
        ocp.save(path, tree)
        if recorded:
            mm.distributed.record(path)

        def restore(path: Path = path, recorded: bool = recorded) -> Any:
            if recorded:
                mm.distributed.verify(path)
            return ocp.load(path, tree)

        yield name, path, restore


def damage(path: Path, rng: random.Random) -> tuple[Path, bytes]:
    """Flip a bit of one of the files of a folder, cut its end off or delete it; return the file and what it had."""
    file = rng.choice(sorted(each for each in path.rglob("*") if each.is_file()))
    data = file.read_bytes()
    at, how = rng.randrange(len(data) or 1), rng.choice(["flip", "flip", "cut", "delete"])
    if how == "delete" or not data:
        file.unlink()
    else:
        flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        file.write_bytes(flipped if how == "flip" else data[:at])
    return file, data


def damages(path: Path, restore: Callable[[], Any], trials: int) -> report.Row:
    """How each of so many trials ended."""
    found = collections.Counter[str]()
    want = jax.tree.map(np.asarray, state())
    for seed in range(trials):
        file, data = damage(path, random.Random(seed))
        try:
            back = restore()
        except Exception as error:  # noqa: BLE001 - Orbax raises many kinds
            one_line = isinstance(error, mm.MultiMeshError) and "\n" not in str(error)
            found["named" if one_line and str(file) in str(error) else "told"] += 1
        else:
            same = all((np.asarray(back[name]) == x).all() for name, x in want.items())
            found["harmless" if same else "silent"] += 1
        file.write_bytes(data)
    return {name: found[name] for name in ("named", "told", "harmless", "silent")}


def two_writers(folder: Path, trials: int) -> Iterator[tuple[Path, bool]]:
    """Two processes save to one path: one has saved, the other is told, and what is there is whole and of the first.

    Yields the path, and whether the other one was told after it had begun to write.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(n), str(LEAVES)], env=env, stdin=-1, stdout=-1, text=True, bufsize=1
        )
        for n in (0, 1)
    ]
    try:
        for trial in range(trials):
            path = folder / str(trial)
            for writer in both:
                print(path, file=writer.stdin)
            said = [(writer.stdout or sys.stdin).readline().strip() for writer in both]
            winner = said.index("saved")
            there = r"(something already|a checkpoint of another job, which was faster)"
            if not re.fullmatch(rf"told: mm.distributed.save to {path}: there is {there}; give .*", said[1 - winner]):
                raise AssertionError(said)
            found = mm.distributed.restore(path, {str(n): np.zeros((32, 32), int) for n in range(LEAVES)})
            if not all((x == winner).all() for x in found.values()):
                raise AssertionError(f"{path} is a mixture")
            yield path, "another job" in said[1 - winner]
    finally:
        for writer in both:
            (writer.stdin or sys.stdout).close()
            writer.wait()


if __name__ == "__main__":
    main()
