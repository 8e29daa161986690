"""What compiled kernels do that was surely not wanted: a small model with each fault, and one without any."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.observe.hlo import KINDS, find_collectives, read_computations

import multimesh as mm


def meshes(devices=None):
    grid = np.array(jax.devices()[:8] if devices is None else devices).reshape(2, 2, 2)
    return [Mesh(half, ("data", "model")) for half in grid]


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


def transpose(mesh, w, x):
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
        ("all-to-all", transpose, {}),
    ],
)
def test_a_fault_is_told_at_the_line_that_has_it(rule, first, options):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        faults = [fault for fault in compiled(first, **options).inspect(least=0) if fault.rule == rule]
    assert faults, rule
    begin = first.__code__.co_firstlineno
    lines = [int(fault.line.rpartition(":")[2]) for fault in faults if fault.line.rpartition(":")[0] == __file__]
    assert any(begin < line <= begin + 4 for line in lines), [str(fault) for fault in faults]
    assert {str(warning.message) for warning in record} >= {fault.text for fault in faults}
    assert all("'" in fault.text and fault.nbytes > 0 for fault in faults)


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
    assert not [fault for fault in compiled(clean, dtype=dtype).inspect(least=256) if fault.rule == rule]


def test_parameters_divided_over_the_data_are_gathered_without_a_word():
    """FSDP gathers them for each microbatch, and reduces and scatters their gradients: that is what it is."""
    faults = compiled(clean, weight=P("data", "model")).inspect(least=512)
    assert "gathered-weights" not in {fault.rule for fault in faults}


def test_without_a_loop_nothing_is_per_microbatch():
    rules = {fault.rule for fault in compiled(batch_norm, loop=False).inspect(least=0)}
    assert not rules & {"per-microbatch", "gathered-weights", "replicated"}


def test_a_first_dimension_is_no_axis_of_the_data():
    """Only what the loop cuts has rows: sums along the axis that divides features are no fault of the loop."""

    def first(mesh, w, x):
        transposed = lax.with_sharding_constraint(jnp.transpose(x @ w, (2, 0, 1)), on(mesh, "model", "data"))
        return jnp.tanh(jnp.transpose(transposed, (1, 2, 0)) @ lax.with_sharding_constraint(w, on(mesh, "model")))

    faults = [fault for fault in compiled(first).inspect(least=0) if fault.rule == "per-microbatch"]
    assert not [fault for fault in faults if "'model'" in fault.text]


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

    faults = compiled(first, weight=P("model"), devices=devices, tokens=4096, width=1024).inspect()
    waits = [fault for fault in faults if fault.rule == "synchronous"]
    assert waits
    assert "all-reduce" in waits[0].text
    assert waits[0].nbytes > 10e6


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=1,'b'=2,'c'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([4]) {'b'}", ((0, 1), (2, 3))),
    ],
)
def test_devices_of_a_collective_are_read_in_every_form(groups, expected):
    line = f"  ROOT %g = f32[8]{{0}} all-gather(%x), replica_groups={groups}, dimensions={{0}}"
    text = f"ENTRY %main (x: f32[4]) -> f32[8] {{\n{line}\n}}"
    (only,) = find_collectives(read_computations(text))
    assert only.groups == expected


def test_a_collective_that_xla_compiles_for_gpus_as_its_own_counts():
    """Its kernel, of Triton, is a fusion that starts and ends."""
    text = """
%fused_all-reduce (param_0: bf16[16,1024]) -> bf16[16,1024] {
  %param_0 = bf16[16,1024]{1,0} parameter(0)
  ROOT %all-reduce.3 = bf16[16,1024]{1,0} all-reduce(%param_0), channel_id=1, replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (x: bf16[16,1024]) -> bf16[16,1024] {
  %x = bf16[16,1024]{1,0} parameter(0)
  %start = ((bf16[16,1024]{1,0}), bf16[16,1024]{1,0}) fusion-start(%x), kind=kCustom, calls=%fused_all-reduce
  ROOT %done = bf16[16,1024]{1,0} fusion-done(%start)
}
"""
    (only,) = find_collectives(read_computations(text))
    assert (only.kind, only.nbytes, only.groups) == ("all-reduce", 16 * 1024 * 2, ((0, 1),))
    assert only.asynchronous


@pytest.mark.parametrize("kind", ["ragged-all-to-all", "collective-broadcast", "collective-shuffle"])
def test_every_operation_between_devices_counts_or_is_an_error(kind):
    line = f"  ROOT %g = f32[8]{{0}} {kind}(%x), channel_id=1, replica_groups={{{{0,1}}}}"
    program = read_computations(f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{line}\n}}")
    if kind in KINDS:
        (only,) = find_collectives(program)
        assert (only.kind, only.nbytes) == (kind, 32)
    else:
        with pytest.raises(mm.MultiMeshError, match="between devices, 'collective-shuffle'"):
            find_collectives(program)


def test_a_permutation_that_is_sent_and_received_counts_once():
    text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %token = token[] after-all()
  %recv = (f32[8]{0}, u32[], token[]) recv(%token), channel_id=1, frontend_attributes={pairs="{{0,1}}"}
  %send = (f32[8]{0}, u32[], token[]) send(%x, %token), channel_id=1, frontend_attributes={pairs="{{0,1}}"}
  %recv-done = (f32[8]{0}, token[]) recv-done(%recv), channel_id=1
  %send-done = token[] send-done(%send), channel_id=1
  ROOT %y = f32[8]{0} get-tuple-element(%recv-done), index=0
}
"""
    (only,) = find_collectives(read_computations(text))
    assert (only.kind, only.arrays, only.nbytes) == ("collective-permute", (("f32", (8,)),), 32)


@pytest.mark.compile_gpu
@pytest.mark.parametrize("rows", [16, 4096])
def test_sums_of_any_size_count_for_gpus(rows):
    mesh = Mesh(np.array(mm.topology("h100", nodes=1, gpus=8)), ("model",))

    def fn(w, x):
        return mm.task(lambda w, x: jax.lax.with_sharding_constraint(x @ w, P(None, None)), "product", mesh=mesh)(w, x)

    w = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("model", None)))
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "model")))
    ((only,),) = mm.jit(fn).lower(w, x).compile().collectives()
    assert (only.kind, only.nbytes) == ("all-reduce", rows * 1024 * 2)


@pytest.mark.compile_gpu
def test_the_exchange_of_tokens_of_experts_counts_for_gpus():
    mesh = Mesh(np.array(mm.topology("h100", nodes=1, gpus=8)), ("expert",))

    def local(x, sizes):
        out, starts = jnp.zeros((x.shape[0] * 8, x.shape[1]), x.dtype), jnp.cumsum(sizes) - sizes
        return jax.lax.ragged_all_to_all(x, out, starts, sizes, starts, sizes, axis_name="expert")

    def fn(x, sizes):
        exchange = jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
        return mm.task(exchange, "dispatch", mesh=mesh)(x, sizes)

    split = NamedSharding(mesh, P("expert"))
    x = jax.ShapeDtypeStruct((8 * 1024, 256), jnp.bfloat16, sharding=split)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=split)
    compiled = mm.jit(fn).lower(x, sizes).compile()
    ((only,),) = compiled.collectives()
    assert (only.kind, only.nbytes) == ("ragged-all-to-all", 8 * 1024 * 256 * 2)
    assert compiled.cost_analysis()[0]["ragged-all-to-all"] == only.nbytes


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_collective_that_is_started_as_a_computation_counts(asynchronous):
    """As XLA writes it for GPUs; where ``is_sync`` is set, nothing runs beside it."""
    sync = "false" if asynchronous else "true"
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
    assert only.asynchronous == asynchronous
