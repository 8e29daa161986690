"""docs/passes.md shows what the passes make of its example.

``python multimesh/tests/passes/test_docs.py --write`` renews the page; without ``--write`` it prints what it would be.
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
    """Return the dump of each pass that the page shows, by its name."""
    from programs import text

    import multimesh as mm

    results = {record.name: record.result for record in mm.jit(step).lower(*args).passes()}
    plan = results["build_plan"]
    return {"place_operations": text(results["place_operations"]), "build_plan": text(plan, *plan.instructions)}


def renew_dumps(page: str) -> str:
    """The page with the dumps that its example gives now."""
    names: dict[str, Any] = {}
    exec("\n".join(_PYTHON.findall(page)).replace("print(", "str("), names)
    texts = dumps(names["step"], names["params"], names["batch"])
    return _DUMP.sub(lambda m: f"{m['mark']}\n\n```text\n{texts[m['name']]}\n```\n", page)


def test_the_page_shows_the_real_dumps():
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("```text") == 2
    assert renew_dumps(page) == page, "run multimesh/tests/passes/test_docs.py --write and read the difference"


def test_the_page_lists_the_passes_in_order():
    from multimesh.passes.pipeline import PASSES

    table = PAGE.read_text(encoding="utf-8").partition("| passes |")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:])) == [*PASSES]


def main() -> None:
    """Print or renew the page."""
    page = renew_dumps(PAGE.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page, end="")


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "64", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    main()
