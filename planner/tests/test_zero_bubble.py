"""Bubble rates and throughput of the zero-bubble paper, beside those of our simulator."""

import pytest
import zero_bubble


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.full if row.stages * row.microbatches > 4000 else ())
        for row in zero_bubble.ROWS
        if row.schedule not in zero_bubble.LEFT_OUT
    ],
    ids=str,
)
def test_the_bubble_rates_of_the_zero_bubble_paper(row):
    """Its cost is the longest stage's."""
    assert zero_bubble.bubble_rate(row) == pytest.approx(row.rate, abs=1e-4)


@pytest.mark.longer
def test_the_throughput_of_the_zero_bubble_paper():
    """Transfers that block and the update of the parameters explain what was measured; nothing is fitted."""
    for row in (row for row in zero_bubble.ROWS if row.throughput):
        assert zero_bubble.throughput(row) == pytest.approx(row.throughput, rel=0.05), row


@pytest.mark.longer
def test_the_interleaved_rates_of_the_paper_have_p_transfers_less():
    for row in (row for row in zero_bubble.ROWS if row.schedule == "1F1B-I"):
        assert zero_bubble.bubble_rate(row, saved=row.stages * row.transfer) == pytest.approx(row.rate, abs=1e-4)
