"""Tables of the schedules, as the papers draw them."""

import functools
import itertools

import pytest

import multimesh as mm
from multimesh import schedules

GRID = tuple(itertools.product(range(1, 6), range(1, 4), range(1, 12)))  # submeshes, chunks, microbatches


def draw(schedule, submeshes, microbatches, backward=True, chunks=1):
    """One line a submesh: phase and microbatch; with several chunks phase, stage and microbatch."""
    table = schedules.get(schedule).table(submeshes, chunks, microbatches, backward)
    return [" ".join(f"{c.phase}{f'{c.stage}.' * (chunks > 1)}{c.microbatch}" for c in row) for row in table]


def chunks_of(name, chunks):
    """``chunks``, or the only number that the schedule has."""
    return schedules.get(name).chunks or chunks


def count_alive(row, end="B"):
    """The most (stage, microbatch) between their forward and the phase that ends their use."""
    return max(itertools.accumulate({"F": 1, end: -1}.get(c.phase, 0) for c in row))


DRAWN = {  # schedule, submeshes, microbatches, chunks
    ("gpipe", 2, 3, 1): ["F0 F1 F2 B0 B1 B2"] * 2,
    ("1f1b", 3, 4, 1): ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    ("1f1b", 3, 1, 1): ["F0 B0"] * 3,
    ("eager-1f1b", 3, 5, 1): [
        "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ],
    ("interleaved", 2, 4, 2): [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ],
    ("zb-h1", 3, 4, 1): [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ],
    ("zb-h2", 3, 6, 1): [
        "F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5",
        "F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5",
    ],
    ("interleaved-zb", 2, 2, 2): [
        "F0.0 F0.1 F2.0 F2.1 B2.0 W2.0 B2.1 W2.1 B0.0 W0.0 B0.1 W0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 W3.0 B1.0 W3.1 B1.1 W1.0 W1.1",
    ],
    ("zb-v", 2, 4, 2): [
        "F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 B3.1 W3.1 F0.3 B0.0 W0.0 F3.2 B3.2 W3.2 B0.1 W0.1 F3.3 B3.3 W3.3 "
        "B0.2 W0.2 B0.3 W0.3",
        "F1.0 F2.0 F1.1 F2.1 B2.0 W2.0 F1.2 B1.0 W1.0 F2.2 B2.1 W2.1 F1.3 B1.1 W1.1 F2.3 B2.2 W2.2 "
        "B1.2 B2.3 B1.3 W1.2 W2.3 W1.3",
    ],
    ("dualpipe-v", 2, 4, 2): [
        "F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 F0.3 B3.1 W3.1 F3.2 B0.0 W0.0 B3.2 W3.2 F3.3 B0.1 W0.1 "
        "B3.3 W3.3 B0.2 W0.2 B0.3 W0.3",
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 W2.0 F2.2 B1.0 W1.0 F1.3 B2.1 W2.1 F2.3 B1.1 W1.1 "
        "B2.2 W2.2 B1.2 W1.2 B2.3 B1.3 W2.3 W1.3",
    ],
    ("wavefront", 2, 4, 1): ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    ("wavefront", 2, 4, 2): [
        "F0.0 F0.1 F2.0 F2.1 B2.0 F0.2 B2.1 F0.3 B0.0 F2.2 B0.1 F2.3 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 F1.2 B1.1 F1.3 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ],
}


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_tables_are_as_the_papers_draw_them(case):
    name, submeshes, microbatches, chunks = case
    assert draw(name, submeshes, microbatches, chunks=chunks) == DRAWN[case]


@pytest.mark.parametrize(
    ("name", "other", "chunks"),
    [
        ("eager-1f1b", "interleaved", 2),
        ("interleaved", "1f1b", 1),
        ("1f1b", "interleaved", 2),
        ("interleaved-zb", "zb-h1", 1),
        ("looped-bfs", "gpipe", 2),
        ("prefetch-wavefront", "wavefront", 2),
    ],
)
def test_with_these_stages_a_schedule_is_another_one(name, other, chunks):
    assert draw(name, 3, 5, chunks=chunks) == draw(other, 3, 5, chunks=chunks)


def test_interleaved_with_a_remainder_has_larger_groups():
    (row, _) = schedules.get("interleaved").table(2, 2, 5, True)
    forwards = [(c.stage, c.microbatch) for c in row if c.phase == "F"]
    assert forwards == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (0, 3), (0, 4), (2, 3), (2, 4)]


def test_kimi_k2_is_interleaved_with_a_forward_more_first():
    first, kimi = (schedules.get(name).table(3, 2, 6, True) for name in ("interleaved", "kimi-k2"))
    for rank, (row, other) in enumerate(zip(first, kimi, strict=True)):
        warm = [next(i for i, c in enumerate(cells) if c.phase == "B") for cells in (row, other)]
        assert warm[1] == warm[0] + 1, rank
        assert [[c for c in row if c.phase == p] for p in "FB"] == [[c for c in other if c.phase == p] for p in "FB"]


def test_a_v_goes_down_and_up_again():
    """One submesh has the first and the last stage; a microbatch comes back to it, and its backward begins there."""
    assert schedules.get("zb-v").placement(3) == schedules.get("dualpipe-v").placement(3) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("p", range(1, 6))
def test_wavefronts_start_p_microbatches_and_the_next_p_half_the_tasks_later(p):
    """One forward and one backward a submesh and front, each a front after what it needs; the formula for the peaks."""
    schedule = schedules.get("wavefront")
    for v, m in itertools.product(range(1, 4), range(1, 12)):
        stages, front = p * v, functools.partial(schedule.front, submeshes=p, chunks=v)
        assert [front(schedules.Cell("F", 0, i)) for i in range(m)] == [stages * (i // p) + i % p for i in range(m)]
        table = schedule.table(p, v, m, True)
        for rank, row in enumerate(table):
            assert [front(c) for c in row] == sorted(front(c) for c in row)
            assert len({(front(c), c.phase) for c in row}) == len(row)
            most = min(m * v, p * (v + 1) - 2 * (rank + 1) + (rank == p - 1))
            assert count_alive(row) <= most
            assert count_alive(row) == most or m % p
        for cell in itertools.chain(*table):
            ahead = [front(cell) - front(need) for need in schedules.needs(cell, stages)]
            # The forward and the backward of the last stage are one task.
            assert min(ahead, default=1) == (0 if (cell.phase, cell.stage) == ("B", stages - 1) else 1)


@pytest.mark.parametrize("name", schedules.names())
def test_forward_only(name):
    chunks = chunks_of(name, 1)
    rows = [row.split() for row in draw(name, 2, 3, backward=False, chunks=chunks)]
    assert [len(row) for row in rows] == [3 * chunks] * 2
    assert {cell[0] for row in rows for cell in row} == {"F"}


@pytest.mark.parametrize("name", schedules.names())
def test_every_table_is_valid(name):
    for submeshes, chunks, microbatches in GRID:
        chunks = chunks_of(name, chunks)
        for backward in (True, False):
            table = schedules.get(name).table(submeshes, chunks, microbatches, backward)
            on = schedules.get(name).placement(submeshes)
            schedules.validate(table, submeshes, chunks, microbatches, backward, on)


def test_live_activations_are_bounded():
    """Each is that of one stage and microbatch; residuals that are held until W count."""
    for p, chunks, m in GRID:
        for r in range(p):

            def peak(name, end="B", v=1, p=p, m=m, r=r):
                return count_alive(schedules.get(name).table(p, v, m, True)[r], end)

            assert peak("gpipe", v=chunks) == chunks * m
            assert peak("1f1b") == min(p - r, m)
            assert peak("eager-1f1b") == min(2 * (p - r) - 1, m)
            assert peak("zb-h1", "W") == min(p, m)
            assert peak("zb-h2", "W") == min(2 * p - 1, m)
            assert peak("zb-v", "W", 2) <= 2 * min(p, m)
            assert peak("zb-v", "W", 2) == 2 * p or m < 2 * p
            assert peak("dualpipe-v", "W", 2) <= 2 * p + 1
            assert peak("dualpipe-v", "W", 2) == 2 * p + 1 or m < 2 * p
            assert peak("looped-bfs", v=chunks) == chunks * m
            if chunks > 1:
                group = -(-m // max(1, m // p))  # p, where it divides m
                assert peak("interleaved", v=chunks) <= 2 * (p - r - 1) + (chunks - 1) * group + 1
                assert peak("kimi-k2", v=chunks) <= 2 * (p - r) + (chunks - 1) * group
                assert peak("interleaved-zb", "W", v=chunks) <= (chunks - 1) * group + p


@pytest.mark.parametrize(
    ("name", "chunks", "message"),
    [
        ("zb-h1", 2, "has one stage a submesh, but the loop has 2; use interleaved"),
        ("zb-h2", 3, "has one stage a submesh, but the loop has 3; use interleaved"),
        ("zb-v", 1, "has two stages a submesh, but the loop has 1; use 1f1b or zb-h1"),
        ("dualpipe-v", 4, "has two stages a submesh, but the loop has 4; use interleaved"),
    ],
)
def test_a_number_of_stages_that_a_schedule_has_no_table_for(name, chunks, message):
    with pytest.raises(mm.UsageError, match=f"{name} {message}"):
        schedules.get(name).table(2, chunks, 4, True)


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_table_of_nothing_is_refused(shape):
    with pytest.raises(mm.UsageError, match="each must be at least 1"):
        schedules.get("1f1b").table(*shape, True)


def test_names():
    assert schedules.get("fill-drain") == schedules.get("gpipe")
    assert schedules.get(schedules.get("1f1b")) is schedules.get("1f1b")
    assert set(schedules.names()) == {
        *("gpipe", "fill-drain", "looped-bfs", "1f1b", "eager-1f1b", "interleaved", "kimi-k2", "wavefront"),
        *("zb-h1", "zb-h2", "interleaved-zb", "zb-v", "dualpipe-v", "prefetch-wavefront"),
    }
    with pytest.raises(mm.UsageError, match=r"unknown schedule 'zbv'; did you mean zb-v\? known: gpipe, "):
        mm.schedules.get("zbv")
    with pytest.raises(mm.UsageError, match="unknown schedule 'zigzag'; known: gpipe, "):
        schedules.get("zigzag")
    with pytest.raises(mm.UsageError, match="unknown schedule 'custom'; give the table"):
        schedules.get("custom")
