"""``schedule="auto"`` takes a table only if the forecast of the whole plan is within the memory of a device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from multimesh.schedules import Auto
from pipelines import submeshes

import multimesh as mm

ROWS, COUNT = 4, 8


def pipeline(schedule, widths, placement=None):
    """A step over stages of some hidden widths, its arguments, and the same without tasks."""
    placement = placement or range(len(widths))
    meshes = submeshes(max(placement) + 1, (1,))

    def layer(w, x):
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    def loss(weights, x, homes=None):
        for n, w in enumerate(weights):
            x = layer(w, x) if homes is None else mm.task(layer, f"stage{n}", mesh=homes[n])(w, x)
        return jnp.sum(x**2)

    draw = np.random.default_rng(0)
    weights = [[draw.normal(size=s).astype(np.float32) / 8 for s in ((32, k), (k, 32))] for k in widths]
    batch = draw.normal(size=(ROWS * COUNT, 32)).astype(np.float32)
    homes = [meshes[n] for n in placement]
    body = jax.value_and_grad(lambda weights, x: loss(weights, x, homes))
    step = mm.jit(mm.microbatch(body, size=ROWS, argnum=1, schedule=schedule))
    return step, (weights, batch), jax.jit(jax.value_and_grad(loss))


def needs(schedule, *shape):
    """Bytes on the device that needs most, and what was chosen."""
    step, args, _ = pipeline(schedule, *shape)
    lowered = step.lower(*args)
    return max(need.total for need in lowered.memory_estimate()), next(iter(lowered.plan.choices), None)


SHAPES = {
    "equal": ((64, 64, 64, 64),),
    "wide head": ((32, 32, 512),),
    "wide start": ((512, 32, 32),),
    "interleaved": ((64,) * 4, (0, 1, 0, 1)),
    "V": ((64,) * 6, (0, 1, 2, 2, 1, 0)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_without_a_known_device_a_plan_needs_no_more_than_that_of_1f1b(name):
    shape = SHAPES[name]
    usual = needs("dualpipe-v", *shape)[0] if name == "V" else needs("1f1b", *shape)[0]
    need, choice = needs(Auto(), *shape)
    assert need <= max(usual, needs("zb-v", *shape)[0] if name == "V" else 0)
    assert choice.taken.fits
    published = [c for c in choice.candidates if c.fits]
    assert choice.taken.makespan == min(c.makespan for c in published)


@pytest.mark.longer
@pytest.mark.telling("V", "wide head")
@pytest.mark.parametrize("name", SHAPES)
def test_no_plan_needs_more_than_the_device_has(name):
    """With less memory it takes a longer table; where none fits, the one that needs least."""
    shape = SHAPES[name]
    plans = [schedule for schedule in ("zb-v", "dualpipe-v") if name == "V"] or ["1f1b", "gpipe"]
    least, most = (f(needs(schedule, *shape)[0] for schedule in plans) for f in (min, max))
    spans = []
    for device in (2 * most, most, (least + most) // 2, least):
        need, choice = needs(Auto(device=device), *shape)
        assert need <= device
        spans.append(choice.taken.makespan)
    assert spans == sorted(spans)
    with pytest.warns(UserWarning, match=r"^schedule auto: by .* no table fits into 1 byte") as told:
        assert needs(Auto(device=1.0), *shape)[0] <= most
    assert told[0].filename == __file__


def test_the_bound_holds_for_measured_costs_too():
    step, args, _ = pipeline(Auto(), *SHAPES["wide head"])
    schedule = step.profile(*args).schedule
    usual = needs("1f1b", *SHAPES["wide head"])[0]
    assert schedule.device == usual
    need, choice = needs(schedule, *SHAPES["wide head"])
    assert choice.costs.unit == "s"
    assert need <= usual


def test_a_loop_that_comes_back_up_gets_a_v():
    """Its route is found; V shapes are among the tables; results are those of plain JAX."""
    step, args, plain = pipeline("auto", *SHAPES["V"])
    (choice,) = step.plan(*args).choices
    assert choice.schedule.route == (0, 1, 2, 2, 1, 0)
    assert {"zb-v", "dualpipe-v"} <= {c.name for c in choice.candidates}
    for got, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(plain(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    (other,) = pipeline("auto", *SHAPES["interleaved"])[0].plan(*pipeline("auto", *SHAPES["interleaved"])[1]).choices
    assert other.schedule.route == ()


def test_memory_for_activations_is_taken_at_its_word():
    """What the user says bounds the table; a device that is given besides bounds the plan."""
    shape = SHAPES["equal"]
    _, free = needs(Auto(memory=1e9), *shape)
    need, bounded = needs(Auto(memory=1e9, device=needs("1f1b", *shape)[0]), *shape)
    assert free.limit == 1e9
    assert need <= needs("1f1b", *shape)[0]
    assert free.taken.makespan <= bounded.taken.makespan
    with pytest.raises(mm.UsageError, match="bytes of a device must be a finite number of at least 0, got -1"):
        Auto(device=-1)


DOUBLE_V = (0, 1, 1, 0, 0, 1, 1, 0)


def test_a_loop_that_goes_down_and_up_twice():
    """No published table goes that way: stages are numbered round and round."""
    step, args, plain = pipeline("auto", (32,) * 8, DOUBLE_V)
    for got, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(plain(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    (choice,) = step.plan(*args).choices
    assert choice.schedule.route == ()
    assert "taken" in str(choice)
