"""Names the parts of JAX that moved, by the errors of a test run; each once."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_KINDS = r"(?:AttributeError|ImportError|ModuleNotFoundError|TypeError)"
# An error as `pytest --tb=short` prints it: where it was raised, the lines of code there, and its message.
_ERROR = re.compile(rf"^(\S[^\n]*):\d+: in [^\n]*\n((?:    [^\n]*\n)*)E +({_KINDS}: [^\n]+)$", re.MULTILINE)
_JAX = re.compile(r"\b(?:jax|jaxlib|jnp|lax)\b")
_PLACE = re.compile(r" \([^()]*/[^()]*\)$")  # the file that an ImportError names differs with the machine


@dataclass(frozen=True)
class Moved:
    """An error that names JAX, or that a line of JAX or one that names it raised; and how often it came."""

    error: str
    times: int

    @property
    def line(self) -> str:
        """A row of the issue's table."""
        return f"| {self.times} | {self.error.replace('|', '/')} |"


def read(said: str) -> list[Moved]:
    """Return the errors of a pytest run that come from a moved part of JAX, the commonest first."""
    found = Counter[str]()
    for place, code, error in _ERROR.findall(said):
        if any(_JAX.search(each) for each in (place, code, error)):
            found[_PLACE.sub("", error)] += 1
    return [Moved(error, times) for error, times in found.most_common()]
