"""Below ``jax.jit``: copies of shards, and executables that are loaded for other devices or finished for a mesh.

They serve speed or results on Explicit meshes, through private parts of JAX that `_compat` finds.
Where it finds none, public functions do the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import get_compile_options
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from multimesh.core import _compat


def transfer(
    sources: Sequence[jax.sharding.Sharding], layouts: Sequence[jax.sharding.Sharding], avals: Sequence[Any]
) -> Callable[..., Sequence[Any]]:
    """Return a function that copies arrays of known ``sources`` to other devices with ``layouts``.

    Where every shard has one counterpart it calls the copy at the end of ``jax.device_put`` at once: finding the way
    there takes eight times as long as the copy. Call it inside `explicit_transfers`.
    """
    layouts = list(layouts)
    copy_shards = _compat.copy_shards
    if copy_shards is not None and all(map(_shard_by_shard, sources, layouts, avals)):
        try:
            devices = [layout._internal_device_list.addressable_device_list for layout in layouts]
            return lambda *arrays: copy_shards(arrays, devices, layouts)
        except AttributeError as error:
            _compat.tell_change(str(error))
    return lambda *arrays: jax.device_put(list(arrays), layouts)


@functools.cache
def takes_option(name: str, value: Any) -> bool:
    """Return whether XLA's CPU compiler knows an option and this value of it."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        try:
            jax.jit(lambda: jnp.zeros(())).lower().compile({name: value})
        except jax.errors.JaxRuntimeError:
            return False
    return True


def assembler(shape: tuple[int, ...], layout: NamedSharding) -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes an array of its shards here, one for each device in the order of the layout.

    All calls get shards of one type on the same devices. JAX checks those of the first call, which takes several times
    as long as to make an array.
    """
    types: list[Any] = []
    unchecked = _compat.array_of_shards

    def assemble(shards: Sequence[Any]) -> Any:
        if types and unchecked is not None:
            return unchecked(types[0], layout, shards, committed=True, _skip_checks=True)
        array = jax.make_array_from_single_device_arrays(shape, layout, shards)
        if [shard.device for shard in array.addressable_shards] == [shard.device for shard in shards]:
            types.append(getattr(array, "aval", None))
        return array

    return assemble


def _shard_by_shard(source: jax.sharding.Sharding, layout: jax.sharding.Sharding, aval: Any) -> bool:
    """Return whether a transfer is a copy of each shard to one device of a disjoint set in this process."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) or source.memory_kind != layout.memory_kind:
        return False
    addressable = source.is_fully_addressable and layout.is_fully_addressable
    if not addressable or not source.device_set.isdisjoint(layout.device_set):
        return False
    parts = [list(s.devices_indices_map(aval.shape).values()) for s in (source, layout)]
    return parts[0] == parts[1]


def shares_executables(devices: Iterable[jax.Device]) -> bool:
    """Return whether a kernel compiled for some devices may run on others: on CPUs.

    Elsewhere neighbours matter. Where they may, `mm.pipeline` keeps both ends of a model apart from its layers: first
    calls then take 1.1 to 1.8 times plain jit's (docs/performance.md), and joined up to 2.3.
    """
    return all(device.platform == "cpu" for device in devices)


def _else_none(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to return None, with one warning, if JAX's objects lack parts that they had."""

    @functools.wraps(fn)
    def attempt(*args: Any) -> Any:
        try:
            return fn(*args)
        except (AttributeError, KeyError, TypeError) as error:
            _compat.tell_change(f"{fn.__name__}: {type(error).__name__}: {error}")
            return None

    return attempt


def has_cache() -> bool:
    """Return whether JAX looks for executables in its persistent compilation cache."""
    return bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)


def code_key(program: tuple[Any, ...] | None, mesh: Mesh) -> tuple[Any, ...] | None:
    """Return a key of the code of a kernel whose `program_of` is known: equal code has equal keys on all devices.

    None for a kernel that can't be shared (see `shares_executables`). With a persistent compilation cache each submesh
    has its own entry there, as XLA can't store an executable that it loaded from the cache.
    """
    devices = list(mesh.devices.flat)
    absent = all(map(_compat.is_compile_only, devices))
    local = all(d.process_index == jax.process_index() for d in devices)
    if program is None or (not absent and (has_cache() or not local or not shares_executables(devices))):
        return None
    return program, tuple(d.process_index - devices[0].process_index for d in devices) if absent else ()


@_else_none
def program_of(lowered: Any, mesh: Mesh) -> tuple[Any, ...] | None:
    """Return the program of a kernel that was lowered for ``mesh``, without the devices: equal ones have equal code.

    None for one with effects, callbacks or constants, and with versions of JAX that were not tried: loading code for
    the wrong devices ends the process. The text names a function of ``custom_partitioning``, such as cuDNN's attention,
    by the address of its record, so the contents of the record stand beside it.
    """
    lowering, devices = lowered._lowering, list(mesh.devices.flat)
    arguments = lowering.compile_args
    effects = ("unordered_effects", "ordered_effects", "host_callbacks", "mut", "pgle_profiler")
    if _compat.DeviceList is None or any(arguments.get(name) for name in effects):
        return None
    if lowering.const_args or list(lowering._device_list) != devices:
        return None
    free = tuple(type(s) for name in ("in_shardings", "out_shardings") for s in arguments[name])
    text = str(lowered.compiler_ir()).partition(" attributes ")[2]  # the module's name comes before
    partitioners = []
    for number, record in enumerate(arguments.get("keepalive") or ()):
        if type(record).__name__ != "_ShardingCallbackInfo" or list(record.mesh.devices.flat) != devices:
            return None
        text = text.replace(f'"{id(record)}"', f'"partitioner {number}"')
        functions = record.propagate_user_sharding, record.partition, record.infer_sharding_from_operands
        partitioners.append((*functions, record.in_tree, record.out_tree, record.static_args, record.mesh.axis_names))
    return text, free, mesh.axis_names, mesh.devices.shape, mesh.axis_types, tuple(partitioners)


@_else_none
def on_other_devices(compiled: Any, lowered: Any, mesh: Mesh, options: Mapping[str, Any]) -> Any:
    """Return the executable of ``lowered``, from an equal kernel on other devices; None if JAX can't load it there.

    Both kernels have the same `code_key`, and their submeshes the same axes. For devices that are not there it is the
    executable itself: no device loads it.
    """
    if _compat.DeviceList is None:
        return None
    devices = list(mesh.devices.flat)
    if all(map(_compat.is_compile_only, devices)):
        return compiled
    try:
        unloaded = compiled._executable._unloaded_executable
        device_list = _compat.DeviceList(tuple(devices))
        code = unloaded.backend.serialize_executable(unloaded.xla_executable)
        for_devices = get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.array(devices)[None],
            env_options_overrides=dict(options),
            backend=unloaded.backend,
        )
        loaded = unloaded.backend.deserialize_executable(code, device_list, for_devices)
    except jax.errors.JaxRuntimeError:
        return None
    if list(loaded.local_devices()) != devices:
        return None

    def move(sharding: Any) -> Any:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        if isinstance(sharding, SingleDeviceSharding):
            return SingleDeviceSharding(devices[0], memory_kind=sharding.memory_kind)
        return type(sharding)(device_list, sharding._hlo_sharding, memory_kind=sharding.memory_kind)

    moved_executable = dataclasses.replace(
        unloaded,
        xla_executable=loaded,
        device_list=device_list,
        input_shardings=[move(s) for s in unloaded.input_shardings],
        output_shardings=[move(s) for s in unloaded.output_shardings],
    )
    return load(moved_executable, lowered)


def finish(compiled: Any, lowered: Any, mesh: Mesh, jitted: Callable[..., Any]) -> Any:
    """Return an executable that was lowered for the Auto twin of ``mesh``, with its results on ``mesh`` itself.

    It skips JAX's check of the layouts of arguments of less than a byte (int4), as no array passes that. ``jitted``,
    the function of the executable, does not make that check.
    """
    small = [_less_than_byte(x.dtype) for x in jax.tree.leaves(lowered.args_info)]
    if mesh == _compat.auto(mesh) and not any(small):
        return compiled
    return _relaid(compiled, lowered, mesh, small) or _OnMesh(jitted if any(small) else compiled, compiled, mesh)


@_else_none
def _relaid(compiled: Any, lowered: Any, mesh: Mesh, small: Sequence[bool]) -> Any:
    """Return the same executable with its results on ``mesh``, and without layouts of the ``small`` arguments."""
    if _compat.DeviceList is None:
        return None
    unloaded = compiled._executable._unloaded_executable
    shardings = _relabel(unloaded.output_shardings, mesh)
    layouts = [None if flag else x for flag, x in zip(small, unloaded.xla_in_layouts, strict=True)]
    return load(dataclasses.replace(unloaded, output_shardings=shardings, xla_in_layouts=layouts), lowered)


def _less_than_byte(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.integer):
        return bool(jnp.iinfo(dtype).bits < 8)
    return jnp.issubdtype(dtype, jnp.floating) and bool(jnp.finfo(dtype).bits < 8)


def _relabel(shardings: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Return the same layouts on another mesh of the same devices."""
    return [
        NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) if isinstance(s, NamedSharding) else s for s in shardings
    ]


class _OnMesh:
    """An executable with its results on another mesh of the same devices."""

    def __init__(self, call: Callable[..., Any], compiled: Any, mesh: Mesh):
        self._call, self._compiled = call, compiled
        self.output_shardings = _relabel(compiled.output_shardings, mesh)

    def __call__(self, *args: Any) -> list[Any]:
        return [
            jax.make_array_from_single_device_arrays(x.shape, s, [shard.data for shard in x.addressable_shards])
            for x, s in zip(self._call(*args), self.output_shardings, strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def load(unloaded: Any, lowered: Any) -> Any:
    types = lowered.args_info, lowered.out_tree, lowered._no_kwargs, lowered._in_types, lowered._out_types
    return jax.stages.Compiled(unloaded.load(), [], *types)
