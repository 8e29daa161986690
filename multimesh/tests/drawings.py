"""The pictures in docs/pictures: the house, and every schedule with 4 submeshes and 8 microbatches of equal phases.

``python multimesh/tests/drawings.py --write`` renews them; without ``--write`` it says which would change.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
# Of runs; by hand:
OTHERS = ("concepts.svg", "processes.svg", "layouts.svg", "particle-mesh.png")
PAGES = ("tutorial-", "slow-")  # written by docs/ten-minutes.md, which a test compares, and by docs/troubleshooting.md


def drawings() -> dict[str, str]:
    """File name to what the file must hold."""
    import diagrams
    from multimesh.commands import forecast
    from multimesh.observe.timelines import svg

    made = {"house.svg": diagrams.house()}
    for name, shape in forecast.choose_schedules(None, submeshes=4, chunks=None, microbatches=8):
        made[f"{name}.svg"] = svg.draw(forecast.simulate_schedule(name, shape).timeline)
    return made


def stale() -> list[str]:
    """Names of files that are missing, not as they would be drawn now, or drawn by nothing; others left out."""
    made = drawings()
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*") if path.name not in OTHERS}
    found = {name: text for name, text in found.items() if not name.startswith(PAGES)}
    return sorted(name for name in {*made, *found} if made.get(name) != found.get(name))


def main() -> None:
    """Write the pictures, or name those that are not current."""
    sys.path.append(str(FOLDER.parents[1]))
    if sys.argv[1:] == ["--write"]:
        for name, text in drawings().items():
            (FOLDER / name).write_text(text, encoding="utf-8")
    print("\n".join(stale()))


if __name__ == "__main__":
    main()
