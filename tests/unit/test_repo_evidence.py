"""The table of what ran: from a real report of pytest, and one clear error where there is none."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from workflows import cli, errors

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_the_table_has_each_outcome_and_stand_in(
    pytester: pytest.Pytester, root: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
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
    pytester.runpytest_subprocess("--junitxml", "report.xml", *options)
    capsys.readouterr()
    assert cli.main(["ci", "evidence", str(pytester.path / "report.xml")]) == 0
    _, _, total, *lines = capsys.readouterr().out.splitlines()
    assert total.startswith("1 error, 1 failure, 1 passed, 1 skipped; ")
    rows = [line.partition("::")[2] for line in lines if "::" in line and "a toy" not in line]
    assert sorted(rows) == ["test_broken | failure |", "test_skipped | skipped |", "test_teardown | error |"]
    (used,) = (line for line in lines if "a toy" in line)
    assert used.startswith(r"| a toy \| a model | ")
    assert used.endswith("::test_kept | passed |")


@pytest.mark.parametrize("content", [None, "", "<testsuite><testcase/></testsuite>"])
def test_what_is_no_report_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "report.xml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert cli.main(["ci", "evidence", str(path)]) == errors.ReportError.exit_code
    assert f"{path}: is no report of pytest" in capsys.readouterr().err
