"""The bytes of collectives in the kernels of small MaxText pipelines, and collectives.json, which has them.

``python maxtext/tests/collective_table.py`` compiles all cases for virtual CPU devices and renews the file.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parity import ROOT, run_cases, small_job

from multimesh.observe.hlo import KINDS
from multimesh_maxtext.command.job import find_maxtext

FILE = Path(__file__).with_name("collectives.json")
TABLE = "kB of results on a device in one run of a kernel"
SIZES = "--model-dims 64 --mlp-dims 192 --sequence-length 48 --microbatch-size 2"  # no two arrays are of one shape
_ALONE = "--num-layers 2"
_EXPERTS = "decoder_block=mixtral num_experts=4 base_moe_mlp_dim=192 sparse_matmul=false"
CASES = (
    f"--dp 2 --tp 2 --pp 2 {_ALONE}",
    f"--dp 2 --tp 2 --sequence-parallel --pp 2 {_ALONE}",
    f"--dp 2 --tp 2 --sequence-parallel --pp 2 {_ALONE} --schedule zb-h1",
    f"--dp 2 --tp 2 --sequence-parallel --pp 2 {_ALONE} decoder_block=gpt3",
    "--dp 2 --tp 2 --sequence-parallel --pp 2 --num-layers 4 --scan-layers --remat full",
    f"--tp 4 --sequence-parallel --pp 2 --remat full {_ALONE}",
    "--dp 2 --tp 2 --sequence-parallel --pp 2 --interleave 2 --num-layers 4",
    f"--fsdp 2 --tp 2 --pp 2 {_ALONE}",
    f"--cp 2 --tp 2 --pp 2 {_ALONE}",
    f"--ep 2 --tp 2 --pp 2 {_ALONE} {_EXPERTS}",
)
"""Flags of `maxtext/run.py`, beside `SIZES` and ``--cpus 8``."""

FEW = (CASES[1], CASES[7], CASES[9])
"""For every change: sequence parallelism, shards of weights, experts."""

SHARDS_WEIGHTS = frozenset(("fsdp", "fsdp_transpose", "context", "expert"))
"""Axes over which a user asks for parameters to be gathered: ``--fsdp``, and ``--cp`` and ``--ep``, which shard so."""

_MATRIX = 4096  # elements; biases and scales are smaller

Record = dict[str, Any]


def compile_cases(folder: Path, cases: Iterable[str] = CASES) -> list[Record]:
    """Compile the kernels of some cases; see trainings.py for what is told of each."""
    jobs = {case: small_job([*SIZES.split(), "--cpus", "8", *case.split()], 2, folder) for case in cases}
    return run_cases("compile", jobs, folder / "kernels", find_maxtext(ROOT))


def gathered_weights(record: Record) -> Iterator[str]:
    """Yield the collectives in the loop of a case that make an array of a parameter's shape and nobody asked for."""
    matrices = {_sorted(shape) for shape in record["parameters"] if math.prod(shape) >= _MATRIX}
    for kernel in record["kernels"]:
        for op in kernel["collectives"] if kernel["looped"] else ():
            weight_axes = SHARDS_WEIGHTS.intersection(op["axes"])
            if not weight_axes and not matrices.isdisjoint(map(_sorted, op["shapes"])):
                yield f"{kernel['name']}: {op['kind']} {op['shapes']} over {', '.join(op['axes'])}"


def _sorted(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(n for n in shape if n > 1))


def rows(record: Record) -> dict[str, dict[str, int]]:
    """Return the bytes of each kind of collective in each kernel of the loop."""
    totals: dict[str, dict[str, int]] = {}
    for kernel in record["kernels"]:
        if kernel["looped"]:
            total = totals.setdefault(kernel["name"], dict.fromkeys(KINDS, 0))
            for op in kernel["collectives"]:
                total[op["kind"]] += op["bytes"]
    return totals


def table(records: Iterable[Record]) -> dict[str, Any]:
    """Return kB of results on a device in one run of each kernel, by case, kernel and kind."""
    return {
        record["name"]: {
            name: {kind: round(size / 1000, 1) for kind, size in total.items() if size}
            for name, total in rows(record).items()
        }
        for record in records
    }


def load_table() -> dict[str, Any]:
    """Return the tables on file."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def main() -> None:
    """Renew the file."""
    with tempfile.TemporaryDirectory(prefix="collectives-") as folder:
        records = compile_cases(Path(folder))
    tables = {"jax": version("jax"), TABLE: table(records)}
    FILE.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
