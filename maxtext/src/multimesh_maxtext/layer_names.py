"""How MaxText names the decoder's layers in its train state: ``layers_3``, ``layers_0_3`` for a stack of four."""

from __future__ import annotations

KINDS = ("layers", "dense_layers", "moe_layers", "scanned_blocks")


def split(name: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the kind of the layers and their numbers; ``None`` for a name of anything else.

    One layer has one number, a stack those of its first and its last layer, and a stack of all layers none.
    """
    kind, numbers = name, tuple[int, ...]()
    while (parts := kind.rpartition("_"))[2].isdecimal():
        kind, numbers = parts[0], (int(parts[2]), *numbers)
    return (kind, numbers) if kind in KINDS and len(numbers) <= 2 else None
