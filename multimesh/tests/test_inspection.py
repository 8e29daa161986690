"""What compiled kernels do that was surely not wanted: a small model with each fault, and one without any."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.observe.collectives import find_collectives
from multimesh.observe.hlo import read_computations

import multimesh as mm


def meshes(devices=None):
    grid = np.array(jax.devices()[:8] if devices is None else devices).reshape(2, 2, 2)
    return [Mesh(each, ("data", "model")) for each in grid]


def on(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


COLUMNS = P(None, "model")


def compiled(first, weight=COLUMNS, dtype="float32", devices=None, loop=True, tokens=4, width=32):
    """A pipeline of two stages, whose first is ``first(mesh, w, x)`` with x of [rows, tokens, width] and w square."""
    front, back = meshes(devices)

    def loss(params, x):
        hidden = mm.task(lambda w, x: first(front, w, x), "front", mesh=front)(params[0], x)
        return mm.task(lambda w, h: jnp.mean((h @ w).astype("float32") ** 2), "back", mesh=back)(params[1], hidden)

    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=4, reduce="mean") if loop else loss

    def array(mesh, shape, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = [array(front, (width, width), weight), array(back, (width, width), P(None, "model"))]
    rows = array(front, (16 if loop else 4, tokens, width), P("data"))
    return mm.jit(step).lower(params, rows).compile()


def clean(mesh, w, x):
    return jnp.tanh(lax.with_sharding_constraint(x @ w, on(mesh, "data", None, "model")))


def sequence_parallel(mesh, w, x):
    x = lax.with_sharding_constraint(x, on(mesh, "data", "model"))
    return jnp.tanh(lax.with_sharding_constraint(x @ w, on(mesh, "data", "model")))


def batch_norm(mesh, w, x):
    h = clean(mesh, w, x)
    return h - jnp.mean(h, axis=0)


def wide_products(mesh, w, x):
    h = jnp.matmul(x.astype("float32"), w.astype("float32"))
    return lax.with_sharding_constraint(h.astype(x.dtype), on(mesh, "data", None, "model"))


def replicated(mesh, w, x):
    return lax.with_sharding_constraint(jnp.tanh(x @ w), on(mesh))


def turned(mesh, w, x):
    h = lax.with_sharding_constraint(jnp.sin(x), on(mesh, "data", "model", None))
    return jnp.tanh(lax.with_sharding_constraint(h, on(mesh, "data", None, "model"))) @ lax.with_sharding_constraint(
        w, on(mesh, "model", None)
    )


@pytest.mark.parametrize(
    ("rule", "first", "options"),
    [
        ("gathered-weights", sequence_parallel, {"tokens": 64}),
        ("per-microbatch", batch_norm, {}),
        ("float32-product", wide_products, {"dtype": "bfloat16"}),
        ("replicated", replicated, {}),
        ("all-to-all", turned, {}),
    ],
)
def test_a_fault_is_told_at_the_line_that_has_it(rule, first, options):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [each for each in compiled(first, **options).inspect(least=0) if each.rule == rule]
    assert found, rule
    begin = first.__code__.co_firstlineno
    lines = [int(each.line.rpartition(":")[2]) for each in found if each.line.rpartition(":")[0] == __file__]
    assert any(begin < line <= begin + 4 for line in lines), [str(each) for each in found]
    assert {str(each.message) for each in told} >= {each.text for each in found}
    assert all("'" in each.text and each.nbytes > 0 for each in found)


@pytest.mark.telling(
    "bfloat16-float32-product",
    "bfloat16-replicated",
    "float32-per-microbatch",
    "float32-all-to-all",
    "bfloat16-gathered-weights",
)
@pytest.mark.parametrize("rule", ["gathered-weights", "per-microbatch", "float32-product", "replicated", "all-to-all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pipeline_without_a_fault_is_told_none(rule, dtype):
    assert not [each for each in compiled(clean, dtype=dtype).inspect(least=256) if each.rule == rule]


def test_parameters_divided_over_the_data_are_gathered_without_a_word():
    """FSDP gathers them for each microbatch, and reduces and scatters their gradients: that is what it is."""
    found = compiled(clean, weight=P("data", "model")).inspect(least=512)
    assert "gathered-weights" not in {each.rule for each in found}


def test_without_a_loop_nothing_is_per_microbatch():
    found = {each.rule for each in compiled(batch_norm, loop=False).inspect(least=0)}
    assert not found & {"per-microbatch", "gathered-weights", "replicated"}


def test_small_ones_are_not_told():
    assert compiled(replicated).inspect() == ()


@pytest.mark.compile_gpu
def test_a_large_collective_that_nothing_hides_is_told_for_gpus():
    devices = mm.topology("h100")

    def first(mesh, w, x):
        return jnp.tanh(
            lax.with_sharding_constraint(
                lax.with_sharding_constraint(x, on(mesh, "data", None, "model")) @ w, on(mesh, "data")
            )
        )

    found = compiled(first, weight=P("model"), devices=devices, tokens=4096, width=1024).inspect()
    waits = [each for each in found if each.rule == "synchronous"]
    assert waits
    assert "all-reduce" in waits[0].text
    assert waits[0].nbytes > 10e6


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=1,'b'=2,'c'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([4]) {'b'}", ((0, 1), (2, 3))),
    ],
)
def test_devices_of_a_collective_are_read_in_every_form(groups, found):
    line = f"  ROOT %g = f32[8]{{0}} all-gather(%x), replica_groups={groups}, dimensions={{0}}"
    text = f"ENTRY %main (x: f32[4]) -> f32[8] {{\n{line}\n}}"
    (only,) = find_collectives(read_computations(text))
    assert only.groups == found


@pytest.mark.parametrize("together", [True, False])
def test_a_collective_that_is_started_as_a_computation_counts(together):
    """As XLA writes it for GPUs; where ``is_sync`` is set, nothing runs beside it."""
    sync = "false" if together else "true"
    text = f"""
%async_computation.1 (param_0: bf16[4,1024]) -> bf16[4,2048] {{
  %param_0 = bf16[4,1024]{{1,0}} parameter(0)
  ROOT %all-gather.1 = bf16[4,2048]{{1,0}} all-gather(%param_0), replica_groups=[2,2]<=[4], dimensions={{1}}
}}

ENTRY %main (x: bf16[4,1024]) -> bf16[4,2048] {{
  %x = bf16[4,1024]{{1,0}} parameter(0)
  %start = ((bf16[4,1024]{{1,0}}), bf16[4,2048]{{1,0}}) async-start(%x), calls=%async_computation.1, backend_config={{"is_sync":{sync}}}
  ROOT %done = bf16[4,2048]{{1,0}} async-done(%start)
}}
"""  # noqa: E501
    (only,) = find_collectives(read_computations(text))
    assert (only.kind, only.nbytes, only.groups) == ("all-gather", 4 * 2048 * 2, ((0, 1), (2, 3)))
    assert only.asynchronous == together
