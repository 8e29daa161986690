"""The patched MaxText where `run.py` asks for nothing: it must be MaxText as it was published, byte for byte."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import parity
import pytest
from tests.xla_flags import QUICK

from multimesh_maxtext.command.dataset import write_corpus
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.translate import launch
from multimesh_maxtext.handoff import PIPELINE, TRAINER, VARIABLE

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.version_info < (3, 12), reason="MaxText as it was published needs Python 3.12"),
]

FLAGS = (
    "--backend spmd --cpus 2 --dp 2 --num-layers 2 --model-dims 32 --mlp-dims 32 --sequence-length 32 --batch-size 4 "
    "--microbatch-size 2 --num-steps 4 --attention dot_product eval_interval=2 eval_steps=2 checkpoint_period=1"
)
TIMES = re.compile(r'"(?:perf/\w+|eval/step_time\w*)": [^,}]+')
"""What two runs of one program do not have alike."""


def test_the_patches_change_nothing_unless_asked(
    job: Callable[[Sequence[str]], Job], maxtext: Path, root: Path, tmp_path: Path
):
    """Text, evaluations, checkpoints, and a resumed run: what each writes into its metrics file."""
    metrics = {}
    for name, source in (("patched", maxtext), ("published", parity.published(tmp_path / "source"))):
        output = tmp_path / name
        paths = Paths(python=sys.executable, maxtext=source, output=output, metrics=output / "metrics.jsonl")
        write_corpus([parity.CORPUS.read_text()], paths.text, sequence_length=32)
        flags = [*FLAGS.split(), "--checkpoint", str(output / "ck"), "--text", str(parity.CORPUS)]
        start = launch(job(flags), paths, inherited={"XLA_FLAGS": " ".join(QUICK)}, gpu_memory=None)
        trainer = [*start.command[:3], TRAINER, *start.command[5:]]  # MaxText's own, without ours around it
        base = {key: value for key, value in start.environment.items() if key not in (PIPELINE, VARIABLE)}
        for steps in (4, 6):
            command = [re.sub(r"^steps=\d+$", f"steps={steps}", word) for word in trainer]
            variables = {**os.environ, **base, "PYTHONPATH": str(source)}
            process = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
            assert process.returncode == 0, process.stderr[-2000:]
            metrics[name, steps] = TIMES.sub("", paths.metrics.read_text())
    assert (maxtext / "maxtext/utils/multimesh_hooks.py").exists()
    assert not (tmp_path / "source/src/maxtext/utils/multimesh_hooks.py").exists()
    for steps in (4, 6):
        assert metrics["patched", steps] == metrics["published", steps]
    assert max(map(int, re.findall(r'"step": (\d+)', metrics["patched", 6]))) == 5
