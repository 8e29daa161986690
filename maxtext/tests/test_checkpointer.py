"""Orbax's checkpointer of a run, on checkpoints that Orbax wrote and somebody harmed."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp
from test_checkpoint import LAYOUTS, state

from multimesh import distributed
from multimesh.errors import DamagedError, NoRecordError
from multimesh_maxtext.errors import CheckpointError, DamagedCheckpointError
from multimesh_maxtext.trainer.checkpointer import explain_failures, flat, nest

STATE = {"params": {"w": jnp.arange(4000.0).reshape(40, 100)}, "opt_state": {"count": jnp.ones(7, jnp.int32)}}
RECORD = "multimesh-sums.0-of-1.json"
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def start() -> Iterator[Open]:
    """Orbax's checkpointer for a folder, as MaxText makes it."""
    checkpointers = []

    def checkpointer(folder: Path, layers: int | None = None) -> Any:
        context = ocp.Context()
        context.array.saving.use_ocdbt = context.array.saving.use_zarr3 = context.pytree.loading.partial_load = True
        policy = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
        checkpointers.append(ocp.training.Checkpointer(folder, context=context, save_decision_policy=policy))
        return explain_failures(checkpointers[-1], layers)

    yield checkpointer
    for handle in checkpointers:
        with suppress(ValueError):  # a save that failed is told once more
            handle.close()


@pytest.fixture(scope="module")
def source(start: Open, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints 2 and 3."""
    folder = tmp_path_factory.mktemp("written")
    checkpoints = start(folder)
    for step in (2, 3):
        checkpoints.save_checkpointables(step, {"items": STATE})
    checkpoints.wait()
    assert all((folder / str(step) / RECORD).exists() for step in (2, 3))
    return folder


def largest(step: Path) -> Path:
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda step: os.truncate(largest(step), largest(step).stat().st_size // 2), "is not valid for value of size"),
        (lambda step: largest(step).unlink(), "Existing shard has size of 0 bytes"),
        (lambda step: (step / "items/manifest.ocdbt").write_text("{"), "length"),
        (lambda step: (step / "items/_METADATA").unlink(), "_METADATA"),
        (lambda step: shutil.rmtree(step / "items"), ".+"),
    ],
    ids=["half a file", "no file", "another manifest", "no metadata", "nothing"],
)
def test_a_harmed_checkpoint_is_named_with_the_one_to_go_on_from(
    start: Open, source: Path, tmp_path: Path, harm: Callable[[Path], None], reason: str
):
    shutil.copytree(source, tmp_path / "ck")
    (tmp_path / "ck/3" / RECORD).unlink()
    harm(tmp_path / "ck/3")
    with pytest.raises(CheckpointError) as error:
        start(tmp_path / "ck").load_checkpointables(3, {"items": STATE})
    remedy = f"copy it again, or remove {tmp_path}/ck/3 to go on from checkpoint 2"
    assert re.fullmatch(rf"checkpoint 3 cannot be read \((.*{reason}.*)\); {remedy}", str(error.value))


def damage(path: Path, how: str, seed: int) -> bytes:
    """Flip a bit of a file, cut its end off or delete it; return what it had."""
    data, rng = path.read_bytes(), random.Random(f"{path.name}{seed}")
    if how == "delete":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    else:
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
    return data


@pytest.mark.parametrize("how", ["flip", "cut", "delete"])
def test_a_damaged_file_is_named_before_anything_is_loaded(start: Open, source: Path, tmp_path: Path, how: str):
    """Any file of a checkpoint, by `verify` and by the run, which sets the checkpoint aside."""
    folder = tmp_path / "ck"
    shutil.copytree(source, folder)
    files = [path for path in sorted((folder / "3").rglob("*")) if path.is_file()]
    assert len(files) > 8
    checkpoints = start(folder)
    for path in files:
        if how == "delete" and path.name == RECORD:
            continue  # as if the run had been killed before it wrote that
        data = damage(path, how, 0)
        with pytest.raises(DamagedError, match=re.escape(f"{path}: ")):
            distributed.verify(folder / "3")
        with pytest.raises(DamagedCheckpointError, match=re.escape(f"{path}: ")):
            checkpoints.load_checkpointables(3, {"items": STATE})
        (folder / "3.damaged").rename(folder / "3")
        path.write_bytes(data)
    distributed.verify(folder / "3")
    loaded = checkpoints.load_checkpointables(3, {"items": STATE})["items"]
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), loaded, STATE)))


def test_a_checkpoint_without_a_record_is_loaded_and_can_get_one(start: Open, source: Path, tmp_path: Path):
    shutil.copytree(source, tmp_path / "ck")
    (tmp_path / "ck/3" / RECORD).unlink()
    with pytest.raises(NoRecordError, match="ck/3 has no checksums"):
        distributed.verify(tmp_path / "ck/3")
    start(tmp_path / "ck").load_checkpointables(3, {"items": STATE})
    distributed.record(tmp_path / "ck/3")
    distributed.verify(tmp_path / "ck/3")
    assert (tmp_path / "ck/3" / RECORD).read_bytes() == (source / "3" / RECORD).read_bytes()


def test_another_model_is_refused_before_it_is_loaded(start: Open, source: Path):
    wider = STATE | {"params": {"w": jnp.zeros((40, 101))}}
    with pytest.raises(CheckpointError, match=r"params/w is \(40, 100\) in it and \(40, 101\) in this run; use the"):
        start(source).load_checkpointables(3, {"items": wider})


@pytest.mark.parametrize("target", LAYOUTS, ids=len)
@pytest.mark.parametrize("source", LAYOUTS, ids=len)
def test_layers_are_loaded_in_any_layout(start: Open, tmp_path: Path, source: Sequence[str], target: Sequence[str]):
    checkpoints = start(tmp_path, 4)
    checkpoints.save_checkpointables(0, {"items": nest(state(source))})
    model = {path: jnp.zeros(x.shape, jnp.int32) for path, x in state(target).items()}
    loaded = flat(checkpoints.load_checkpointables(0, {"items": nest(model)})["items"])
    assert {path: x.tolist() for path, x in loaded.items()} == {path: x.tolist() for path, x in state(target).items()}
    if source != target:
        path = ("params", "decoder", target[0], "kernel")
        model[path] = jnp.zeros((9, *model[path].shape[1:]))
        with pytest.raises(CheckpointError, match=rf"{'/'.join(path)} gives \(3, .*\), but the model has \(9, "):
            checkpoints.load_checkpointables(0, {"items": nest(model)})


def test_a_step_that_is_there_already_is_no_failure(start: Open, source: Path):
    with pytest.raises(FileExistsError):
        start(source).save_checkpointables(3, {"items": STATE})


@contextmanager
def small_files() -> Iterator[None]:
    """Files of this process may have 2,000 bytes, as if a quota were used up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("method", ["save_checkpointables", "save_checkpointables_async"])
def test_what_cannot_be_written_is_named_with_what_is_complete(start: Open, source: Path, tmp_path: Path, method: str):
    shutil.copytree(source, tmp_path / "ck")
    checkpoints = start(tmp_path / "ck")

    def save() -> None:
        getattr(checkpoints, method)(4, {"items": STATE})
        checkpoints.wait()

    with small_files(), pytest.raises(CheckpointError) as error:
        save()
    assert str(error.value).startswith(
        f"a checkpoint cannot be written to {tmp_path}/ck (File too large); checkpoint 3 there is complete; "
    )
