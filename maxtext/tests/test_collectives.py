"""Collectives in the kernels of MaxText pipelines, compiled for CPUs: no weights travel that nobody asked for."""

from __future__ import annotations

import pytest
from collective_table import CASES, Record, compile_cases, gathered_weights, shown, text

pytestmark = pytest.mark.longer


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return compile_cases(tmp_path_factory.mktemp("collectives"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: CASES[n])
def test_no_kernel_gathers_a_weight_unless_fsdp_asked(records: list[Record], number: int):
    record = records[number]
    assert record["error"] is None
    assert [*gathered_weights(record)] == []


def test_bytes_of_collectives_are_those_of_the_page(records: list[Record]):
    """Renew it with ``python maxtext/tests/collective_table.py`` where a change is meant."""
    assert text(records) == shown()
