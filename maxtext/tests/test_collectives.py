"""Collectives in the kernels of MaxText pipelines, compiled for CPUs: no weights travel that nobody asked for."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from collective_table import CASES, FEW, TABLE, compile_cases, gathered_weights, load_table, table


@pytest.mark.parametrize(
    "cases",
    [pytest.param(FEW, marks=pytest.mark.longer, id="few"), pytest.param(CASES, marks=pytest.mark.full, id="all")],
)
def test_no_kernel_gathers_a_weight_unless_fsdp_asked(tmp_path: Path, cases: tuple[str, ...]):
    """Bytes are those on file: renew them with ``python maxtext/tests/collective_table.py`` if that is meant."""
    records = compile_cases(tmp_path, cases)
    assert [record["error"] for record in records] == [None] * len(cases)
    assert [line for record in records for line in gathered_weights(record)] == []
    tables = load_table()[TABLE]
    assert list(tables) == list(CASES)
    assert table(records) == {case: tables[case] for case in cases}
    assert load_table()["jax"] == version("jax")
