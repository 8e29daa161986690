"""The dumps in docs/passes.md, made from the example that the page shows.

``python multimesh/tests/passes/dumps.py --write`` renews the page; without ``--write`` it prints what it would become.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "passes.md"
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DUMP = re.compile(r"(?P<mark><!-- dump: (?P<name>\w+) -->)\n(\n```text\n.*?\n```\n)?", re.DOTALL)


def dumps(step: Any, *args: Any) -> dict[str, str]:
    """Name of each pass to the dump of what it makes of ``step(*args)``."""
    from multimesh.passes.fragment import fragment
    from multimesh.passes.loops import fuse, separate
    from multimesh.passes.place import place
    from multimesh.passes.planning import OrderedLoop, arrange, build
    from multimesh.passes.recompute import keep_less
    from multimesh.passes.stages import stages
    from programs import inlined, text

    from multimesh import ir

    traced = inlined(step, *args)
    fused = fuse(traced)
    separated = separate(fused)
    placed, homes = place(separated)
    loop = next(item for item in placed.items if isinstance(item, ir.Loop))
    results = set(ir.values([*(s.leaf for s in loop.sums), *loop.stacks.values()]))
    fragments = fragment(loop.ops, results, phased=True)
    parts = arrange(placed)
    ordered = next(part.order for part in parts if isinstance(part, OrderedLoop))
    rows = [" ".join(f"{ordered.stages[s].phase}{ordered.stages[s].number}.{k}" for s, k in ordered.cells)]
    plan = build(placed, homes, parts)
    return {
        "inline": text(traced),
        "fuse": text(fused),
        "separate": text(separated),
        "place": text(placed),
        "fragment": text(*fragments),
        "recompute": text(*keep_less(stages(fragments, results).fragments, results)),
        "order": text(*rows, *(s.fragment for s in ordered.stages)),
        "planning": text(plan, *plan.instructions),
    }


def renewed(page: str) -> str:
    """The page with the dumps that its example gives now."""
    names: dict[str, Any] = {}
    exec("\n".join(_PYTHON.findall(page)).replace("print(", "str("), names)
    made = dumps(names["step"], names["params"], names["batch"])
    return _DUMP.sub(lambda m: f"{m['mark']}\n\n```text\n{made[m['name']]}\n```\n", page)


def main() -> None:
    """Print or renew the page."""
    page = renewed(PAGE.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page, end="")


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "64", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    main()
