"""docs/passes.md shows what the passes make."""

import re

import dumps
from multimesh.passes.pipeline import PASSES

PAGE = dumps.PAGE.read_text(encoding="utf-8")


def test_the_page_shows_the_real_dumps():
    assert PAGE.count("```text") == 2
    assert dumps.renewed(PAGE) == PAGE, "run multimesh/tests/passes/dumps.py --write and read the difference"


def test_the_page_lists_the_passes_in_order():
    table = PAGE.partition("| passes |")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:])) == [*PASSES]
