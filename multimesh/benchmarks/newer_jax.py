"""Say whether a newer JAX makes the pipeline's step slower, from two runs of step.py on one machine.

    python multimesh/benchmarks/newer_jax.py OLD.json NEW.json

OLD and NEW are what ``step.py --json`` printed on each. A row's ratio is the CPU time of our step by that of one SPMD
program; rows of one machine go up and down by a tenth, so their median decides. Exit code 1: it rose by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import report

LIMIT = 1.1


def compare(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[report.Row], float]:
    """Return the rows of both runs side by side, and the median of new by old."""
    table = "CPU time of a step"
    names = ("size", "pp", "schedule")
    rows = []
    for one, other in zip(old["tables"][table], new["tables"][table], strict=True):
        of = {name: one[name] for name in names}
        ratios = {f"old, {old['jax']}": one["ratio"], f"new, {new['jax']}": other["ratio"]}
        rows.append({**of, **ratios, "new by old": other["ratio"] / one["ratio"]})
    return rows, statistics.median(row["new by old"] for row in rows)


def main() -> int:
    """Print both runs, and a line that says how they compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    old, new = (json.loads(file.read_text(encoding="utf-8")) for file in (args.old, args.new))
    rows, change = compare(old, new)
    report.show({"CPU time of a step, by that of one SPMD program": rows}, as_json=False)
    worse = change > LIMIT
    begin, end = (
        ("error: ", f", above {LIMIT}: see docs/performance.md, Each kernel's own choice") if worse else ("", "")
    )
    text = (
        f"on jax {new['jax']} the ratio is {change:.2f} of that on jax {old['jax']}, by the median of {len(rows)} rows"
    )
    print(f"{begin}{text}{end}")
    return int(worse)


if __name__ == "__main__":
    raise SystemExit(main())
