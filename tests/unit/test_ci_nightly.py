"""What a night's tests say of the API that moved: real runs of pytest against the installed JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workflows import errors
from workflows.ci import moved, nightly
from workflows.ci.moved import Moved
from workflows.ci.nightly import Outcome

TESTS = """
import jax, numpy, pytest
def gone(): return jax.no_such_thing
def test_a(): gone()
def test_b(): gone()
def test_c(): from jax.experimental import nothing_there
def test_d(): jax.jit(abs, no_such_option=1)
def test_f(): numpy.no_such_thing
def test_g(): int([])
def test_h(): assert jax.numpy.ones(()) == 2
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of calls of an API that JAX does not have, and of faults of other kinds."""
    folder = tmp_path_factory.mktemp("nightly")
    (folder / "test_it.py").write_text(TESTS)
    (folder / "test_import.py").write_text("from jax import nothing_here\n")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:xdist", "--rootdir", str(folder), "."]
    done = subprocess.run([*command, "--continue-on-collection-errors"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_errors_that_name_jax_are_grouped(said: str) -> None:
    found = moved.read(said)
    assert found[0] == Moved("AttributeError: module 'jax' has no attribute 'no_such_thing'", 2)
    rest = {each.error: each.times for each in found[1:]}
    assert set(rest.values()) == {1}
    text = "\n".join(rest)
    for each in ("cannot import name 'nothing_there' from 'jax.experimental'", "cannot import name 'nothing_here'",
                 "unexpected keyword argument 'no_such_option'"):  # fmt: skip
        assert each in text
    assert len(rest) == 3, "neither NumPy's, nor Python's, nor a wrong result"
    assert "/" not in text, "no path of this machine"


def test_a_long_run_still_names_what_moved_first(said: str) -> None:
    """The end of the output, which an issue holds too, need not have it."""
    failed = Outcome("newest-jax", "0.13.0", False, 60.0, ".ci/run newest-jax", "the end", tuple(moved.read(said)))
    title, text = nightly.issue([Outcome("jax", "c" * 40, True, 1.0, "pytest", ""), failed])
    assert title == "Nightly: the newest jax of the package index breaks our tests"
    assert "| the newest jax of the package index | 0.13.0 | failed | 60 s |" in text
    assert "| 2 | AttributeError: module 'jax' has no attribute 'no_such_thing' |" in text
    assert text.index("What of JAX moved") < text.index("the end")
    nothing = nightly.issue([Outcome("maxtext", "c" * 40, False, 1.0, "pytest", "patch 0007 does not apply")])[1]
    assert "What of JAX moved" not in nothing


def test_outcomes_are_read_as_they_were_written_and_none_may_miss(tmp_path: Path) -> None:
    outcomes = [Outcome(name, "1", True, 1.0, "pytest", "", (Moved("TypeError: jax", 2),)) for name in nightly.NAMES]
    paths = [tmp_path / f"{each.component}.json" for each in outcomes]
    for path, outcome in zip(paths, outcomes, strict=True):
        nightly.save(path, outcome)
    assert sorted(nightly.load(paths), key=lambda each: list(nightly.NAMES).index(each.component)) == outcomes
    with pytest.raises(errors.UsageError, match="no outcome of newest-jax"):
        nightly.load(paths[:-1])
    paths[0].write_text(json.dumps({"component": "jax"}))
    with pytest.raises(errors.UsageError, match="cannot be read"):
        nightly.load(paths)


def test_releases_are_parts_that_ci_run_knows(root: Path) -> None:
    """Both names stand in the workflow too."""
    known = (root / ".ci" / "run").read_text()
    asked = (root / ".github" / "workflows" / "nightly.yml").read_text()
    assert f"component: [{', '.join(nightly.NAMES)}]" in asked
    assert all(f"    {name}) part " in known for name in nightly.RELEASES)
