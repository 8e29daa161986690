"""How long training pauses for a checkpoint: a save that is waited for, and one in the background, in turns.

``saving.py [--megabytes M] [--rounds N] [--folder DIR] [--json]``. A step multiplies and donates its state, as training
does. ``pause`` is the time that the call takes; ``steps`` the number of steps that end while the bytes are written;
``complete`` the time from the call until the checkpoint is whole. All are medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import report
from multimesh.checkpoints import background

import multimesh as mm

LEAVES = 16


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--megabytes", type=int, default=200)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--folder", type=Path, help="where checkpoints are written; by default a temporary folder")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        report.show({f"{args.megabytes} MB": measured(Path(folder), args.megabytes, args.rounds)}, args.json)


def measured(folder: Path, megabytes: int, rounds: int) -> list[report.Row]:
    """Both ways to save, in turns; the first round is not counted."""
    shape = (megabytes * 250_000 // LEAVES // 500, 500)
    state = {f"w{n}": jax.random.normal(jax.random.key(n), shape) for n in range(LEAVES)}
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 0.999 + jnp.sin(x), state), donate_argnums=0)
    found: dict[bool, list[tuple[float, float, float, int]]] = {False: [], True: []}
    for number in range(rounds + 1):
        for beside, times in found.items():
            state = jax.block_until_ready(step(state))
            path, start, used = folder / f"{number}-{beside}", time.perf_counter(), time.thread_time()
            mm.distributed.save(path, state, background=beside)
            pause, used, steps = time.perf_counter() - start, time.thread_time() - used, 0
            while background.busy():
                state = jax.block_until_ready(step(state))
                steps += 1
            mm.distributed.wait_for_save()
            if number:
                times.append((pause, used, time.perf_counter() - start, steps))
    names = ("pause s", "CPU s of the caller", "complete s", "steps")
    return [
        {"save": "in the background" if beside else "waited for"}
        | dict(zip(names, map(statistics.median, zip(*times, strict=True)), strict=True))
        for beside, times in found.items()
    ]


if __name__ == "__main__":
    main()
