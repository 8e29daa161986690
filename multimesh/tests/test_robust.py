"""Interruptions, threads and deletion."""

import gc
import signal
import threading
import weakref

import jax
import numpy as np
import pytest
from measure import at_every_call, calls
from models import MLP, SKIP, mlp_block, plain
from pipelines import Split, assert_same, gradient, reference_gradient, submeshes, two_blocks

import multimesh as mm

pytestmark = pytest.mark.longer
ROWS, SIZE = 8, 2


def compiled_case(model=MLP, schedule="1f1b"):
    split = Split(submeshes(2, (2,)))
    params = model.init(2)
    f = mm.jit(gradient(model, split, size=SIZE, rows=ROWS, schedule=schedule))
    return f, split.place(params, model.owners(params)), jax.device_put(model.batch(ROWS, 0))


@pytest.mark.telling("KeyboardInterrupt")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_at_any_point_of_a_step(error):
    """The step is broken off at each of the calls that it makes, of Python's and C's functions."""
    f, params, batch = compiled_case()
    expected = reference_gradient(MLP, 2, ROWS, SIZE)
    f(params, batch)
    total = calls(lambda: f(params, batch))
    interrupts = 0
    for k in range(1, total - 1):

        def stop(n, k=k):
            if n == k:
                raise error

        try:
            at_every_call(lambda: f(params, batch), stop)
        except error:
            interrupts += 1
        except ValueError as fault:  # jax 0.12, where a comparison of its own is broken off
            if "Cache keys should be comparable" not in str(fault):
                raise
            interrupts += 1
        assert not any(x.is_deleted() for x in jax.tree.leaves((params, batch)))
        assert_same(f(params, batch), expected)
    assert interrupts > 0.9 * total


def test_interrupted_during_the_first_call():
    """While it traces, partitions and compiles."""
    expected = reference_gradient(MLP, 2, ROWS, SIZE)
    for _ in range(2):  # the first of a process also fills caches of JAX
        f, params, batch = compiled_case()
        total = calls(lambda f=f, params=params, batch=batch: f(params, batch))
    for share in (0.1, 0.5, 0.9):
        f, params, batch = compiled_case()

        def stop(n, share=share, total=total):
            if n == int(share * total):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            at_every_call(lambda f=f, params=params, batch=batch: f(params, batch), stop)
        assert_same(f(params, batch), expected)


def two_stages(split, params, x, on_host):
    """Two blocks, of which the first goes through a function on the host."""

    def first(p, x):
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), mlp_block(p, x))

    return split(1, mlp_block)(params["stages"][1], split(0, first)(params["stages"][0], x))


def test_a_signal_in_the_middle_of_a_step():
    """A real SIGINT, sent by the first stage's own program while later ones are dispatched."""
    split = Split(submeshes(2, (1,)))
    params, x = MLP.init(2), MLP.batch(ROWS, 0)["x"]
    armed = True

    def interrupt(v):
        nonlocal armed
        if armed:
            armed = False
            signal.raise_signal(signal.SIGINT)
        return np.asarray(v)

    step = mm.jit(mm.microbatch(lambda p, x: two_stages(split, p, x, interrupt).sum(), size=1, argnum=1))

    def steps():
        for _ in range(10_000):
            jax.block_until_ready(step(params, x))

    # XLA may run the callback on this thread, and then wraps what it raises.
    with pytest.raises((KeyboardInterrupt, jax.errors.JaxRuntimeError), match=r"^$|KeyboardInterrupt"):
        steps()
    expected = jax.jit(two_blocks(plain))(params, x).sum()
    assert_same(step(params, x), expected)


def test_an_error_inside_a_task():
    """A host callback raises in one step; the next one is right, with the same arrays."""
    split = Split(submeshes(2, (1,)))
    params, x = MLP.init(2), MLP.batch(ROWS, 0)["x"]
    placed, x = split.place(params, MLP.owners(params)), jax.device_put(x)
    fail = True

    def check(v):
        if fail:
            raise ValueError("the user's callback")
        return np.asarray(v)

    step = mm.jit(lambda p, x: two_stages(split, p, x, check))
    with pytest.raises(Exception, match="the user's callback"):
        jax.block_until_ready(step(placed, x))
    fail = False
    assert_same(step(placed, x), jax.jit(two_blocks(plain))(params, x))


@pytest.mark.telling("two")
@pytest.mark.parametrize("functions", ["two", "one"])
def test_threads(functions):
    cases = [(m, *compiled_case(m)) for m in (MLP, SKIP)]
    if functions == "one":
        cases = [cases[0]] * 2
    errors = []

    def work(model, f, params, batch):
        try:
            for _ in range(20):
                assert_same(f(params, batch), reference_gradient(model, 2, ROWS, SIZE))
        except BaseException as e:  # noqa: BLE001 - handed to the main thread
            errors.append(e)

    threads = [threading.Thread(target=work, args=c) for c in cases]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def executables():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def test_deletion_frees_the_programs():
    f, params, batch = compiled_case()
    before = executables()  # with those of jax that placed the parameters
    jax.block_until_ready(f(params, batch))
    reference = weakref.ref(f)
    count = executables()
    del f
    gc.collect()
    assert count > before
    assert reference() is None
    assert executables() <= before
