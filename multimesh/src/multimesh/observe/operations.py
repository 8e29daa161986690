"""The operations of the matrix products of a compiled program, from its HLO text."""

from __future__ import annotations

import math
import re

from multimesh.observe.hlo import Computations, read_arrays

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[\]}]')


def product_operations(program: Computations) -> float:
    """Return the operations of all products on a device in one run of a program, two for each multiplication.

    Products are those of XLA, Triton and cuBLAS. Attention of cuDNN is none.
    """
    own: dict[str, float] = {}
    for name, operations in program.operations.items():
        types = {op.name: op.type for op in operations}
        for op in operations:
            if op.kind not in ("dot", "custom-call") or not (contracted := _CONTRACTED.search(op.text)):
                continue
            (_, result), (_, left) = (next(read_arrays(types[each])) for each in (op.name, op.first))
            along = [int(n) for n in contracted[1].replace('"', "").split(",") if n]
            own[name] = own.get(name, 0.0) + 2.0 * math.prod(result) * math.prod(left[d] for d in along)
    return sum(own.get(name, 0.0) * times for name, times in program.runs())
