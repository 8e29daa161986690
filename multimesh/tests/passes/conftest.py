"""The helpers of this folder are imported by name; pytest's importlib mode adds no folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
