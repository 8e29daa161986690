"""Eight virtual CPU devices for every test; this runs before jax is imported."""

import sys
from pathlib import Path

from tests.eight_devices import *  # noqa: F403

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "multimesh" / "tests")]
