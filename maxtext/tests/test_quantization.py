"""Quantization of a pipeline: the kinds that were compared with one program are taken, others refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from multimesh_maxtext.command import within_stage
from multimesh_maxtext.command.job import Job
from multimesh_maxtext.errors import FlagError, UnsupportedError


@pytest.mark.parametrize(
    "quantization",
    [
        *(f"quantization={kind} use_qwix_quantization=true" for kind in within_stage.QWIX),
        *(f"quantization={kind}" for kind in within_stage.AQT),
        "--tp 2 --microbatch-size 2 quantization=int8",
        "--tp 2 quantization=int8 use_qwix_quantization=true",
    ],
)
def test_a_pipeline_takes_quantization_that_was_compared(job: Callable[[Sequence[str]], Job], quantization: str):
    assert job(["--pp", "2", *quantization.split()])


@pytest.mark.parametrize(
    ("quantization", "remedy"),
    [
        ("quantization=int4", "add use_qwix_quantization=true"),
        ("quantization=int8 --model-name mixtral-8x7b", "add use_qwix_quantization=true"),
        ("quantization=intmp use_qwix_quantization=true quant_cfg_path=x", "use quantization=fp8_full"),
        ("quantization=fp8", "use quantization=fp8_full"),
        ("quantization=te_mxfp8", "use quantization=fp8_full"),
    ],
)
def test_another_is_refused_with_a_remedy(job: Callable[[Sequence[str]], Job], quantization: str, remedy: str):
    with pytest.raises(UnsupportedError, match=remedy) as raised:
        job(["--pp", "2", *quantization.split()])
    assert "\n" not in str(raised.value)


def test_aqt_cuts_the_rows_of_a_microbatch_by_the_devices(job: Callable[[Sequence[str]], Job]):
    with pytest.raises(FlagError, match=r"microbatch, 2, by 4 devices; use --microbatch-size 2 or use_qwix_q"):
        job(["--dp", "2", "--tp", "2", "--pp", "2", "quantization=int8"])
