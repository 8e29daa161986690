"""The public names, under both import paths."""

import importlib

import pytest

import multimesh as mm


@pytest.mark.promise("multimesh.jax is the same API under the original's import path")
def test_two_import_paths():
    original = importlib.import_module("multimesh.jax")
    names = {"jit", "microbatch", "register_task", "schedules", "task", "with_sharding_constraint"}
    assert names <= set(mm.__all__)
    assert set(mm.__all__) <= set(original.__all__)
    other_forms = set(importlib.import_module("multimesh.original").__all__)  # test_original_names.py calls these
    for name in set(mm.__all__) - other_forms:
        assert getattr(original, name) is getattr(mm, name)


def test_every_public_name_is_there():
    assert all(getattr(mm, name) is not None for name in mm.__all__)
    with pytest.raises(AttributeError):
        _ = mm.no_such_name
