"""Stacked layers: arrays with a block of rows on each of several submeshes.

[How the passes work](../../../../docs/passes.md) has a section on its modules.
"""
