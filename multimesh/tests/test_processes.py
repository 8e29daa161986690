"""One plan over several real processes of this machine, each with CPU devices of its own: see `process_cases`.

All cases of a layout (processes x devices) run in one set of processes, which the first test of the layout starts.
"""

import functools
from pathlib import Path

import pytest
from spawning import run

CASES = Path(__file__).with_name("process_cases.py")
TRANSPORTS = ("pull", "device_put")
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "wavefront", "prefetch-wavefront")
OTHERS = ("looped-bfs", "interleaved", "kimi-k2", "zb-h2", "interleaved-zb", "zb-v", "dualpipe-v")

SHORT = {
    (2, 1): (
        "pipeline:halves:mlp:1f1b",
        "training:halves",
        "stacked:halves",
        "typed:pipeline",
        "retrace:halves",
        "dtypes:None",
        "arguments:None",
        "parallelized",
        "transformed",
        "threads",
        "analyses",
        "profiled:halves:100",
        *(f"transports:{name}" for name in TRANSPORTS),
        "arguments:device_put",
        "uneven_compilation:3",
        "not_in_it",
        "disagreement",
        "graphs:0:4",
    ),
    (2, 2): (
        "pipeline:halves:transformer:zb-h1",
        "pipeline:halves:mlp:zb-v",
        "pipeline:one in all:skip:gpipe",
        "training:crossed",
        "stacked:crossed",
        "typed:task",
        "typed:crossed",
        "nans:crossed",
        "graphs:100:2",
    ),
}
MODELS = ("mlp", "skip", "dropout", "transformer")
FULL = {
    (2, 1): (
        *(f"pipeline:halves:{model}:{schedule}" for model in MODELS for schedule in SCHEDULES),
        *(f"pipeline:halves:mlp:{schedule}" for schedule in OTHERS),
        "pipeline:backwards:mlp:1f1b:outside",
        "dtypes:device_put",
        *(f"profiled:halves:0:{name}" for name in TRANSPORTS),
        "graphs:1000:150",
    ),
    (2, 2): (
        *(f"pipeline:{split}:mlp:{schedule}" for split in ("crossed", "halves", "quarters") for schedule in SCHEDULES),
        *(f"pipeline:{split}:transformer:1f1b" for split in ("two to one", "one to two", "other axes", "crossed")),
        *(f"transports:{name}" for name in TRANSPORTS),
        *(f"dtypes:{name}" for name in TRANSPORTS),
        "pipeline:quarters:moe:1f1b",
        "training:quarters",
        "stacked:quarters",
        *(f"profiled:{split}:-100" for split in ("quarters", "crossed")),
        "uneven_compilation:20",
        "graphs:2000:150",
    ),
    (4, 1): (
        *(f"pipeline:quarters:{model}:1f1b" for model in MODELS),
        *(f"pipeline:quarters:mlp:{schedule}" for schedule in (*SCHEDULES, *OTHERS)),
        *(f"transports:{name}" for name in TRANSPORTS),
        "pipeline:halves:transformer:zb-h1",
        "profiled:quarters:100",
        "training:quarters",
        "not_in_it",
        "disagreement",
        "graphs:3000:100",
    ),
    (2, 4): (
        *(f"pipeline:{split}:transformer:1f1b" for split in ("crossed", "halves", "quarters", "one in all")),
        "training:crossed",
        "dtypes:None",
        "arguments:None",
        "parallelized",
        "graphs:4000:100",
    ),
}


@functools.cache
def run_cases(layout, full):
    """Cases that every process of a layout finished, in order, and what it said where it did not."""
    cases = (FULL if full else SHORT)[layout]
    processes = run(*layout, CASES, *cases, timeout=3000 if full else 240)
    lines = [[line for line in e.out.splitlines() if line.startswith("done ")] for e in processes]
    case_sets = [{line.removeprefix("done ").rpartition(" ")[0] for line in output} for output in lines]
    failed = [f"process {rank} ended with {e.code}:\n{e.err[-4000:]}" for rank, e in enumerate(processes) if e.code]
    return set.intersection(*case_sets), "\n".join(failed)


def _params():
    for full, table in ((False, SHORT), (True, FULL)):
        for layout, cases in table.items():
            for case in cases:
                marks = [pytest.mark.multiprocess, *([pytest.mark.full, pytest.mark.timeout(3600)] if full else [])]
                yield pytest.param(layout, case, full, marks=marks, id=f"{layout[0]}x{layout[1]} {case}")


@pytest.mark.parametrize(("layout", "case", "full"), [*_params()])
def test_in_processes(layout, case, full):
    cases, failed = run_cases(layout, full)
    assert case in cases, failed
