"""README and docs say what is there: links, commands, examples, and figures of runs on the JAX of the locks."""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import multimesh.__main__ as commands_of_library
import multimesh_maxtext.errors as launcher
import pytest
from multimesh.errors import MultiMeshError
from multimesh_maxtext.command import command_line

from multimesh import errors as library
from multimesh import schedules
from tests import figures, locks, pages
from tests.integration.parts import processes
from tests.pages import ROOT
from tooling import cli
from tooling.core import errors
from tooling.image import reference

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PRINTED = re.compile(r"(submesh 0:|0 \| )(?!.*: RUN )", re.DOTALL)  # a plan, or its end, which the blocks above print
WRITING = {"--checkpoint", "--export", "--hlo", "--html", "--output", "--picture", "--save", "-o", ">", ">>", "mkdir"}
INSTALLED = {*(".venv/bin/pytest", ".venv/bin/python", ".venv/bin/zizmor"), *("python", "python3", "pip", "npx"),
             *("git", "cd", "docker")}  # fmt: skip
ON_CPUS = {"JAX_PLATFORMS": "cpu", "NPROC": "64", "OPENBLAS_NUM_THREADS": "1"}  # pages say themselves how many devices


def commands(name: str) -> list[list[str]]:
    """Return the argv of every command in the `console` blocks: lines after `$`, split at `&&`."""
    return [shlex.split(part, comments=True) for line in pages.typed(name) for part in line.split("&&")]


@pytest.mark.parametrize("name", pages.names())
def test_links_tables_and_places_of_a_page(name: str) -> None:
    """Links lead somewhere, every table has a head, and no command writes into the tree.

    A blank line in a table ends it, and the rows behind it become a paragraph.
    """
    text = pages.FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    elsewhere = ("#", "mailto:", "../../actions/")  # the last is on GitHub, beside the files
    targets = [t.partition("#")[0] for t in LINK.findall(text) if "://" not in t and not t.startswith(elsewhere)]
    assert [target for target in targets if not ((ROOT / name).parent / target).exists()] == []
    lines = ["", *text.splitlines(), ""]
    first = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1].startswith("|")]
    assert [lines[i] for i in first if set(lines[i + 1]) - set("|-: ") or not lines[i + 1]] == []
    outputs = [to for argv in commands(name) for flag, to in itertools.pairwise(argv) if flag in WRITING]
    for argv in commands(name):
        if argv[:2] == ["git", "clone"] and "multimesh" not in argv[-1]:  # our own is what a reader starts with
            outputs.append(argv[3] if len(argv) > 3 else argv[2])
    for language in ("python", "py"):
        outputs += re.findall(r'_dir", "([^"]*)"', "\n".join(pages.blocks(name, language)))
    assert [to for to in outputs if not to.startswith(("/", "~", "$"))] == []


def python(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *args]
    return subprocess.run(argv, capture_output=True, text=True, cwd=cwd, env=os.environ | ON_CPUS, check=False)


@pytest.mark.parametrize("name", [name for name in pages.names() if commands(name)])
def test_every_command_is_there_with_its_flags(name: str) -> None:
    for argv in commands(name):
        program = argv[0]
        if program not in INSTALLED:
            assert any(os.access(folder / program, os.X_OK) for folder in (ROOT, (ROOT / name).parent)), (
                f"{name} names {program}, which is not an executable file here"
            )
        if argv[1:3] == ["-m", "tooling"]:
            parts = 5 if argv[3] == "ci" else 4  # its steps have options of their own
            process = python("-m", "tooling", *argv[3:parts], "--help")
            assert process.returncode == 0, f"{name}: {' '.join(argv)}: {process.stderr}"
            flags = [flag.partition("=")[0] for flag in argv[parts:] if flag.startswith("--")]
            assert [flag for flag in flags if flag not in process.stdout] == []


FIRST = ("README.md", "docs/getting-started.md")
SLOW = ("docs/any-model.md", "numerics/README.md", "docs/index.md")
"""Implied by test_pipelining.py, test_linalg.py, test_fft.py and docs/getting-started.md."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in SLOW else () if name in FIRST else pytest.mark.longer)
        for name in pages.names()
        if pages.blocks(name, "python")
    ],
)
def test_python_examples_run(name: str, tmp_path: Path) -> None:
    process = python("-c", "\n".join(pages.blocks(name, "python")), cwd=tmp_path)
    assert process.returncode == 0, f"the python blocks of {name}: {process.stderr}"
    assert [text for text in pages.blocks(name, "text") if PRINTED.match(text) and text not in process.stdout] == []
    for picture in tmp_path.glob("tutorial-*.svg"):
        copy = ROOT / "docs" / "pictures" / picture.name
        assert copy.exists(), f"copy {picture} to {copy}, and look at it"
        assert picture.read_text() == copy.read_text(), f"if the change is right, copy {picture} to {copy}"


NOTEBOOK = """
import ast, json, sys

names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        output = last and eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if hasattr(output, "_repr_svg_"):
            print(output._repr_svg_())
"""


@pytest.mark.longer
@pytest.mark.parametrize("name", ["ten_minutes", pytest.param("any_model", marks=pytest.mark.full)])
def test_a_notebook_runs_and_has_its_output(name: str, tmp_path: Path) -> None:
    """Times are those of the run that is stored, and the table of cuts names files of its kernel."""
    path = ROOT / "examples" / f"{name}.ipynb"
    process = python("-c", NOTEBOOK, str(path), cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    outputs = [(cell, output) for cell in cells for output in cell["outputs"]]
    assert sum("image/svg+xml" in output.get("data", ()) for _, output in outputs) == process.stdout.count("</svg>") > 0
    for cell, output in outputs:
        text = "".join(output.get("text", ()))
        assert "profile" in "".join(cell["source"]) or "ipykernel" in text or text in process.stdout, (
            "run the notebook again: jupyter nbconvert --to notebook --execute --inplace"
        )


def test_every_help_begins_with_an_example() -> None:
    helps = {}
    for parser in (command_line.parser(), commands_of_library.parser(), cli.build_parser()):
        inner = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        helps |= {p.prog: p.format_help() for p in (parser, *(inner[0].values() if inner else ())) if p.add_help}
    doors = {
        "./bootstrap.sh",
        "docker/build.py",
        "docker/start-cache.sh",
        "maxtext/run.py",
        "python -m multimesh check",
    }
    assert doors <= helps.keys()
    for program, text in helps.items():
        usage, first, *_ = text.split("\n\n")
        assert usage.startswith(f"usage: {program}"), text
        for line in first.splitlines():
            assert line.startswith(f"  {program}"), f"{program} --help begins with {line!r}"
        assert max(map(len, text.splitlines())) <= 120, program


@pytest.mark.full
def test_the_tutorial_goes_on_in_four_processes(tmp_path: Path) -> None:
    page = "docs/ten-minutes.md"
    (train,), (start,) = pages.blocks(page, "py"), pages.blocks(page, "sh")
    (tmp_path / "train.py").write_text(train.replace("localhost:61440", f"localhost:{processes.free_port()}"))
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "XLA_FLAGS": ""}
    argv = ["sh", "-c", start]
    process = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=600, check=True)
    losses = [re.findall(rf"process {rank}, step \d: loss (\d\.\d{{4}})", process.stdout) for rank in range(4)]
    one = python("-c", "\n".join(pages.blocks(page, "python")), cwd=tmp_path)
    assert losses == [re.findall(r"step \d: loss (\S+),", one.stdout)] * 4, process.stderr
    assert "of 4 processes" in (tmp_path / "tutorial-processes.svg").read_text()


def test_the_page_of_errors_has_each_message_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Messages that the code really raises are found among those that the site reads from its source."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    messages = importlib.import_module("messages")
    groups = itertools.chain.from_iterable(map(messages.collect, messages.PACKAGES))
    collected = [message for _, _, group in groups for message in group]
    assert len(collected) > 400
    for call, has_remedy in (
        (lambda: schedules.get("lifo"), True),
        (lambda: commands_of_library.parser().parse_args(["check", "--nosuch"]), True),
        (lambda: schedules.load(tmp_path / "no.json"), False),
        (lambda: cli.main_inner(["lock", "nosuch", "1"]), False),
        (lambda: reference.make(None, None, "a b"), True),
    ):
        with pytest.raises((MultiMeshError, errors.ToolingError)) as error:
            call()
        fits = [message for message in collected if message.pattern.fullmatch(str(error.value))]
        assert fits, error.value
        assert not has_remedy or any(message.remedy for message in fits), error.value


def test_ci_runs_the_two_commands_of_readme() -> None:
    lines = [" ".join(argv) for argv in commands("README.md")[:4]]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert len(lines) == 4
    assert f"{lines[0]} && {lines[1]}\n" in ci
    assert f"{lines[2]} && {lines[3]}\n" in ci


def test_the_exit_codes_are_listed() -> None:
    page_codes = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8"), re.MULTILINE)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and "exit_code" in vars(kind)]
    codes = [vars(kind)["exit_code"] for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert sorted(map(int, page_codes)) == sorted([0, *codes, 128 + signal.SIGINT])


def test_no_exit_code_of_a_run_has_two_meanings() -> None:
    """Library and launcher: errors of one code have names of the same words; the launcher's usage is of flags."""
    kinds = [kind for module in (library, launcher) for kind in vars(module).values() if isinstance(kind, type)]
    codes = [(kind.exit_code, kind.__name__) for kind in kinds if vars(kind).get("exit_code", 1) > 1]
    names = ((code, name.replace("FlagError", "UsageError")) for code, name in codes)
    words = {(code, *sorted(re.findall("[A-Z][a-z]+", name))) for code, name in names}
    assert len(words) == len({code for code, *_ in words}), words


def test_the_runs_are_of_the_jax_that_the_locks_bring() -> None:
    run, locked = figures.step_run(), locks.locked_versions(ROOT / "requirements" / "run.txt", "3.14.0")["jax"]
    assert run["jax"] == locked, (
        "run multimesh/benchmarks/step.py --json into runs/step.json, and tests.figures --write"
    )
    assert datetime.date.fromisoformat(run["date"]) >= datetime.date(2026, 11, 26)
    assert locked in figures.peer_ratios()


@pytest.mark.parametrize("name", figures.PAGES)
def test_a_page_has_the_figures_of_the_runs(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert figures.BLOCK.search(page)
    assert figures.renew(page) == page, "python -m tests.figures --write"
