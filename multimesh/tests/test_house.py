"""The order of the library's rooms: imports only go down, in no circle, and few modules stand beside the rooms."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import multimesh
from tests import imports

ROOT = Path(multimesh.__file__).parent
PROJECT = ROOT.parents[2]
FLOORS = (
    ("__main__",),
    ("commands", "jax"),
    ("__init__",),
    ("stages",),
    ("distributed", "calling", "launch"),
    ("observe",),
    ("runtime",),
    ("passes",),
    ("stacked",),
    ("plan", "passes.reading", "passes.placing.owners"),
    ("marking",),
    ("stages.stage_cuts",),
    ("stages.partitioning",),
    ("schedules",),
    ("state",),
    ("processes", "ir", "observe.timelines"),
    ("stacked.row_blocks",),
    ("core",),
    ("errors",),
)
"""Rooms and single modules of the library, from top to bottom. Those of one floor do not know each other.

A module that stands here apart from its room is data, or a part, that rooms below the room's own floor read.
"""

BUDGETS = {
    "calling": 1_852,
    "commands": 1_010,
    "core": 2_643,
    "ir": 1_048,
    "jax": 399,
    "marking": 1_464,
    "observe": 2_142,
    "passes": 5_077,
    "plan": 917,
    "processes": 1_265,
    "runtime": 1_458,
    "schedules": 1_421,
    "stacked": 1_126,
    "stages": 1_722,
    "state": 635,
    "(beside the rooms)": 821,
    "multimesh/benchmarks": 1_441,
    "multimesh/src": 25_000,
    "planner/src": 2_969,
    "numerics/src": 3_086,
    "maxtext/src": 5_851,
    "tooling/ci": 82,
    "tooling/core": 291,
    "tooling/environment": 171,
    "tooling/image": 1_193,
    "tooling/sources": 635,
}
"""Lines of Python of each room and package. Who needs more raises a number here, and says why in the commit."""

PAGES, CARDS = 22, {"CHANGELOG.md", "README.md", "multimesh/README.md", "third_party/README.md"}
"""Pages of the site; files beside them that GitHub and PyPI show."""

WORDS = {"": 30_000, "README.md": 750, "maxtext/README.md": 2_000}
"""Words of all pages, and of two: a page that needs more takes them from another."""

CLOSURE = 120, 17_500
"""Modules and lines that the first call of a jitted pipeline loads on one process."""

LATER = (
    *("observe", "schedules.choose", "schedules.user_table", "stacked.piecewise", "plan.timing"),
    *("passes.verifying", "processes.liveness", "core.known_faults"),
)
"""Parts that such a call does not load."""

PASSES = (("pipeline",), ("verifying",), ("planning",), ("cutting",), ("trimming",), ("placing",), ("reading",))


@functools.cache
def library() -> dict[str, set[str]]:
    """Return the imports of each module, read once, when the first test asks."""
    return imports.graph(ROOT)


def part_of(module: str, floor: Collection[str]) -> str:
    """The longest name on a floor that a module has or lies in."""
    names = [name for name in floor if module == name or module.startswith(f"{name}.")]
    return max(names, key=len, default=module.split(".")[0])


def upward(graph: dict[str, set[str]], floors: tuple[tuple[str, ...], ...], inside: str = "") -> list[str]:
    """Imports of a folder's parts that do not go down."""
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
    parts = {name: part_of(name.removeprefix(inside), floor) for name in graph if name.startswith(inside)}
    return [
        f"{name} imports {other}"
        for name, part in parts.items()
        for other in graph[name] & parts.keys()
        if parts[other] != part and floor[part] >= floor[parts[other]]
    ]


def test_imports_go_down():
    graph = {
        name: others for name, others in library().items() if name not in ("__init__", "schedules")
    }  # these import lazily what they name
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
    assert rooms == {room for floor in FLOORS for room in floor if "." not in room}


def test_contributing_has_a_row_for_each_room():
    page = Path(__file__).parents[2] / "CONTRIBUTING.md"
    rows = [line.split("|")[1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} <= set(
        ".".join(rows).replace("`", "").replace("/", ".").replace(",", ".").replace(" ", "").split(".")
    )


def test_variables_of_launchers_stand_in_one_table():
    names = re.compile(r"OMPI_COMM|\bPMI_|MPI_LOCAL|SLURM_(PROCID|N?TASKS|LOCALID|STEP)")
    sources = [*ROOT.rglob("*.py"), *(ROOT.parents[2] / "maxtext" / "src").rglob("*.py")]
    files = {path.name for path in sources if names.search(path.read_text(encoding="utf-8"))}
    assert files == {"launchers.py"}


def lines_of(folder: Path, pattern: str = "*.py") -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob(pattern))


def test_no_room_is_larger_than_its_budget():
    rooms = {path.name: lines_of(path) for path in sorted(ROOT.iterdir()) if (path / "__init__.py").exists()}
    rooms["(beside the rooms)"] = sum(path.read_bytes().count(b"\n") for path in ROOT.glob("*.py"))
    packages = {folder: lines_of(PROJECT / folder) for folder in BUDGETS if "/" in folder}
    assert len(rooms) - 1 <= 15
    sizes = rooms | packages
    assert sizes.keys() == BUDGETS.keys()
    assert {name: size for name, size in sizes.items() if size > BUDGETS[name]} == {}


def test_pages_are_few_and_short():
    """A word has a letter or a digit; bars of tables, and comments, which name what the site makes, are none."""
    output = subprocess.run(["git", "ls-files", "*.md"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    texts = {name: (PROJECT / name).read_text(encoding="utf-8") for name in output.split() if name[0] != "."}
    words = {name: len(re.findall(r"\S*\w\S*", re.sub(r"<!--.*?-->", "", text))) for name, text in texts.items()}
    assert len(words.keys() - CARDS) <= PAGES
    assert sum(words.values()) <= WORDS[""], words
    assert {name: words[name] for name, most in WORDS.items() if name and words[name] > most} == {}


FIRST_CALL = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import multimesh as mm
meshes = [jax.sharding.Mesh(np.array([device]), ("x",)) for device in jax.devices()[:2]]

def loss(weights, x):
    for weight, mesh in zip(weights, meshes):
        x = mm.task(lambda weight, x: jnp.tanh(x @ weight), mesh=mesh)(weight, x)
    return (x**2).sum()

step = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=2, schedule="1f1b")
mm.jit(step)([jnp.ones((4, 4))] * 2, jnp.ones((8, 4)))
mm.pipeline
print(json.dumps({name: module.__file__ for name, module in sys.modules.items() if name.startswith("multimesh")}))
"""


def test_a_first_call_loads_little():
    environ = {name: value for name, value in os.environ.items() if name != "MULTIMESH_VERIFY"}
    child = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, env=environ, check=True)
    modules = json.loads(child.stdout)
    later = [name for name in modules if name.removeprefix("multimesh.").startswith(LATER)]
    assert (later, [name for name in modules if not name.startswith("multimesh.") and name != "multimesh"]) == ([], [])
    size = sum(Path(path).read_bytes().count(b"\n") for path in modules.values())
    assert (len(modules) <= CLOSURE[0], size <= CLOSURE[1]) == (True, True), (len(modules), size)
