"""The hooks as the patched MaxText calls them, around a training step in MaxText's manner but of a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multimesh import schedules
from multimesh.marking import contexts
from multimesh_maxtext.errors import LauncherError, UnsupportedError
from multimesh_maxtext.handoff import VARIABLE, TrainerConfig
from multimesh_maxtext.trainer import hooks
from multimesh_maxtext.trainer.step import StepFunction

MICROBATCHES, ROWS, WIDTH = 4, 16, 8


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainerConfig]]:
    """Give the hooks their configuration, of two stages."""

    def hand_over(**values: Any) -> TrainerConfig:
        config = TrainerConfig(stages=2, placement=str(tmp_path / "placement.json"), **values)
        monkeypatch.setenv(VARIABLE, config.variables()[VARIABLE])
        hooks._config.cache_clear()
        return config

    monkeypatch.setattr(hooks, "_stages", None)
    hand_over()
    yield hand_over
    hooks._config.cache_clear()


def set_mesh(*names: str) -> Mesh:
    """Give the hooks the mesh of the first of the two stages, as MaxText does."""
    shape = (2, 2) if len(names) > 1 else (4,)
    mesh = Mesh(np.array(hooks.stage_devices()).reshape(shape), names)
    assert hooks.model_mesh(SimpleNamespace(num_decoder_layers=2, first_num_dense_layers=0), mesh) == mesh.abstract_mesh
    return mesh


def split(x: jax.Array) -> jax.Array:
    """MaxText's ``reshape_to_microbatch_accumulations``."""
    return x.reshape(ROWS // MICROBATCHES, MICROBATCHES, *x.shape[1:]).swapaxes(0, 1)


def scan(body: Any, init: Any, batch: Any, *, split: Any, length: int) -> Any:
    """Stand in for the hook where MultiMesh was not asked for."""
    return jax.lax.scan(body, init, jax.tree.map(split, batch), length=length)


def make_step(layer: Any, accumulate: Any) -> Any:
    """A step with MaxText's carry (sums, parameters, the rest of the state) and results that microbatches stack."""

    def loss(params: Any, rows: Any) -> tuple[jax.Array, jax.Array]:
        y = rows["x"]
        for number in range(2):
            y = layer(number, jax.checkpoint(lambda w, y: jnp.tanh(y @ w)))(params[f"layers_{number}"], y)
        return jnp.sum((y - rows["y"]) ** 2), jnp.max(y)

    def body(carry: Any, rows: Any) -> Any:
        # As dropout does: random numbers of a key and a counter, which the next microbatch finds advanced.
        key, count = carry["rest_state"]["key"], carry["rest_state"]["count"]
        rows = rows | {"x": rows["x"] * jax.random.bernoulli(jax.random.fold_in(key, count), shape=(WIDTH,))}
        layer = {"count": carry["rest_state"]["layers_1"]["count"] + 1}
        carry["rest_state"] = {"key": key, "count": jax.jit(lambda count: count + 2)(count) + 1, "layers_1": layer}
        (value, peak), grads = jax.value_and_grad(loss, has_aux=True)(carry["ga_params"], rows)
        carry["loss"] += value
        carry["grad"] = jax.tree.map(jnp.add, grads, carry["grad"])
        return carry, {"peak": peak}

    def step(state: Any, batch: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        init = {"loss": 0.0, "grad": zeros, "ga_params": state["params"], "rest_state": state["random"]}
        total, aux = accumulate(body, init, batch, split=split, length=MICROBATCHES)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], total["grad"])
        metrics = {"loss": total["loss"], "peak": jnp.sum(aux["peak"], axis=0)}
        return {"params": params, "random": total["rest_state"]}, metrics

    return step


def init() -> Any:
    keys = jax.random.split(jax.random.key(1), 2)
    params = {f"layers_{n}": jax.random.normal(keys[n], (WIDTH, WIDTH)) / 4 for n in range(2)}
    count = jnp.zeros((), jnp.uint32)
    return {"params": params, "random": {"key": jax.random.key(3), "count": count, "layers_1": {"count": count}}}


def batch() -> Any:
    x, y = jax.random.normal(jax.random.key(2), (2, ROWS, WIDTH))
    return {"x": x, "y": y}


@pytest.mark.telling("1f1b-0", "auto-1000000")
@pytest.mark.parametrize(
    ("schedule", "limit"), [("1f1b", 0), ("auto", 0), pytest.param("auto", 10**6, marks=pytest.mark.longer)]
)
def test_a_step_in_maxtexts_manner_becomes_a_pipeline(
    configure: Callable[..., TrainerConfig], tmp_path: Path, schedule: str, limit: int
):
    """Under the schedule ``auto`` it is measured before it runs, and made again."""
    file = tmp_path / "schedule.json"
    config = configure(schedule=schedule, limit=limit, chosen=str(file) if schedule == "auto" else "")
    assert hooks.stage_devices() == jax.devices()[:4]
    mesh = set_mesh("data", "tensor")
    assert hooks.first_device(mesh.abstract_mesh).platform == "cpu"

    replicated = jax.tree.map(lambda _: NamedSharding(mesh, P()), jax.eval_shape(init))
    types = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(init), replicated
    )
    types, shardings, _ = hooks.place_state(types, replicated, None)
    assert jax.tree.map(lambda x: x.sharding, types) == shardings
    state = hooks.init_state(init, in_shardings=None, out_shardings=shardings)()

    step = hooks.jit(make_step(hooks.layer, hooks.accumulate), in_shardings=None, out_shardings=None, donate_argnums=0)
    assert step.lower(types, None).compile(compiler_options={}).memory_analysis() is None
    expected, reference = jax.jit(make_step(lambda _, fn: fn, scan))(init(), batch())
    with jax.set_mesh(mesh):  # as MaxText calls it, its batch on the first stage
        actual, metrics = step(state, jax.device_put(batch(), NamedSharding(mesh, P("data"))))

    for name in ("loss", "peak"):
        np.testing.assert_allclose(metrics[name], reference[name], rtol=1e-5)
    for n in range(2):
        name = f"layers_{n}"
        np.testing.assert_allclose(actual["params"][name], expected["params"][name], rtol=1e-5, atol=1e-6)
    assert actual["random"]["count"] == expected["random"]["count"] == 3 * MICROBATCHES
    assert jnp.all(jax.random.key_data(actual["random"]["key"]) == jax.random.key_data(jax.random.key(3)))
    placement = json.loads(Path(config.placement).read_text())
    arrays = {key: [0, 1, 2, 3] for key in ("['params']['layers_0']", "['random']['count']", "['random']['key']")}
    arrays |= {key: [4, 5, 6, 7] for key in ("['params']['layers_1']", "['random']['layers_1']['count']")}
    assert placement["created"]["arrays"] == placement["stepped"]["arrays"] == arrays
    if schedule == "auto":
        choice = json.loads(file.read_text())
        assert choice["costs"]["unit"] == "s"
        assert all(time > 0 for times in choice["costs"]["times"] for time in times[::2])
        assert (choice["device"] == 10**6) == bool(limit)
        assert schedules.load(file) == schedules.custom(choice["table"])


@pytest.mark.parametrize(
    "advance",
    [lambda state, x: x, lambda state, x: 2 * state, lambda state, x: state + jnp.uint32(jnp.sum(x))],
    ids=["data", "no sum", "sum of data"],
)
@pytest.mark.usefixtures("configure")
def test_a_state_that_does_more_than_count_is_refused(advance: Any):
    def body(carry: Any, rows: Any) -> Any:
        return carry | {"rest_state": {"mean": advance(carry["rest_state"]["mean"], rows)}}, None

    set_mesh("data")
    init = {"loss": 0.0, "ga_params": {}, "rest_state": {"mean": jnp.zeros((), jnp.uint32)}}
    with pytest.raises(
        UnsupportedError, match=r"\['mean'\] changes with every microbatch, but counts nothing"
    ) as error:
        hooks.accumulate(body, init, jnp.zeros((ROWS,), jnp.uint32), split=split, length=MICROBATCHES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", ["dump", "profile"])
def test_a_step_that_was_dumped_or_profiled_compiles_again_for_other_types(
    configure: Callable[..., TrainerConfig], tmp_path: Path, option: str
):
    configure(**{option: str(tmp_path / "out")})
    set_mesh("data")
    traced = []

    def train(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        traced.append(x.shape)
        return w + 1, hooks.layer(1, lambda w, x: jnp.sum(x @ w))(w, x)

    step = hooks.jit(train, donate_argnums=0)
    weights = jax.device_put(jnp.eye(WIDTH), NamedSharding(hooks._current().of_layer(1), P()))
    for number, rows in enumerate((4, 6, 4)):
        weights, total = step(weights, jnp.ones((rows, WIDTH)))
        assert total == jnp.sum(jnp.ones((rows, WIDTH)) @ (jnp.eye(WIDTH) + number))
    assert traced == [(4, WIDTH), (6, WIDTH)]
    assert list((tmp_path / "out").iterdir())


def test_small_arrays_of_the_state_lie_whole_where_that_is_asked_for(configure: Callable[..., TrainerConfig]):
    configure(replicate_below=64)
    split = NamedSharding(set_mesh("tensor"), P("tensor"))
    state = {"layers_1": {name: jax.ShapeDtypeStruct((n,), float, sharding=split) for name, n in (("w", 64), ("b", 8))}}
    types, shardings, _ = hooks.place_state(state, jax.tree.map(lambda x: x.sharding, state), None)
    for name, spec in (("w", P("tensor")), ("b", P())):
        assert types["layers_1"][name].sharding == shardings["layers_1"][name]
        assert shardings["layers_1"][name].spec == spec
        assert shardings["layers_1"][name].device_set == set(jax.devices()[4:8])


def test_layers_of_a_forecast_are_copies_of_the_first(configure: Callable[..., TrainerConfig]):
    class Decoder:
        count = 0

        def make(self, kind: str) -> nnx.Module:
            self.count += 1
            return nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    decoder = Decoder()
    for forecast, expected in (("", 2), ("file", 4)):
        configure(forecast=forecast)
        one, two = (hooks.new_layer(decoder.make, "a") for _ in range(2))
        assert one is not two
        assert one.kernel is not two.kernel  # as parameters they are two
        assert decoder.count == expected - bool(forecast)
        hooks.new_layer(decoder.make, "b")
        decoder.count = 2


def test_layouts_that_a_model_leaves_open_are_derived(configure: Callable[..., TrainerConfig]):
    calls = []
    step = StepFunction(lambda state, batch: (calls.append(contexts.current()), state), (), configure())
    step(jnp.zeros(2), jnp.zeros(2))
    assert calls[0].autoshard


def test_an_evaluation_gives_nothing_up_and_writes_no_placement(configure: Callable[..., TrainerConfig]):
    set_mesh("data", "tensor")
    evaluate = hooks.jit(lambda state, x: hooks.layer(1, lambda w, x: jnp.sum(x @ w))(state, x), donate_argnums=())
    weights = jax.device_put(jnp.eye(WIDTH), NamedSharding(hooks._current().of_layer(1), P()))
    assert evaluate(weights, jnp.ones((4, WIDTH))) == 4 * WIDTH
    assert not weights.is_deleted()
    assert not Path(configure().placement).exists()


@pytest.mark.usefixtures("configure")
def test_a_model_without_a_mesh_is_refused():
    with pytest.raises(LauncherError, match=r"MaxText built a model before its mesh; .* run ./bootstrap.sh"):
        hooks.layer(0, init)
