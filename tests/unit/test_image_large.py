from __future__ import annotations

from pathlib import Path

import pytest

from workflows import errors
from workflows.image import slurm
from workflows.image.engine import Engine
from workflows.image.slurm import State

DOCKER = Engine(("docker",), "docker", "28.0.0", "28.0.0", "buildx")
PODMAN = Engine(("podman",), "podman", "4.3.1", "4.3.1", "podman")


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        (("RUNNING", "0", "1:02", "None"), State("RUNNING", 0, "1:02", "None")),
        (("FAILED", "1024", "6:53", "NonZeroExitCode"), State("FAILED", 4, "6:53", "NonZeroExitCode")),
        (("CANCELLED", "15", "0:09", "None"), State("CANCELLED", -15, "0:09", "None")),
        (
            ("PENDING", "0", "0:00", "Nodes required for job are DOWN"),
            State("PENDING", 0, "0:00", "Nodes required for job are DOWN"),
        ),
    ],
)
def test_a_line_of_squeue_is_read(fields: tuple[str, ...], state: State) -> None:
    line = "".join(text.ljust(width) for text, width in zip(fields, (32, 12, 20, 64), strict=True))
    assert slurm.parse(line) == state


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (State("TIMEOUT", 0, "30:00", "TimeLimit"), "job 7 of Slurm is TIMEOUT"),
        (State("COMPLETED", 0, "1:00", "None"), "without a verdict on its loss"),
    ],
)
def test_only_a_verdict_of_a_job_that_completed_counts(end: State, said: str) -> None:
    lines = ["ok: 3 steps, loss 9.1 -> 8.2"] if end.word == "TIMEOUT" else ["ok so far"]
    with pytest.raises(errors.SmokeError, match=said):
        slurm.judge("7", end, lines, [])


def test_a_verdict_names_what_was_wanted_otherwise() -> None:
    end, lines = State("COMPLETED", 0, "1:00", "None"), ["ok: 3 steps, loss 9.1 -> 8.2", "srun: done"]
    assert slurm.judge("7", end, lines, []) == "ok: 3 steps, loss 9.1 -> 8.2; the llama3-8b job of Slurm"
    options, flags = slurm.wishes({"MULTIMESH_SLURM_OPTIONS": "--account=a", "MULTIMESH_SLURM_FLAGS": "--num-steps 3"})
    assert slurm.judge("7", end, lines, [*options, *flags]).endswith(" with other settings: --account=a --num-steps 3")


def test_settings_reach_sbatch_and_run_py_as_words() -> None:
    wanted = slurm.wishes({"MULTIMESH_SLURM_OPTIONS": "--comment='a b'", "MULTIMESH_SLURM_FLAGS": "$(id) ;"})
    argv = slurm.argv(*wanted)
    assert argv[-4:] == ["--comment=a b", str(slurm.JOB), "$(id)", ";"]
    with pytest.raises(errors.UsageError, match="No closing quotation; quote as for a shell"):
        slurm.wishes({"MULTIMESH_SLURM_FLAGS": "'"})


def test_pyxis_gets_a_squashed_image_and_docker_an_archive() -> None:
    folder = Path("f")
    assert slurm.bring(DOCKER, "I", folder, pyxis=True) == (
        ["enroot", "import", "--output", "f/image.sqsh", "dockerd://I"],
        {"IMAGE": "f/image.sqsh"},
    )
    assert slurm.bring(PODMAN, "I", folder, pyxis=True)[0][-1] == "podman://I"
    assert slurm.bring(DOCKER, "I", folder, pyxis=False) == (
        ["docker", "save", "--output", "f/image.tar", "I"],
        {"IMAGE": "I", "IMAGE_ARCHIVE": "f/image.tar"},
    )


def test_without_pyxis_an_image_of_podman_reaches_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "runs_containers", lambda: False)
    slurm.check_engine(DOCKER)
    with pytest.raises(errors.UsageError, match=r"no --container-image .*, and nodes load no image of podman; install"):
        slurm.check_engine(PODMAN)
