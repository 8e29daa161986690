"""Tests marked ``compile_gpu`` need JAX's compiler for GPUs, which `.ci/run compile-gpu` has. Others skip them."""

import importlib.util

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs the compiler where it is not installed."""
    needed = ("jax_cuda12_plugin", "nvidia.cuda_nvcc")
    if item.get_closest_marker("compile_gpu") and not (
        importlib.util.find_spec("nvidia") and all(map(importlib.util.find_spec, needed))
    ):
        pytest.skip("needs ./bootstrap.sh --group compile-gpu")
