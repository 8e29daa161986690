"""Pipelines of many kinds, each against one program of the same MaxText: some for every change, the grid for `full`."""

from __future__ import annotations

import re
from pathlib import Path

import grid
import pytest
from parity import METRICS, Result, compare

pytestmark = [pytest.mark.longer, pytest.mark.timeout(3600)]  # one fixture trains all cases

_EXPERTS = "decoder_block=mixtral num_experts=4 base_moe_mlp_dim=32"
CASES = {
    "llama 1f1b fsdp sgd": "--fsdp 2 --pp 2 --num-layers 2 --remat full opt_type=sgd",
    "llama interleaved sequence-parallel scanned tied": (
        "--tp 2 --sequence-parallel --pp 2 --interleave 2 --num-layers 8 --scan-layers --remat save_out_proj "
        "logits_via_embedding=true opt_type=adam_pax"
    ),
    "llama custom four stages dropout": (
        "--pp 4 --num-layers 4 --schedule custom --custom-schedule-path TABLE dropout_rate=0.1"
    ),
    "llama auto uneven": "--dp 2 --pp 2 --num-layers 3 --schedule auto",
    "llama interleaved uneven scanned": "--dp 2 --pp 2 --interleave 2 --num-layers 7 --scan-layers",
    "gpt3 zb-h1 dp tied": (
        "--dp 2 --pp 2 --schedule zb-h1 --num-layers 2 --remat minimal_offloaded decoder_block=gpt3 "
        "logits_via_embedding=true"
    ),
    "gpt3 gpipe interleaved tp scanned": (
        "--tp 2 --pp 2 --schedule gpipe --interleave 2 --num-layers 4 --scan-layers decoder_block=gpt3"
    ),
    "gpt3 zb-h1 cp tied": (
        "--cp 2 --pp 2 --schedule zb-h1 --num-layers 2 --remat minimal_offloaded decoder_block=gpt3 "
        "logits_via_embedding=true"
    ),
    "llama cp": "--cp 2 --pp 2 --num-layers 2",
    "mixtral wavefront ep": f"--ep 2 --pp 2 --schedule wavefront --num-layers 2 sparse_matmul=false {_EXPERTS}",
    "mixtral prefetch-wavefront sparse dp scanned": (
        f"--dp 2 --pp 2 --schedule prefetch-wavefront --num-layers 4 --scan-layers megablox=false {_EXPERTS}"
    ),
    "deepseek dense first": grid.UNLIKE["deepseek"],
}
MIXTURES = [name for name, flags in CASES.items() if "num_experts" in flags]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Of the cases that were asked for, in two processes."""
    items = (item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function))
    names = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    cases = {name: f"--cpus 4 {flags} dtype=float32" for name, flags in CASES.items() if name in names}
    return compare(cases, tmp_path_factory.mktemp("parity"))


@pytest.mark.telling("gpt3 zb-h1 cp tied", "llama interleaved sequence-parallel scanned tied")
@pytest.mark.parametrize("name", [name for name in CASES if name not in MIXTURES])
def test_a_dense_pipeline_trains_as_one_program(results: dict[str, Result], name: str):
    result = results[name]
    assert result.error is None
    assert len(result.steps) == len(result.parameters) == 20
    assert max(map(result.gap, METRICS)) <= 1e-5
    assert result.parameter_gap <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_has_the_losses_of_one_program(results: dict[str, Result], name: str):
    result = results[name]
    assert result.error is None
    assert len(result.steps) == 20
    assert max(map(result.gap, METRICS[:3])) <= 1e-5


@pytest.mark.telling("llama interleaved sequence-parallel scanned tied-2-pieces0")
@pytest.mark.parametrize(
    ("name", "stages", "pieces"),
    [
        (
            "llama interleaved sequence-parallel scanned tied",
            2,
            ["layers_0_1", "layers_2_3", "layers_4_5", "layers_6_7"],
        ),
        ("llama custom four stages dropout", 4, ["layers_0", "layers_1", "layers_2", "layers_3"]),
        ("mixtral prefetch-wavefront sparse dp scanned", 2, ["layers_0_1", "layers_2_3"]),
        ("deepseek dense first", 4, ["dense_layers_0", "moe_layers_0", "moe_layers_1", "moe_layers_2"]),
    ],
)
def test_every_array_lies_on_its_stage_only(results: dict[str, Result], name: str, stages: int, pieces: list[str]):
    """Pieces and layers are dealt to the stages in turn; so are their moments and random numbers."""
    size = 4 // stages
    devices = [list(range(first, first + size)) for first in range(0, 4, size)]
    created, stepped = results[name].placement["created"], results[name].placement["stepped"]
    assert created == stepped
    for number, piece in enumerate(pieces):
        arrays = {path: on for path, on in created.items() if f"['{piece}']" in path}
        assert {kind for kind in ("'model'", "'mu'", "'nu'") if any(kind in path for path in arrays)} >= {
            "'model'",
            "'mu'",
        }
        assert [path for path, on in arrays.items() if on != devices[number % stages]] == []
    others = {path: on for path, on in created.items() if not re.search(r"layers_\d", path)}
    assert [
        path for path, on in others.items() if on != devices[-1 if "decoder_norm" in path or "logits" in path else 0]
    ] == []


@pytest.mark.full
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("section", grid.SECTIONS)
def test_the_grid_agrees(section: str, tmp_path_factory: pytest.TempPathFactory):
    by_case = grid.train(section, tmp_path_factory.mktemp("grid"))
    assert grid.SECTIONS[section]
    faults = {case: result for case, result in by_case.items() if not grid.agrees(case, result)}
    assert not faults, grid.table(section, faults, origin="")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_combinations_agree_closely(tmp_path: Path):
    cases = {name: f"{flags} dtype=float32" for name, flags in grid.COMBINED.items()}
    results = compare(cases, tmp_path, steps=4)
    assert {name: result.error for name, result in results.items() if result.error} == {}
    gaps = {name: max(map(result.gap, METRICS[:3])) for name, result in results.items()}
    assert {name: gap for name, gap in gaps.items() if gap > grid.CLOSE} == {}, gaps
