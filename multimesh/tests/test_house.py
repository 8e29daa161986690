"""The order of the library's rooms: imports only go down, in no circle, and few modules stand beside the rooms."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import multimesh
from tests import imports

ROOT = Path(multimesh.__file__).parent
FLOORS = (
    ("__main__",),
    ("commands", "jax"),
    ("check",),
    ("__init__",),
    ("stages",),
    ("distributed", "calling", "launch"),
    ("observe",),
    ("runtime",),
    ("passes",),
    ("marking", "plan", "planner"),
    ("schedules", "grids"),
    ("checkpoints",),
    ("processes", "ir", "timelines", "linalg", "fft"),
    ("hardware",),
    ("core",),
    ("errors",),
)
"""Rooms and single modules of the library, from top to bottom. Those of one floor do not know each other."""

PASSES = (("pipeline",), ("verifying",), ("planning",), ("cutting",), ("trimming",), ("placing",), ("reading",))


@functools.cache
def library() -> dict[str, set[str]]:
    """Which module imports which, read once, when the first test asks."""
    return imports.graph(ROOT)


def upward(graph: dict[str, set[str]], floors: tuple[tuple[str, ...], ...], inside: str = "") -> list[str]:
    """Imports of a folder's parts that do not go down."""
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
    parts = {name: name.removeprefix(inside).split(".")[0] for name in graph if name.startswith(inside)}
    return [
        f"{name} imports {other}"
        for name, own in parts.items()
        for other in graph[name] & parts.keys()
        if parts[other] != own and floor[own] >= floor[parts[other]]
    ]


def test_imports_go_down():
    graph = {
        name: others for name, others in library().items() if name != "__init__"
    }  # it imports lazily what it names
    assert upward(graph, FLOORS) == []


def test_passes_import_earlier_ones():
    assert upward(library(), PASSES, "passes.") == []


def test_no_module_imports_itself_through_others():
    graph = {name: others - {"__init__"} for name, others in library().items()}
    assert len(imports.bottom_up(graph)) == len(graph)


def test_few_modules_stand_beside_the_rooms():
    assert len(list(ROOT.glob("*.py"))) <= 6
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} | {
        p.stem for p in ROOT.glob("*.py")
    }
    assert rooms == {room for floor in FLOORS for room in floor}


def test_contributing_has_a_row_for_each_room():
    page = Path(__file__).parents[2] / "CONTRIBUTING.md"
    rows = [line.split("|")[1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} <= set(
        ".".join(rows).replace("`", "").replace("/", ".").replace(",", ".").replace(" ", "").split(".")
    )


def test_an_import_that_goes_up_is_found():
    assert upward({"core.text": {"ir.flops"}, "ir.flops": {"core.text"}}, FLOORS) == ["core.text imports ir.flops"]


def test_variables_of_launchers_stand_in_one_table():
    own = re.compile(r"OMPI_COMM|\bPMI_|MPI_LOCAL|SLURM_(PROCID|N?TASKS|LOCALID|STEP)")
    sources = [*ROOT.rglob("*.py"), *(ROOT.parents[2] / "maxtext" / "src").rglob("*.py")]
    found = {path.name for path in sources if own.search(path.read_text(encoding="utf-8"))}
    assert found == {"launchers.py"}
