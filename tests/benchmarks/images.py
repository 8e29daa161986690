"""What a rebuild costs: build.py beside the same `docker buildx build`, then one-line changes.

Needs the cache of an image that was built:

    .venv/bin/python tests/benchmarks/images.py --base-image IMAGE [--network host] [--rounds N]

Prints medians over rounds in turns, and what each change rebuilt. Processor time is that of the programs that were
started, not of the engine, which works the same for both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "multimesh" / "src" / "multimesh" / "__init__.py"
MAXTEXT = ROOT / "third_party" / "maxtext" / "src" / "maxtext" / "__init__.py"


class Cost(NamedTuple):
    """What a command took, in seconds."""

    wall: float
    processor: float


def cost(argv: list[str]) -> Cost:
    """Run a command that must succeed."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def change(file: Path, argv: list[str]) -> str:
    """Add a line to a file, build into the cache, say what was built, and take the line away."""
    before = file.read_bytes()
    try:
        file.write_bytes(before + f"\nA_LINE = {time.time_ns()}\n".encode())
        started = time.perf_counter()
        done = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True)
        took = time.perf_counter() - started
    finally:
        file.write_bytes(before)
    titles = dict(re.findall(r"^#(\d+) \[(\S+ \d+/\d+\] .*)$", done.stderr, re.MULTILINE))
    steps = [titles[number] for number in re.findall(r"^#(\d+) DONE", done.stderr, re.MULTILINE) if number in titles]
    return f"{took:.2f} s, built:\n" + "\n".join(f"  {step}" for step in steps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-image", required=True)
    parser.add_argument("--network", default="default", help="as for build.py")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    ours = [
        str(ROOT / "docker" / "build.py"),
        "--accelerator",
        "cpu",
        "--base-image",
        args.base_image,
        "--network",
        args.network,
        "--tag",
        "bench",
    ]
    told = subprocess.run([*ours, "--dry-run", "--json"], check=True, capture_output=True, text=True).stdout
    options = json.loads(told)["commands"][0]
    raw = ["docker", "buildx", *options[options.index("build") :]]
    cost(ours)
    with tempfile.TemporaryDirectory() as folder:
        raw[raw.index("--metadata-file") + 1] = f"{folder}/result"
        pairs = [(cost(raw), cost(ours)) for _ in range(args.rounds)]
    print(f"nothing changed, medians of {args.rounds} rounds, load average {os.getloadavg()[0]:.1f}:")
    for index, kind in enumerate(Cost._fields):
        plain, own = (statistics.median(each[index] for each in side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(two[index] / one[index] for one, two in pairs)
        print(f"  {kind}: docker buildx build {plain:.3f} s, build.py {own:.3f} s, median ratio {ratio:.2f}")
    print("one line in multimesh/:", change(LIBRARY, [*ours, "--validate", "none"]))
    print("one line in MaxText:", change(MAXTEXT, [*ours, "--validate", "none"]))


if __name__ == "__main__":
    main()
