"""`multimesh.fft` against one device and jaxDecomp, where it is installed: CPU time, in turns in one process.

    python multimesh/benchmarks/fft.py [SIZE] [--runs N]

complex64 cubes on 8 devices, slabs over all of them and pencils 4 x 2, transposed and in natural order. jaxDecomp
returns the transposed layout; in natural order it gets the transposition that it leaves out.
"""

from __future__ import annotations

import argparse
import functools
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")

import jax
import jax.numpy as jnp
import numpy as np
import turns
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

try:
    import jaxdecomp
except ImportError:
    jaxdecomp = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", type=int, nargs="?", default=256)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    rng, shape = np.random.default_rng(0), (args.size,) * 3
    x = (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)
    whole = jax.device_put(x, jax.devices()[0])
    one = jax.jit(jnp.fft.fftn)
    print(f"{args.size}^3 complex64, 8 devices")
    for name, grid, spec, back in (("slab", (8, 1), P("x"), (2, 0, 1)), ("pencil", (4, 2), P("x", "y"), (2, 0, 1))):
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(grid), ("x", "y"))
        shards = jax.device_put(x, NamedSharding(mesh, spec))
        real = jax.device_put(x.real, NamedSharding(mesh, spec))
        np.testing.assert_allclose(mm.fft.fftn(shards), one(whole), atol=1e-5 * args.size**3)
        layouts: dict[str, dict] = {"transposed": {}, "natural": {}}
        for layout, contenders in layouts.items():
            transposed = layout == "transposed"
            ours = jax.jit(functools.partial(mm.fft.fftn, mesh=mesh, spec=spec, transposed=transposed))
            halves = jax.jit(functools.partial(mm.fft.rfftn, mesh=mesh, spec=spec, transposed=transposed))
            contenders[f"ours, {name}, {layout}"] = lambda f=ours, x=shards: f(x)
            contenders[f"ours, {name}, {layout}, real"] = lambda f=halves, x=real: f(x)
            contenders["jnp.fft.fftn, one device"] = lambda: one(whole)
            if jaxdecomp is not None:
                theirs = jax.device_put(x, NamedSharding(mesh, P(*spec, *[None] * (2 - len(spec)))))
                order = (0, 1, 2) if transposed else back
                pfft = jax.jit(lambda x, order=order: jaxdecomp.fft.pfft3d(x).transpose(order))
                if not transposed:
                    np.testing.assert_allclose(pfft(theirs), one(whole), atol=1e-5 * args.size**3)
                contenders["jaxDecomp"] = lambda pfft=pfft, x=theirs: pfft(x)
            base = "jaxDecomp" if jaxdecomp is not None else "jnp.fft.fftn, one device"
            table = turns.measure(contenders, args.runs)
            turns.show(table, base)
            all_times, half_times, one_times = (np.median(t) for t in list(table.values())[:3])
            print(f"{name}, {layout}: real / complex {half_times / all_times:.2f}", end=", ")
            print(f"complex / one device {all_times / one_times:.2f}\n")


if __name__ == "__main__":
    main()
