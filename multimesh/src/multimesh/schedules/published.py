"""Every published schedule, in the order in which they are compared."""

from __future__ import annotations

from multimesh.schedules.gpipe import GPipe, LoopedBFS
from multimesh.schedules.one_f_one_b import EagerOneFOneB, Interleaved, KimiK2, OneFOneB
from multimesh.schedules.table import Schedule
from multimesh.schedules.v_shaped import ZBV, DualPipeV
from multimesh.schedules.wavefront import PrefetchWavefront, Wavefront
from multimesh.schedules.zero_bubble import ZBH1, ZBH2, InterleavedZB

PUBLISHED: tuple[Schedule, ...] = (
    *(GPipe(), LoopedBFS(), OneFOneB(), EagerOneFOneB(), Interleaved(), KimiK2()),
    *(ZBH1(), ZBH2(), InterleavedZB(), ZBV(), DualPipeV(), Wavefront(), PrefetchWavefront()),
)
