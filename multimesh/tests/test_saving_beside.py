"""Saves in the background: what blocks, what comes up when, and real processes that are killed and interrupted."""

import os
import re
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import delayed
from multimesh.state import handlers
from pipelines import assert_same
from spawning import run
from test_checkpoints import CASES

import multimesh as mm


@pytest.fixture
def gate(monkeypatch):
    """A save is complete when the gate is open."""
    gate = threading.Event()
    monkeypatch.setattr(handlers, "begin_write", delayed(lambda: gate.wait(60)))
    yield gate
    gate.set()
    mm.distributed.wait_for_save()


def test_what_is_saved_is_what_was_there_at_the_call(gate, tmp_path):
    """Arrays are donated, NumPy arrays overwritten, while nothing is written yet."""
    host, w = np.arange(1000.0), jnp.arange(1000, dtype=jnp.float32)
    tree = {"w": jax.device_put(w, jax.devices()[1]), "free": w, "host": host, "key": jax.random.key(3), "n": 1}
    expected = jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, tree)
    expected |= {"w": np.asarray(w).copy(), "free": np.asarray(w).copy()}
    mm.distributed.save(tmp_path / "1", tree, background=True)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    later = double(tree["w"]), double(tree["free"])
    host[:] = -1
    assert not (tmp_path / "1").exists()
    gate.set()
    mm.distributed.wait_for_save()
    assert_same(mm.distributed.restore(tmp_path / "1", expected), expected)
    assert (later[0] == 2 * expected["w"]).all()


CALLS = {
    "save": lambda path: mm.distributed.save(path / "2", {"n": 2}),
    "save in the background": lambda path: mm.distributed.save(path / "2", {"n": 2}, background=True),
    "wait": lambda _: mm.distributed.wait_for_save(),
    "restore": lambda path: mm.distributed.restore(path / "0", {"n": 0}),
    "verify": lambda path: mm.distributed.verify(path / "0"),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_comes_up_at_the_next_call_once(tmp_path, monkeypatch, call):
    """This call does nothing else; the one after it saves."""

    def full():
        raise OSError(28, "No space left on device", "ck")

    mm.distributed.save(tmp_path / "0", {"n": 0})
    with pytest.raises(mm.UsageError, match=r"save to .*/0: there is something already"):
        mm.distributed.save(tmp_path / "0", {"n": 1}, background=True)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(handlers, "begin_write", delayed(full))
            mm.distributed.save(tmp_path / "1", {"n": 1}, background=True)
        with pytest.raises(mm.MultiMeshError, match=r"save to .*/1: No space left on device: ck"):
            CALLS[call](tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["0"]
    CALLS[call](tmp_path)
    mm.distributed.wait_for_save()
    assert mm.distributed.restore(tmp_path / "0", {"n": 5}) == {"n": 0}


BEGIN = """
import os, sys, time, numpy as np, multimesh as mm
import checkpoint_cases
from multimesh.state import handlers
path, tree = sys.argv[1], {str(n): np.full(1000, n) for n in range(5)}
handlers.begin_write = checkpoint_cases.delayed(lambda: time.sleep(0.5))
mm.distributed.save(f"{path}/0", tree)
print("saved", flush=True)
"""
LIKE = {str(n): np.zeros(1000, int) for n in range(5)}


def script(tmp_path, end):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    argv = [sys.executable, "-c", BEGIN + end, str(tmp_path)]
    return subprocess.Popen(argv, env=env, stdout=-1, stderr=-1, text=True)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ('mm.distributed.save(f"{path}/1", tree, background=True)', 0, ""),
        ('mm.distributed.save(f"{path}/1", tree, background=True); sys.exit(3)', 3, ""),
        (
            'def full(): raise OSError(28, "full", "ck")\n'
            "handlers.begin_write = checkpoint_cases.delayed(full)\n"
            'mm.distributed.save(f"{path}/1", tree, background=True)',
            1,
            r"multimesh: mm.distributed.save to \S+/1: full: ck; there is no checkpoint of that name\n",
        ),
    ],
)
def test_at_its_end_a_process_waits_for_its_save_and_tells_its_error(tmp_path, end, code, message):
    process = script(tmp_path, end)
    _, err = process.communicate(timeout=100)
    assert process.returncode == code
    assert re.fullmatch(message, err)
    for path in tmp_path.iterdir():
        mm.distributed.restore(path, LIKE)
    assert len(list(tmp_path.iterdir())) == (1 if message else 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("then", ["time.sleep(100)", "mm.distributed.wait_for_save(); time.sleep(100)"])
def test_ctrl_c_ends_a_process_after_its_save(tmp_path, then):
    """As a shell sees it with code 130; both checkpoints are whole."""
    begun = 'mm.distributed.save(f"{path}/1", tree, background=True); print("begun", flush=True);'
    process = script(tmp_path, begun + then)
    assert [process.stdout.readline() for _ in range(2)] == ["saved\n", "begun\n"]
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=40)
    except subprocess.TimeoutExpired:  # Python drops an interrupt that comes in a callback, as of its collector
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=40)
    assert process.returncode == -signal.SIGINT
    assert err.strip().endswith("KeyboardInterrupt")
    assert {p.name for p in tmp_path.iterdir()} == {"0", "1"}
    for name in ("0", "1"):
        mm.distributed.verify(tmp_path / name)


@pytest.mark.multiprocess
@pytest.mark.telling("2")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_several_processes_save_beside_their_training(tmp_path, count):
    for process in run(count, 1, CASES, f"saved_beside:{tmp_path}", timeout=200):
        assert process.code == 0, process.err[-4000:]
