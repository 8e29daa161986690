"""docs/passes.md shows what the passes make."""

import dumps
import jax
import pytest


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="the page shows the equations that jax 0.10 makes")
def test_the_page_shows_the_real_dumps():
    page = dumps.PAGE.read_text(encoding="utf-8")
    assert page.count("```text") == 7
    assert dumps.renewed(page) == page, "run multimesh/tests/passes/dumps.py --write and read the difference"
