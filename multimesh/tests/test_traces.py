"""One trace and one partition for each signature, in every order of calls: as often as ``jax.jit`` traces."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from multimesh.passes import pipeline

import multimesh as mm

CALLS = {
    "call": lambda g, *args: g(*args),
    "plan": lambda g, *args: g.plan(*args) if isinstance(g, mm.Jitted) else g.lower(*args),
    "lower": lambda g, *args: g.lower(*args),
    "compile": lambda g, *args: g.lower(*args).compile(),
    "trace": lambda g, *args: g.trace(*args),
    "trace.lower": lambda g, *args: g.trace(*args).lower(),
    "eval_shape": lambda g, *args: g.eval_shape(*args),
    "prepare": lambda g, *args: g.prepare(*args) if isinstance(g, mm.Jitted) else g.lower(*args),
    "grad": lambda g, *args: jax.grad(g)(*args),
    "vmap": lambda g, w, x: jax.vmap(g, (None, 0))(w, x[None]),
}
PARTITIONS = {"call", "plan", "lower", "compile", "trace.lower", "prepare"}  # of the function itself


def count_traces(monkeypatch: pytest.MonkeyPatch, tasks: bool):
    """The function, the list that has an entry for each trace of it, and one for each run of the passes."""
    traces: list[str] = []
    partitions: list[pipeline.PassInputs] = []

    def loss(w, x):
        traces.append("trace")
        layer = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
        if tasks:
            mesh = jax.sharding.Mesh(jax.devices()[1:2], ("data",))
            layer = mm.task(layer, "only", mesh=mesh)
        return jnp.sum(layer(w, x))

    run = pipeline.run

    def counting(traced, after=None):
        partitions.append(traced)
        return run(traced, after)

    monkeypatch.setattr(pipeline, "run", counting)
    return loss, traces, partitions


@pytest.mark.longer
@pytest.mark.parametrize(("first", "second"), itertools.product(CALLS, repeat=2))
def test_traces_and_partitions_are_those_that_jit_needs(monkeypatch, first, second):
    loss, traces, partitions = count_traces(monkeypatch, tasks=True)
    w, x = jnp.eye(4), jnp.ones((2, 4))
    jitted = mm.jit(loss)
    for name in (first, second):
        CALLS[name](jitted, w, x)
    count, cut = len(traces), len({id(traced.closed) for traced in partitions})
    assert count == 1
    by_value = {"grad": 2, "vmap": 1}  # plans of the transformed function
    assert len(partitions) == cut
    assert len(partitions) == bool(PARTITIONS & {first, second}) + sum(by_value.get(n, 0) for n in {first, second})


def test_a_function_without_tasks_is_traced_once(monkeypatch):
    loss, traces, _ = count_traces(monkeypatch, tasks=False)
    jitted = mm.jit(loss)
    jitted(jnp.eye(4), jnp.ones((2, 4)))
    jitted(jnp.eye(4), jnp.ones((2, 4)))
    assert len(traces) == 1


def test_another_layout_partitions_again_without_a_trace(monkeypatch):
    loss, traces, partitions = count_traces(monkeypatch, tasks=True)
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    jitted = mm.jit(loss)
    jitted(jnp.eye(4), jnp.ones((2, 4)))
    jitted.plan(jnp.eye(4), jax.device_put(jnp.ones((2, 4)), jax.sharding.NamedSharding(mesh, jax.P("data"))))
    assert (len(traces), len(partitions)) == (1, 2)


def test_captured_values_trace_once_in_each_transformation(monkeypatch):
    loss, traces, _ = count_traces(monkeypatch, tasks=True)
    w, x = jnp.eye(4), jnp.ones((2, 4))
    jax.grad(lambda w: mm.jit(lambda x: loss(w, x))(x))(w)
    assert len(traces) == 1
