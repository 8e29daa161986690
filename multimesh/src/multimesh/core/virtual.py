"""Virtual CPU devices: a pipeline can be tried on any machine."""

from __future__ import annotations

import os

import jax

from multimesh.core import checks
from multimesh.errors import UsageError

_THREADS = 8  # for each device: a collective waits until each of its devices has a thread


def virtual_devices(count: int) -> None:
    """Make JAX see virtual CPU devices, in place of what this machine has.

    Call it before anything uses a device, and before `multimesh.distributed.initialize`; JAX may be imported already.
    On real devices leave the call out. It sets ``jax_platforms``, ``jax_num_cpu_devices`` and, unless they are set
    already, two variables: ``NPROC``, since a collective of devices without threads of their own would wait for ever,
    and ``OPENBLAS_NUM_THREADS=1``, since the devices would all wait for the same threads of BLAS. If SciPy's LAPACK has
    been loaded already (``import scipy.linalg``), the latter must be set in the environment.

    Parameters
    ----------
    count
        Devices of this process.

    Raises
    ------
    UsageError
        If JAX has started other devices already.

    Examples
    --------
    >>> mm.virtual_devices(8)  # doctest: +SKIP
    >>> front, back = np.array(jax.devices()).reshape(2, 4)  # doctest: +SKIP
    """
    count = checks.integer("virtual_devices: the number of devices", count, 1)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        local = jax.local_devices()
        if len(local) == count and all(device.platform == "cpu" for device in local):
            return
        raise UsageError(
            f"virtual_devices({count}): JAX has started already, with {len(local)} devices ({local[0].platform}); call "
            "it before anything that uses a device, such as jax.devices() or jnp.ones"
        ) from None
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("NPROC", str(max(64, _THREADS * count)))  # XLA reads it when it starts its devices
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when JAX first needs SciPy's LAPACK
