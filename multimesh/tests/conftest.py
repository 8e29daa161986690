"""Eight virtual CPU devices for every test of the library; this runs before jax is imported."""

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.gpu_compiler import pytest_runtest_setup  # noqa: F401
from tests.quick_gc import pytest_collection_finish  # noqa: F401
from tests.telling import pytest_collection_modifyitems  # noqa: F401
from tests.xla_flags import QUICK, add_flags

os.environ.setdefault("NPROC", "64")  # fewer threads than device programs in flight: collectives wait for ever
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MULTIMESH_VERIFY", "1")  # every pass is checked in every test
add_flags("--xla_force_host_platform_device_count=8", *QUICK)

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "benchmarks")]  # pytest's importlib mode adds no folder

if sys.modules.get("multimesh") is not None and getattr(sys.modules["multimesh"], "__file__", None) is None:
    # pytest's importlib mode names this file multimesh.tests.conftest and makes a package of the project's folder.
    del sys.modules["multimesh"]
    importlib.import_module("multimesh")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell started pytest in the background; tests send it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "flax: needs flax; left out where a jax without a matching flax is tested")


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

    seen: list[float] = []
    active = True

    def listen(event: str, seconds: float, **_: object) -> None:
        if active and event == "/jax/core/compile/backend_compile_duration":
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    active = False  # the public interface has no way to remove one listener
