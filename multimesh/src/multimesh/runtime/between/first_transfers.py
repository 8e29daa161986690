"""First transfers between processes, before a plan runs. They have a time limit: NCCL and TCP may wait for ever.

A call of XLA that waits cannot be interrupted, so a thread of its own makes it. No later transfer is watched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import jax
import numpy as np

from multimesh.core import _compat
from multimesh.errors import LostProcessError
from multimesh.processes import agree
from multimesh.processes.liveness import name_process
from multimesh.runtime.actions import ProcessTransfer, process_transfers
from multimesh.runtime.between.transports import Key, Transport
from multimesh.runtime.resharding import Copy, Resharding

Transfers = list[ProcessTransfer]
_PIECE = jax.ShapeDtypeStruct((1 << 14,), np.float32)  # more than a packet: some networks lose only large ones


def try_transfers(transport: Transport, transfers: Iterable[ProcessTransfer], key: Key) -> None:
    """Send something small between each two devices that sent nothing yet. Both processes of each pair call it.

    Raises ``LostProcessError`` if something does not arrive within the timeout ``transfer``; names the two processes
    and the remedy.
    """
    new = dict.fromkeys((piece.copy.source, piece.copy.target) for transfer in transfers for piece in transfer.pieces)
    pairs = [pair for pair in new if pair not in transport.tried]
    me, limit = jax.process_index(), agree.seconds_of("transfer")
    every = process_transfers([Resharding((), (), tuple(Copy(source, 0, target, 0) for source, target in pairs))])
    transfers = sorted((t for t in every if transport.everyone or me in (t.source, t.target)), key=_turn)
    if not transfers:
        return
    at: Transfers = []
    failed: list[Exception] = []
    thread = threading.Thread(
        target=_send_all, args=(transport, transfers, key, at, failed), name="multimesh-first-transfers", daemon=True
    )
    thread.start()
    thread.join(limit)
    if not thread.is_alive() and not failed:
        transport.tried.update(pairs)
        return
    how = f"failed: {_first_line(failed[0])}" if failed else f"did not arrive within {limit:.0f} s"
    wait = "" if failed else f"; a longer transfer_timeout ({agree.timeout_variable('transfer')}) waits longer"
    source, target = name_process(at[-1].source), name_process(at[-1].target)
    raise LostProcessError(
        f"the first transfer from {source} to {target} {how}; {transport.advice(at[-1].source)}{wait}"
    ) from (failed[0] if failed else None)


def _turn(transfer: ProcessTransfer) -> tuple[int, int, int]:
    """Return the order in which all processes connect: along a chain every second pair first, to shorten waits."""
    low, distance = min(transfer.source, transfer.target), abs(transfer.source - transfer.target)
    return low // distance % 2, transfer.source, transfer.target


def _send_all(transport: Transport, transfers: Transfers, key: Key, at: Transfers, failed: list[Exception]) -> None:
    """Make the transfers; the last of ``at`` is the one under way."""
    me, zeros, came = jax.process_index(), np.zeros(_PIECE.shape, _PIECE.dtype), []
    try:
        with _compat.explicit_transfers():
            for transfer in transfers:
                at.append(transfer)
                sent = transfer.pieces if transfer.source == me else ()
                pieces = {piece: jax.device_put(zeros, piece.copy.source) for piece in sent}
                came.append(transport.connect([transfer], [_PIECE])(key, pieces))
            for transfer, arrays in zip(transfers, came, strict=True):
                at.append(transfer)
                jax.block_until_ready([*arrays.values()])
    except Exception as error:  # noqa: BLE001 - `try_transfers` raises it
        failed.append(error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
