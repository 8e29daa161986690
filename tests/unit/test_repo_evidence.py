"""The table of what ran on a stand-in, from a real run of pytest."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "2"), marks=pytest.mark.longer)], ids=["one process", "two workers"]
)
def test_the_table_has_each_stand_in(
    pytester: pytest.Pytester, root: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    pytester.makeini(f"[pytest]\nmarkers =\n    stand_in: x\npythonpath = {root}\n")
    pytester.makeconftest((root / "tests" / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(
        textwrap.dedent("""
        import pytest

        @pytest.fixture
        def breaks_after():
            yield
            raise RuntimeError

        @pytest.mark.stand_in("a toy | a model")
        def test_kept(): ...

        def test_broken(): raise RuntimeError

        def test_teardown(breaks_after): ...

        def test_skipped(): pytest.skip("no")
        """)
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    result = pytester.runpytest_subprocess(*options)
    wanted = r"| a toy \| a model | test_the_table_has_each_stand_in.py::test_kept | passed |"
    assert wanted in result.outlines
    assert sum("a toy" in line for line in result.outlines) == 1
    assert wanted in (pytester.path / "summary.md").read_text().splitlines()
