"""The library calls and hand-written kernels of a compiled program, from its HLO text."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping

_CALL = re.compile(r'custom_call_target="([^"]+)"')
_FUSION = re.compile(r'"kind":"(__[\w$]+)"')


def custom_calls(hlo: str) -> Mapping[str, int]:
    """Return in how many places a program calls each kernel that is not of XLA's own loops.

    ``hlo``: optimized HLO, as ``as_text()`` of a compiled function gives it. On GPUs ``__cublas$lt$matmul`` is a
    product of cuBLASLt, ``__cudnn$fmhaSoftmax`` an attention of cuDNN, ``__triton_nested_gemm_fusion`` a product by
    Triton.
    """
    return dict(sorted(collections.Counter([*_CALL.findall(hlo), *_FUSION.findall(hlo)]).items()))
