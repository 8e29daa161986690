"""The library calls and hand-written kernels of a compiled program, from its HLO text."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping

from multimesh.observe.hlo import Computations

_CALL = re.compile(r'custom_call_target="([^"]+)"')
_FUSION = re.compile(r'"kind":"(__[\w$]+)"')


def count_custom_calls(program: Computations) -> Mapping[str, int]:
    """Return in how many places a program calls each kernel that is not of XLA's own loops.

    On GPUs ``__cublas$lt$matmul`` is a product of cuBLASLt, ``__cudnn$fmhaSoftmax`` an attention of cuDNN,
    ``__triton_nested_gemm_fusion`` a product by Triton.
    """
    texts = (op.text for operations in program.operations.values() for op in operations)
    found = collections.Counter(name for text in texts for name in (*_CALL.findall(text), *_FUSION.findall(text)))
    return dict(sorted(found.items()))
