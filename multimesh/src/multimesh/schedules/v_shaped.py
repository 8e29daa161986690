"""V shapes: each submesh has stage ``s`` of the first half of the model, and stage ``2 p - 1 - s`` across from it.

A microbatch goes down the submeshes and comes back up. Its backward begins where its forward began: submesh 0 has the
first and the last stage, and all submeshes hold about as many activations.

ZB-V: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, and "Pipeline Parallelism with Controllable Memory", 2024.
DualPipeV: DualPipe of DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, cut in half: Sea AI Lab, "DualPipe could be
better without the Dual", 2025.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from multimesh.schedules.table import Cell, Schedule


@dataclass(frozen=True)
class VShaped(Schedule):
    """Base class of the V shapes. ``words`` make a row for enough microbatches; those beyond ``m`` are left out."""

    splits: ClassVar[bool] = True
    chunks: ClassVar[int | None] = 2
    usual: ClassVar[int] = 2

    def placement(self, submeshes: int) -> tuple[int, ...]:
        """Down and up again: ``0, 1, ..., p - 1, p - 1, ..., 1, 0``."""
        return (*range(submeshes), *reversed(range(submeshes)))

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterator[Cell]:
        """The cells of the words: ``F0`` is the next forward of the first stage, ``B1`` a backward of the last."""
        stage = {"0": rank, "1": 2 * submeshes - 1 - rank}
        times: collections.Counter[str] = collections.Counter()
        for word in self.words(rank, submeshes, max(microbatches, 2 * submeshes)):
            if times[word] < microbatches:
                yield Cell(word[0], stage[word[1]], times[word])
            times[word] += 1

    def words(self, rank: int, submeshes: int, microbatches: int) -> Iterable[str]:
        """The row of a submesh, for at least ``2 p`` microbatches."""
        raise NotImplementedError


@dataclass(frozen=True)
class ZBV(VShaped):
    """No submesh waits once it has begun, if F, B and W take the same time; in the memory of 1F1B's first submesh.

    Every submesh holds at most ``p`` microbatches: ``2 p`` activations of its two half-sized stages. As in `ZBH2` the
    next step fills the gaps before the begin and after the end.
    """

    name: ClassVar[str] = "zb-v"

    def words(self, rank: int, submeshes: int, microbatches: int) -> Iterable[str]:
        """Forwards until the V is full; then a forward, a backward and its W of either stage in turn; W at the end."""
        up = submeshes - rank
        extra = microbatches - 2 * submeshes + rank + 1  # forwards of the first stage that the fill leaves
        fill = ["F0"] * (2 * up - 1) + ["F1", "F0"] * rank + ["F1", "B1", "W1"] * up
        turns = ["F0", "B0", "W0", "F1", "B1", "W1"] * extra + ["B0", "W0", "F1", "B1", "W1"] * (up - 1)
        return fill + turns + ["B0", "B1"] * rank + ["B0", "W0"] * up + ["W1"] * rank + ["W0"] * rank


@dataclass(frozen=True)
class DualPipeV(VShaped):
    """A forward of one stage beside a backward of the other, in turn, so that experts have time to exchange tokens.

    Every submesh holds at most ``p + 1/2`` microbatches. `ZBV` waits less if F, B and W take the same time. In the
    steady state this schedule splits no backward, and starts fewer kernels.
    """

    name: ClassVar[str] = "dualpipe-v"

    def words(self, rank: int, submeshes: int, microbatches: int) -> Iterable[str]:
        """Fill the V, run forwards beside backwards of the other stage, drain it; the last W come late."""
        behind = submeshes - rank - 1
        one, other = ["F0", "B1", "W1"], ["F1", "B0", "W0"]
        fill = ["F0"] * (2 * behind) + ["F0", "F1"] * (rank + 1) + ["B1", "W1", "F1"] * behind
        turns = (one + other) * (microbatches - 2 * submeshes + rank + 1) + ["B1", "W1", *other] * behind
        pairs = ["B1", "B0"] * (rank + 1)
        drain = [word for b in pairs[: rank + 1] for word in (b, b.replace("B", "W"))] + pairs[rank + 1 :]
        late = [b.replace("B", "W") for b in pairs[rank + 1 :] + ["B0"] * behind]
        drain += [word for w in late[:behind] for word in (w, "B0")] + late[behind:]
        return fill + turns + drain
