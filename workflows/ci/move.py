"""The outcome of the move of a pin."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """The old and the new value of one pin; ``fault`` says why it stayed."""

    name: str
    old: str
    new: str
    fault: str = ""

    @property
    def line(self) -> str:
        """A row of the report's table."""
        old, new = (value.removeprefix("sha256:")[:12] for value in (self.old, self.new))
        outcome = " ".join(self.fault.split()).replace("|", "/") or "moved"
        return f"| {self.name} | {old} | {new} | {outcome} |"
