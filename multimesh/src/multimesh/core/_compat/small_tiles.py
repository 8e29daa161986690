"""Small tiles of matrix products in the code that XLA's CPU compiler writes itself.

Without threads in a kernel XLA writes code for each small product, unrolled to tiles of 11 x 9 vectors. LLVM takes
0.1 s for one, and 20 ms for tiles of 4 x 4, which run as fast. The size of the tile is an option that is a table, which
the ``compiler_options`` of JAX can't carry. So it is added where the client gets them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from multimesh.core._compat.versions import private, tell_change

NO_THREADS = "xla_cpu_multi_thread_eigen"
"""XLA's option for threads in a kernel of a CPU device, True by itself."""

_NAME, _SIZE = "xla_llvm_ir_gemm_tile_size", "4:4:1*vectwidth"
_OPTIONS, _DEBUG_OPTIONS, _TABLE = 3, 3, 500  # numbers of fields in XLA's compile_options.proto and xla.proto
_CompileOptions = private("lib.xla_client.CompileOptions")


@functools.cache
def has_small_tiles() -> bool:
    """Return whether options for XLA can be given small tiles here."""
    try:
        options = with_tiles(_CompileOptions())  # held, as the parts below do not hold it
        return _NAME in str(options.executable_build_options.debug_options)
    except (AttributeError, TypeError, RuntimeError, jax.errors.JaxRuntimeError) as error:
        if _CompileOptions is not None:
            tell_change(str(error))
        return False


def compile_kernel(lowered: Any, options: Mapping[str, Any]) -> Any:
    """Return the executable of ``lowered``, with small tiles where it has no threads and they can be had."""
    if options.get(NO_THREADS) is False and has_small_tiles():
        _give_small_tiles(lowered)
    return lowered.compile(options)


def _give_small_tiles(lowered: Any) -> None:
    try:
        arguments = lowered._lowering.compile_args
        client = arguments["backend"]
    except (AttributeError, KeyError, TypeError) as error:
        tell_change(f"{type(error).__name__}: {error}")
        return
    if client.platform == "cpu":
        arguments["backend"] = _with_small_tiles(client)


class _Client:
    """A client whose programs are compiled with small tiles. All else is that of JAX."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def compile_and_load(self, *args: Any, compile_options: Any, **others: Any) -> Any:
        return self._client.compile_and_load(*args, compile_options=with_tiles(compile_options), **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


_with_small_tiles = functools.cache(_Client)


def with_tiles(options: Any) -> Any:
    """Return XLA's options with small tiles; messages of protobuf that are joined are merged."""
    entry = _field(1, _NAME.encode()) + _field(2, _SIZE.encode())
    added = _field(_OPTIONS, _field(_DEBUG_OPTIONS, _field(_TABLE, entry)))
    return type(options).ParseFromString(options.SerializeAsString() + added)


def _field(number: int, content: bytes) -> bytes:
    """Return a field of bytes as protobuf writes it."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
