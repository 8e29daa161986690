"""Quantization of a pipeline: the kinds that were compared with one program are taken, others refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from multimesh_maxtext.command import within_stage
from multimesh_maxtext.command.checks import Job
from multimesh_maxtext.errors import UnsupportedError, UsageError


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
    ("quantization", "message"),
    [
        ("quantization=int4", r"=int4 yet: MaxText has it by Qwix alone; add use_qwix_quantization=true$"),
        (
            "quantization=intmp use_qwix_quantization=true quant_cfg_path=x",
            r"=intmp yet: with use_qwix_quantization=true MaxText quantizes nothing, and says nothing; use quant",
        ),
        ("quantization=intmp quant_cfg_path=x", r"=intmp yet: MaxText looks for the names of Linen modules, .*; use q"),
        (
            "quantization=int8 --model-name mixtral-8x7b",
            r"=int8 yet: MaxText cannot make experts with AQT; add use_qwix_quantization=true$",
        ),
        ("quantization=serve_fp8_weight", r"=serve_fp8_weight yet: its parameters have 8 bits, .* inference alone;"),
        ("quantization=fp8", r"=fp8 yet: MaxText has it without gradient accumulation .*; use quantization=fp8_full"),
        ("quantization=te_mxfp8", r"=te_mxfp8 yet: its kernels are TransformerEngine's for GPUs, .*; use quan"),
    ],
)
def test_another_is_refused_with_its_reason(job: Callable[[Sequence[str]], Job], quantization: str, message: str):
    with pytest.raises(UnsupportedError, match=message) as raised:
        job(["--pp", "2", *quantization.split()])
    assert "\n" not in str(raised.value)


def test_aqt_cuts_the_rows_of_a_microbatch_by_the_devices(job: Callable[[Sequence[str]], Job]):
    with pytest.raises(UsageError, match=r"microbatch, 2, by 4 devices; use --microbatch-size 2 or use_qwix_q"):
        job(["--dp", "2", "--tp", "2", "--pp", "2", "quantization=int8"])
