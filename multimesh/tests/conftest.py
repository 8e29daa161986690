"""Eight virtual CPU devices for every test of the library; this runs before jax is imported."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.eight_devices import *  # noqa: F403

_HERE = Path(__file__).parent
sys.path[:0] = [
    str(_HERE),
    str(_HERE / "passes"),
    str(_HERE.parent / "benchmarks"),
]  # pytest's importlib mode adds no folder

if sys.modules.get("multimesh") is not None and getattr(sys.modules["multimesh"], "__file__", None) is None:
    # pytest's importlib mode names this file multimesh.tests.conftest and makes a package of the project's folder.
    del sys.modules["multimesh"]
    importlib.import_module("multimesh")


@pytest.fixture
def split():
    """Two submeshes of two devices each."""
    from pipelines import split_two

    return split_two()


@pytest.fixture
def case():
    """Parameters of two stages, and a batch of eight rows."""
    from models import MLP

    return MLP.init(2), MLP.batch(8, 0)
