"""A file asks for a profile of a run that is on its way."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from multimesh_maxtext.trainer.records import FOLDER, REQUEST, STEPS, profile_on_request


def steps(output: Path, first: int, last: int) -> None:
    for step in range(first, last + 1):
        jax.jit(lambda x: x @ x)(jnp.ones((8, 8))).block_until_ready()
        profile_on_request(output, step)


def test_a_file_profiles_the_next_steps_and_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    steps(tmp_path, 0, 2)
    assert not (tmp_path / FOLDER).exists()
    (tmp_path / REQUEST).touch()
    steps(tmp_path, 3, 2 + STEPS)
    assert (tmp_path / REQUEST).exists()
    steps(tmp_path, 3 + STEPS, 3 + STEPS)
    assert not (tmp_path / REQUEST).exists()
    assert [*(tmp_path / FOLDER).rglob("*.xplane.pb")]
    assert f"profile of steps 4 to {3 + STEPS} goes to {tmp_path / FOLDER}" in capsys.readouterr().out


def test_what_goes_wrong_is_told_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / REQUEST).touch()
    jax.profiler.start_trace(tmp_path / "another")
    try:
        steps(tmp_path, 0, 1)
    finally:
        jax.profiler.stop_trace()
    assert "multimesh: no profile (" in capsys.readouterr().out
    assert not (tmp_path / REQUEST).exists()
