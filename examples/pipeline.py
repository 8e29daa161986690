"""A pipeline of two stages in ten minutes: run it, then change it.

    python examples/pipeline.py

It needs `multimesh` and nothing else, and writes timeline.html.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import multimesh as mm

mm.virtual_devices(8)  # with 8 accelerators, delete this line

# 1. Submeshes. Eight devices become two submeshes of 2 x 2. Their axes mean what axes of any JAX mesh mean.
devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
front, back = (Mesh(d, ("data", "model")) for d in devices)
axes = {"rows": "data", "hidden": "model"}  # logical name -> axis of the submesh


# 2. Tasks. Each stage is a plain function. A task says where it runs; what it returns is sent to whoever reads it.
def encode(w, x):
    """First stage: rows of x, to rows of the same width."""
    hidden = mm.with_sharding_constraint(x @ w["up"], P("rows", "hidden"))
    return jnp.tanh(hidden) @ w["down"]


def decode(w, x, y):
    """Last stage: the mean square error of a prediction from x."""
    hidden = mm.with_sharding_constraint(x @ w["up"], P("rows", "hidden"))
    return jnp.mean((jax.nn.relu(hidden) @ w["down"] - y) ** 2)


def loss(params, batch):
    """Both stages, one after the other; calling them on other submeshes in another order is as good."""
    x = mm.task(encode, mesh=front, logical_axes=axes)(params["front"], batch["x"])
    return mm.task(decode, mesh=back, logical_axes=axes)(params["back"], x, batch["y"])


# 3. Microbatches. The batch of 64 rows is worked on 8 rows at a time, in 1F1B order; loss and gradients are summed.
ROWS, SIZE, RATE = 64, 8, 0.1


def step(params, batch):
    """One step of SGD: new parameters and the loss."""
    total, grads = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=SIZE, schedule="1f1b")(params, batch)
    count = ROWS // SIZE
    # Code outside of tasks follows its operands: each parameter is updated on the submesh where it lives.
    return jax.tree.map(lambda w, g: w - RATE * g / count, params, grads), total / count


def main():
    """Train for five steps, beside the same function on one device."""
    rng = np.random.default_rng(0)

    def weights():
        return {
            "up": (rng.normal(size=(16, 32)) / 4).astype(np.float32),
            "down": (rng.normal(size=(32, 16)) / 6).astype(np.float32),
        }

    params = {"front": weights(), "back": weights()}
    x = rng.normal(size=(ROWS, 16)).astype(np.float32)
    batch = {"x": x, "y": np.sin(2 * x)}

    # 4. One jit. It traces `step` once, cuts it into kernels, compiles them, and runs them as the plan says. The old
    #    parameters are donated: their memory is used again for the new ones.
    train = mm.jit(step, donate_argnums=0)
    print(train.plan(params, batch), "\n")

    # 5. The same function under plain jax.jit is the reference: tasks and constraints mean nothing there.
    plain, reference = jax.jit(step), params
    for i in range(5):
        params, value = train(params, batch)
        with warnings.catch_warnings(action="ignore"):  # of tasks in one program, which is meant here
            reference, expected = plain(reference, batch)
        print(f"step {i}: loss {value:.6f} on two submeshes, {expected:.6f} on one device")
        np.testing.assert_allclose(value, expected, rtol=1e-5)

    # 6. Everything stays where it is used.
    for name, mesh in (("front", front), ("back", back)):
        devices = {device.id for w in params[name].values() for device in w.devices()}
        if devices != {device.id for device in mesh.devices.flat}:
            raise SystemExit(f"parameters of {name} left their submesh: they are on devices {sorted(devices)}")
        print(f"parameters of {name} are on devices {sorted(devices)}")

    # 7. Each kernel is measured alone; the page shows when it would run on submeshes that run at the same time.
    train.profile(params, batch).simulated.to_html("timeline.html")
    print("wrote timeline.html; open it in a browser, and point at a box")


if __name__ == "__main__":
    main()
