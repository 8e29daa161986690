"""docs/processes.md with a Hugging Face dataset in the place of its source: a step reads rows of Arrow files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "processes.md"
SOURCE = """
import datasets
made = [{"number": i, **Text()[i]} for i in range(64)]
datasets.Dataset.from_list(made).save_to_disk("rows")
source = datasets.load_from_disk("rows").shuffle(seed=0)
batch = batch_of(source, step=2)
for name, found in batch.items():
    wanted = np.array([source[i][name] for i in range(2 * ROWS, 3 * ROWS)], np.int32)
    np.testing.assert_array_equal(found, wanted)
assert sorted(source["number"]) == list(range(64)) != list(source["number"])
print("read")
"""


def test_the_recipe_reads_rows_of_a_dataset_on_disk(tmp_path: Path) -> None:
    first, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    env = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", first + SOURCE]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "read"
