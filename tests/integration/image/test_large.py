"""The llama3-8b job of Slurm, with the image that is checked by it: real MaxText in several processes on two nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.image.conftest import Repository

OPTIONS = "--ntasks-per-node=1 --gpus-per-node=0 --time=15"
SMALL = (
    "--gpus 0 --cpus 2 --dp 2 --tp 1 --num-layers 4 --interleave 2 --model-dims 64 --mlp-dims 128 --num-heads 8 "
    "--sequence-length 32 --batch-size 8 --microbatch-size 1 --num-steps 3 --attention dot_product"
    " vocab_size=512 head_dim=8"
)


@pytest.mark.full
@pytest.mark.slurm
@pytest.mark.stand_in("two Slurm nodes on one machine with Docker; a small llama3 on 4 CPU devices of 2 processes")
def test_the_job_trains_in_the_image(image: dict[str, Any], repository: Repository, cluster: dict[str, str]) -> None:
    wanted = {"MULTIMESH_SLURM_OPTIONS": OPTIONS, "MULTIMESH_SLURM_FLAGS": SMALL}
    options = [
        "--accelerator",
        "cpu",
        "--repo",
        "multimesh-test",
        "--name",
        "image",
        "--tag",
        "T",
        "--no-build",
        "--json",
    ]

    done = repository.build(*options, "--validate", "large", **cluster, **wanted)

    check = json.loads(done.stdout)["check"]
    assert check["job"] == "large"
    assert check["verdict"].startswith("ok: 3 steps, loss ")
    assert "4 cpu devices: dp 2 pp 2 interleave 2; 4 layers" in done.stderr
    assert done.stderr.count("MaxText, backend multimesh") == 1  # of the processes one speaks
    assert not [path for path in (repository.path / "build/image/large").iterdir() if path.is_dir()]
