"""``python -m multimesh demo``: a small transformer as a pipeline, beside the same function on one device."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import multimesh as mm
from multimesh.errors import DisagreementError, MissingPartError
from multimesh.observe.profile import Profile

STAGES, DATA, MODEL = 2, 2, 2  # devices: pipeline stages x data x tensor parallelism
LAYERS, WIDTH, HEADS, HIDDEN, VOCAB, SEQUENCE = 2, 32, 4, 128, 64, 16  # layers of a stage
ROWS = 4  # sequences of a microbatch
RATE = 0.2  # of SGD
TOLERANCE = 1e-5  # relative difference of two losses

Params = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A run: schedule, number of steps, microbatches of a step."""

    schedule: str = "1f1b"
    steps: int = 8
    microbatches: int = 4

    @property
    def chunks(self) -> int:
        """The stages on each submesh, which share its layers."""
        return mm.schedules.get(self.schedule).usual

    def homes(self, submeshes: tuple[Mesh, ...]) -> tuple[Mesh, ...]:
        """Return the submesh of each stage."""
        placement = mm.schedules.get(self.schedule).placement(STAGES)
        return tuple(submeshes[placement[s % len(placement)]] for s in range(STAGES * self.chunks))


def meshes() -> tuple[Mesh, ...]:
    """Return a submesh of ``DATA x MODEL`` devices for each stage."""
    count = STAGES * DATA * MODEL
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX_PLATFORMS names a platform that is not there
        raise MissingPartError(f"JAX found no devices: {str(error) or 'no backend'}; look at JAX_PLATFORMS") from error
    if len(devices) < count:
        raise MissingPartError(
            f"the demo needs {count} devices and JAX found {len(devices)} ({devices[0].platform}); "
            "drop --devices real to use virtual CPU devices"
        )
    grid = np.array(devices[:count]).reshape(STAGES, DATA, MODEL)
    return tuple(Mesh(part, ("data", "model")) for part in grid)


def init(chunks: int = 1) -> Params:
    """Return NumPy parameters: the embedding, and the layers of each stage, with ``chunks`` stages on a submesh."""
    draw = np.random.default_rng(0).normal

    def matrix(*shape: int) -> np.ndarray:
        return (draw(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    def layer() -> Params:
        return {
            "qkv": matrix(WIDTH, HEADS, 3 * WIDTH // HEADS),
            "out": matrix(WIDTH, WIDTH).reshape(HEADS, WIDTH // HEADS, WIDTH),
            "up": matrix(WIDTH, HIDDEN),
            "down": matrix(HIDDEN, WIDTH),
        }

    embedding = 0.1 * draw(size=(VOCAB, WIDTH)).astype(np.float32)
    return {
        "embedding": embedding,
        "stages": [[layer() for _ in range(LAYERS // chunks)] for _ in range(STAGES * chunks)],
    }


def place(params: Params, homes: tuple[Mesh, ...]) -> Params:
    """Place the parameters on the submeshes of their stages, heads and hidden units over ``model``."""

    def put(name: str, weight: np.ndarray, mesh: Mesh) -> jax.Array:
        spec = PartitionSpec(None, "model") if name in ("qkv", "up") else PartitionSpec("model")
        return jax.device_put(weight, NamedSharding(mesh, spec))

    stages = [
        [{name: put(name, weight, mesh) for name, weight in layer.items()} for layer in layers]
        for mesh, layers in zip(homes, params["stages"], strict=True)
    ]
    home = NamedSharding(homes[0], PartitionSpec())  # the last stage reads it too, and gets a copy if it is elsewhere
    return {"embedding": jax.device_put(params["embedding"], home), "stages": stages}


def batch(step: int, rows: int) -> np.ndarray:
    """Return sequences of ``SEQUENCE + 1`` tokens that count up by 1, 2 or 3, from anywhere: something to learn."""
    draw = np.random.default_rng((1, step)).integers
    start, stride = draw(VOCAB, size=(rows, 1)), draw(1, 4, size=(rows, 1))
    return ((start + stride * np.arange(SEQUENCE + 1)) % VOCAB).astype(np.int32)


def place_batch(tokens: np.ndarray, submeshes: tuple[Mesh, ...]) -> Any:
    """Place a batch on the first stage, its rows over ``data``; the last stage gets its labels the same way."""
    return jax.device_put(tokens, NamedSharding(submeshes[0], PartitionSpec("data")))


def block(w: Params, x: Any) -> Any:
    """Apply causal self-attention, then a two-layer perceptron. ``x``: (rows, SEQUENCE, WIDTH)."""
    x = mm.with_sharding_constraint(x, PartitionSpec("rows"))
    q, k, v = jnp.split(jnp.einsum("btd,dhe->bhte", _normalise(x), w["qkv"]), 3, -1)
    scores = jnp.einsum("bhqe,bhke->bhqk", q, k) / np.sqrt(q.shape[-1])
    past = jnp.tril(jnp.ones((SEQUENCE, SEQUENCE), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -1e30), -1)
    x = x + jnp.einsum("bhqk,bhke,hed->bqd", weights, v, w["out"])
    x = x + jax.nn.gelu(_normalise(x) @ w["up"]) @ w["down"]
    return mm.with_sharding_constraint(x, PartitionSpec("rows"))


def _normalise(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def make_step(options: Job, submeshes: tuple[Mesh, ...]) -> Callable[[Params, Any], tuple[Params, Any]]:
    """Return ``(params, tokens) -> (new params, loss)``. It runs under `multimesh.jit` and under ``jax.jit``."""
    homes = options.homes(submeshes)
    axes = {"rows": "data"}  # logical axis of rows, and the axis of a submesh that divides them

    def hidden(layers: list[Params], x: Any) -> Any:
        return functools.reduce(lambda x, w: block(w, x), layers, x)

    def embed(embedding: Any, layers: list[Params], tokens: Any) -> Any:
        return hidden(layers, embedding[tokens])

    def head(embedding: Any, layers: list[Params], x: Any, labels: Any) -> Any:
        logits = jax.nn.log_softmax(_normalise(hidden(layers, x)) @ embedding.T)
        return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], -1))

    def loss(params: Params, tokens: Any) -> Any:
        first, *middle, last = params["stages"]
        x = mm.task(embed, mesh=homes[0], logical_axes=axes)(params["embedding"], first, tokens[:, :-1])
        for s, layers in enumerate(middle, 1):
            x = mm.task(hidden, f"hidden{s}", mesh=homes[s], logical_axes=axes)(layers, x)
        return mm.task(head, mesh=homes[-1], logical_axes=axes)(params["embedding"], last, x, tokens[:, 1:])

    def step(params: Params, tokens: Any) -> tuple[Params, Any]:
        summed = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=ROWS, schedule=options.schedule)
        total, gradients = summed(params, tokens)
        rate = RATE / options.microbatches
        return jax.tree.map(lambda w, g: w - rate * g, params, gradients), total / options.microbatches

    return step


def train(options: Job, submeshes: tuple[Mesh, ...]) -> Iterator[tuple[float, float]]:
    """Train twice from the same start; yield the losses of each step, on the submeshes and on one device."""
    pipelined, plain = _jit_step(options, submeshes), jax.jit(make_step(options, submeshes))
    (params, _), reference = _first(options, submeshes), init(options.chunks)
    for number in range(1, options.steps + 1):
        tokens = batch(number, ROWS * options.microbatches)
        params, loss = pipelined(params, place_batch(tokens, submeshes))
        with warnings.catch_warnings():  # one program is meant
            warnings.filterwarnings("ignore", message="task .* is a part of one program here")
            reference, expected = plain(reference, tokens)
        yield float(loss), float(expected)


def profile(options: Job) -> Profile:
    """Measure a step of `train`."""
    submeshes = meshes()
    return _jit_step(options, submeshes).profile(*_first(options, submeshes))


@functools.cache
def _jit_step(options: Job, submeshes: tuple[Mesh, ...]) -> Any:
    return mm.jit(make_step(options, submeshes), donate_argnums=0)


def _first(options: Job, submeshes: tuple[Mesh, ...]) -> tuple[Params, Any]:
    """Return the arguments of the first step."""
    tokens = batch(1, ROWS * options.microbatches)
    return place(init(options.chunks), options.homes(submeshes)), place_batch(tokens, submeshes)


def run_demo(options: Job, *, show_plan: bool, quiet: bool) -> dict[str, Any]:
    """Train, print unless ``quiet``, and return the printed table as data for JSON.

    After printing, it is an error if the losses of a step differ by more than rounding; its ``found`` has the data.
    """
    say = (lambda text: None) if quiet else functools.partial(print, flush=True)
    submeshes = meshes()
    say(
        f"transformer, {STAGES * LAYERS} layers, tied embedding; {STAGES * DATA * MODEL} {jax.devices()[0].platform} "
        f"devices: pp {STAGES} dp {DATA} tp {MODEL}\n{options.schedule}, {options.microbatches} microbatches of {ROWS} "
        f"sequences"
    )
    steps: list[dict[str, Any]] = []
    summary = {**asdict(options), "steps": steps, "tolerance": TOLERANCE, "agrees": True}
    if show_plan:
        plan = _jit_step(options, submeshes).plan(*_first(options, submeshes))
        summary["plan"] = json.loads(plan.to_json())
        say(f"\n{plan}")
    say("\ncompiling ...\n\nstep  submeshes  one device  difference")
    wrong = ""
    for number, (loss, reference) in enumerate(train(options, submeshes), 1):
        difference = abs(loss - reference) / abs(reference)
        say(f"{number:>4}  {loss:>9.6f}  {reference:>10.6f}  {difference:>10.1e}")
        step = {"step": number, "loss": loss, "reference": reference, "difference": difference}
        steps.append({k: v if np.isfinite(v) else None for k, v in step.items()})  # JSON has no NaN
        if not difference <= TOLERANCE:  # NaN too
            wrong = wrong or (
                f"step {number}: the losses {loss!r} and {reference!r} differ by {difference:.1e}, which is more than "
                f"{TOLERANCE:g}"
            )
    if wrong:
        error = DisagreementError(wrong)
        error.found = {**summary, "agrees": False}  # type: ignore[attr-defined]
        raise error
    first, last = steps[0]["loss"], steps[-1]["loss"]
    say(f"\nok: {len(steps)} steps agree to {TOLERANCE:g}; loss {first:.4f} -> {last:.4f}")
    return summary
