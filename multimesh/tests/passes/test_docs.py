"""docs/passes.md shows what the passes make."""

import dumps


def test_the_page_shows_the_real_dumps():
    page = dumps.PAGE.read_text(encoding="utf-8")
    assert page.count("```text") == 7
    assert dumps.renewed(page) == page, "run multimesh/tests/passes/dumps.py --write and read the difference"
