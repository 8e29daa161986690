"""What `schedules.validate` refuses, and how custom tables are written."""

import json
import re

import pytest

import multimesh as mm
from multimesh import schedules

NAMES = [["F0", "F0", "B0", "B0"], ["F1", "B1", "F1", "B1"]]
PAIRS = [[(0, "F0"), (1, "F0"), (0, "B0"), (1, "B0")], [(0, "F1"), (0, "B1"), (1, "F1"), (1, "B1")]]


def assert_refused(rows, message, backward=True):
    with pytest.raises(mm.UsageError, match=re.escape(message)):
        schedules.validate(schedules.custom(rows).rows, 2, 1, 2, backward)


def test_a_custom_table_names_cells_in_the_order_of_their_microbatches_or_gives_pairs():
    assert schedules.custom(NAMES) == schedules.custom(PAIRS)
    schedules.validate(schedules.custom(NAMES).rows, 2, 1, 2)


def test_a_custom_table_can_come_from_a_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(PAIRS))
    assert schedules.load(path) == schedules.custom(NAMES)


def test_a_custom_table_without_backward():
    table = schedules.custom(NAMES).table(2, 1, 2, False)
    assert table == schedules.custom([["F0", "F0"], ["F1", "F1"]]).rows
    schedules.validate(table, 2, 1, 2, backward=False)


def test_a_custom_table_with_weight_gradients():
    split = schedules.custom([["F0", "B0", "W0"], ["F1", "B1", "W1"]])
    assert split.splits
    assert not schedules.custom(NAMES).splits
    schedules.validate(split.rows, 2, 1, 1)


def test_a_custom_table_says_where_each_stage_lives():
    """Row by row; rows in another order than the first stages of them, or a stage in two rows, are the usual way."""
    v = schedules.custom([["F0", "F3", "B3", "B0"], ["F1", "F2", "B2", "B1"]])
    assert v.placement(2) == (0, 1, 1, 0)
    schedules.validate(v.rows, 2, 2, 1, placement=v.placement(2))
    assert schedules.custom(NAMES).placement(2) == (0, 1)
    assert schedules.custom([["F0", "F2"], ["F1", "F3"]]).placement(2) == (0, 1)
    assert schedules.custom([["F1"], ["F0"]]).placement(2) == (0, 1)
    with pytest.raises(mm.UsageError, match="submesh 0, position 1: F3 of microbatch 0: stage 3 runs on submesh 1"):
        schedules.validate(v.rows, 2, 2, 1)


REFUSED = {  # rows, what is said, and whether the loop has a backward
    "too few rows": (NAMES[:1], "1 rows, but there are 2 submeshes; give one row for each"),
    "a missing cell": ([["F0", "F0", "B0"], NAMES[1]], "B0 of microbatch 1 is missing; it belongs in the row of subme"),
    "W of one stage": ([["F0", "B0", "W0", "F0", "B0", "W0"], NAMES[1]], "W1 of microbatch 0 is missing"),
    "a cell twice": (
        [[*PAIRS[0], (0, "F0")], PAIRS[1]],
        "submesh 0, position 4: F0 of microbatch 0: it stands at position 0 already; leave one out",
    ),
    "a microbatch too many": (
        [[*NAMES[0], "F0"], NAMES[1]],
        "submesh 0, position 4: F0 of microbatch 2: there is no such microbatch",
    ),
    "no such stage": (
        [["F2"], NAMES[1]],
        "submesh 0, position 0: F2 of microbatch 0: there is no such stage; the loop has stages",
    ),
    "a stage in the wrong row": (
        [["F0", "F1"], NAMES[1]],
        "submesh 0, position 1: F1 of microbatch 0: stage 1 runs on submesh 1; move it",
    ),
    "no backward": (NAMES, "submesh 0, position 2: B0 of microbatch 0: unknown phase 'B'; phases are F only", False),
    "a backward before its forward": (
        [PAIRS[0], [(0, "B1"), (0, "F1"), (1, "F1"), (1, "B1")]],
        "submesh 1, position 0: B1 of microbatch 0 waits for F1 of microbatch 0, which comes later in the same",
    ),
    "a deadlock": (
        [[(0, "F0"), (0, "B0"), (1, "F0"), (1, "B0")], [(1, "F1"), (1, "B1"), (0, "F1"), (0, "B1")]],
        "deadlock: submesh 0, position 1: B0 of microbatch 0 waits for B1 of microbatch 0 (submesh 1, position 3); "
        "submesh 1, position 0: F1 of microbatch 1 waits for F0 of microbatch 1 (submesh 0, position 2)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_loop_can_run_is_refused_with_its_place(case):
    assert_refused(*REFUSED[case])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("F0", "expected a list of rows, one for each submesh, got 'F0'"),
        (3, "expected a list of rows, one for each submesh, got 3"),
        (["F0 B0"], "submesh 0: expected a list of names or pairs, got 'F0 B0'"),
        ([["F0", "G0"]], "submesh 0, position 1: 'G0': not a cell; write F, B or W and the number of the stage"),
        ([[(0, "stage0")]], "submesh 0, position 0: (0, 'stage0'): not a cell"),
        ([["F0", (0, "B0")]], "submesh 0, position 1: (0, 'B0'): names and pairs (microbatch, name) in one row"),
        ([[("F0", 0)]], "submesh 0, position 0: ('F0', 0): expected a name as 'F0' or a pair (microbatch, name)"),
        ([[7]], "submesh 0, position 0: 7: expected a name"),
    ],
)
def test_what_is_no_table(rows, message):
    with pytest.raises(mm.UsageError, match=re.escape(message)):
        schedules.custom(rows)


def test_a_file_that_is_no_table_is_named(tmp_path):
    path = tmp_path / "table.json"
    with pytest.raises(mm.UsageError, match=r"table\.json: No such file"):
        schedules.load(path)
    path.write_text("[[")
    with pytest.raises(mm.UsageError, match=r"table\.json: not JSON"):
        schedules.load(path)
    path.write_text('{"rows": 3}')
    with pytest.raises(mm.UsageError, match=r"table\.json: custom schedule: submesh 0: expected a list"):
        schedules.load(path)
