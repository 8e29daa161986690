"""The truth ledger: what counts as run, and that README claims nothing else."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from workflows import cli, errors, ledger

pytest_plugins = ["pytester"]
CLAIM = re.compile(r"<!-- promise: (.+?) -->", re.DOTALL)


def record(
    text: str, outcome: str = "passed", test: str = "tests/test_a.py::test_a", stand_in: str | None = None
) -> ledger.Record:
    return ledger.Record(ledger.Promise(text, stand_in), test, outcome, 0.1, "abc", "2026-01-01", None)


def states(declared: list[str], records: list[ledger.Record]) -> dict[str, str]:
    listed = ledger.entries([ledger.Promise(text) for text in declared], {}, records)
    return {entry.promise.text: entry.state for entry in listed}


def test_a_promise_is_run_only_when_every_recorded_test_of_it_passed() -> None:
    records = [
        record("kept"),
        record("broken in one case"),
        record("broken in one case", "failed", test="tests/test_a.py::test_a[2]"),
        record("skipped", "skipped"),
        record("on a stand-in", stand_in="a local server"),
        record("nobody declares this any more"),
    ]
    assert states(["kept", "broken in one case", "skipped", "on a stand-in", "no result"], records) == {
        "kept": ledger.RUN,
        "broken in one case": ledger.FAILED,
        "skipped": ledger.NEVER,
        "on a stand-in": ledger.STAND_IN,
        "no result": ledger.NEVER,
    }


def test_what_is_rendered_reads_back_with_bars_in_sentences() -> None:
    listed = ledger.entries(
        [ledger.Promise("a | b"), ledger.Promise("c")], {"never": "no GPU"}, [record("a | b"), record("c", "failed")]
    )
    assert ledger.parse(ledger.render(listed)) == {
        "a | b": ledger.RUN,
        "c": ledger.FAILED,
        "never": ledger.NEVER,
    }


def test_a_later_run_replaces_the_outcome_of_the_same_test_and_keeps_the_others(tmp_path: Path) -> None:
    results = tmp_path / "build" / "ledger.json"
    ledger.merge_results(results, [record("p", "failed"), record("q")])
    ledger.merge_results(results, [record("p")])
    assert {r.promise.text: r.outcome for r in ledger.read_results(results)} == {"p": "passed", "q": "passed"}


def test_results_of_tests_that_are_gone_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_a(): ...\n", encoding="utf-8")
    here, renamed, deleted = (
        record("p", test=name) for name in ("test_a.py::test_a[1]", "test_a.py::test_b", "test_c.py::test_a")
    )
    assert ledger.living([here, renamed, deleted], tmp_path) == (here,)


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99, "records": []}', '{"format": 1, "records": [{}]}'])
def test_an_unreadable_results_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(errors.LedgerError, match=r"ledger\.json: .*record it again"):
        ledger.read_results(path)


def test_a_promise_must_be_a_literal_sentence(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    source = "import pytest\n\n@pytest.mark.promise(SENTENCE)\ndef test_x(): ...\n"
    (tmp_path / "tests" / "test_x.py").write_text(source, encoding="utf-8")
    with pytest.raises(errors.LedgerError, match=r"tests/test_x\.py:3: promise takes one literal sentence"):
        ledger.declared_promises(tmp_path)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_the_recorder_writes_each_outcome(
    pytester: pytest.Pytester, root: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(root))
    pytester.makeconftest((root / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers =\n    promise: x\n")
    pytester.makepyfile(
        textwrap.dedent("""
        import pytest

        @pytest.fixture
        def breaks_after():
            yield
            raise RuntimeError

        @pytest.mark.promise("kept", stand_in="a toy")
        def test_kept(): ...

        @pytest.mark.promise("broken")
        def test_broken(): raise RuntimeError

        @pytest.mark.promise("broken at teardown")
        def test_teardown(breaks_after): ...

        @pytest.mark.promise("skipped")
        def test_skipped(): pytest.skip("no")

        def test_without_promise(): ...
        """)
    )
    pytester.runpytest_subprocess("--ledger", "results.json", *options)
    records = ledger.read_results(pytester.path / "results.json")
    assert {r.promise.text: r.outcome for r in records} == {
        "kept": "passed",
        "broken": "failed",
        "broken at teardown": "failed",
        "skipped": "skipped",
    }
    assert {r.promise.stand_in for r in records if r.promise.text == "kept"} == {"a toy"}


def test_readme_claims_only_what_was_run(root: Path) -> None:
    claims = [" ".join(text.split()) for text in CLAIM.findall((root / "README.md").read_text(encoding="utf-8"))]
    listed = ledger.parse((root / ledger.VALIDATION).read_text(encoding="utf-8"))
    assert claims
    assert {claim: listed.get(claim, "no promise") for claim in claims} == dict.fromkeys(claims, ledger.RUN)


def test_check_refuses_a_page_that_does_not_list_todays_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = ledger.entries([ledger.Promise("gone")], {}, [record("gone")])
    (tmp_path / "docs").mkdir()
    (tmp_path / ledger.VALIDATION).write_text(ledger.render(listed), encoding="utf-8")
    (tmp_path / ledger.UNTESTED).write_text("needs a GPU: there is none\n", encoding="utf-8")
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    assert cli.main(["ledger", "--check"]) == errors.LedgerError.exit_code
    out, err = capsys.readouterr()
    assert out.splitlines() == ["gone: gone", "missing: needs a GPU"]
    assert err.startswith("error: docs/validation.md")
