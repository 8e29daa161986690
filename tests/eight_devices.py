"""Eight virtual CPU devices, and what all tests with JAX share; import it before jax, from a ``conftest.py``."""

import os

import pytest

from tests.hooks import *  # noqa: F403
from tests.xla_flags import QUICK, add_flags

os.environ.setdefault("NPROC", "64")  # fewer threads than device programs in flight: collectives wait for ever
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MULTIMESH_VERIFY", "1")  # every pass is checked in every test
add_flags("--xla_force_host_platform_device_count=8", *QUICK)


@pytest.fixture
def double():
    """Switch JAX's 64-bit types on."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture
def compilations():
    """A list that gets an entry for every program that XLA compiles during the test."""
    import jax.monitoring

    durations: list[float] = []
    active = True

    def listen(event: str, seconds: float, **_: object) -> None:
        if active and event == "/jax/core/compile/backend_compile_duration":
            durations.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield durations
    active = False  # the public interface has no way to remove one listener
