"""Everything of JAX that is not its documented interface, in one place (supported: jax 0.10 and later).

The rest of the package uses public JAX only, or what this module gives. What lies under ``jax._src`` is for speed and
for better messages, and each use has a public fallback with the same results. Fallbacks take over with a JAX that was
not tried, and with any when ``MULTIMESH_PUBLIC_JAX=1`` is set. docs/jax-internals.md lists them.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core as _extend
from jax.extend.core import primitives as _primitives
from jax.interpreters import ad as _ad
from jax.interpreters import batching as _batching
from jax.interpreters import mlir as _mlir
from jax.interpreters import partial_eval as _partial_eval
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from multimesh.errors import MultiMeshError, UsageError

SUPPORTED = "jax>=0.10"  # as in pyproject.toml
_NEWEST_TRIED = (0, 12)
_NEWER = jax.__version_info__[:2] > _NEWEST_TRIED

if jax.__version_info__ < (0, 10):
    raise MultiMeshError(f"MultiMesh needs {SUPPORTED}, found {jax.__version__}: pip install '{SUPPORTED}'")
if _NEWER:
    warnings.warn(
        f"jax {jax.__version__} is newer than this MultiMesh, which was tried with jax up to "
        f"{'.'.join(map(str, _NEWEST_TRIED))}: it goes on with JAX's public functions alone, which takes longer",
        stacklevel=2,
    )


def _private(module: str) -> Any:
    """A module under ``jax._src``; None where its fallbacks are to be used."""
    if _NEWER or os.environ.get("MULTIMESH_PUBLIC_JAX") == "1":
        return None
    try:
        return importlib.import_module(f"jax._src.{module}")
    except ImportError as error:
        raise MultiMeshError(
            f"jax {jax.__version__} lacks jax._src.{module} ({error}), which its release has: reinstall jax and "
            "jaxlib, or set MULTIMESH_PUBLIC_JAX=1 to do without it"
        ) from error


_clusters = _private("clusters")
_compiler = _private("compiler")
_config = _private("config")
_core = _private("core")
_distributed = _private("distributed")
_mesh = _private("mesh")
_source_info = _private("source_info_util")
_xla_bridge = _private("xla_bridge")
_tracing = _private("interpreters.partial_eval")
_xla_bridge = _private("xla_bridge")
_xla_client: Any = getattr(_private("lib"), "xla_client", None)


@contextlib.contextmanager
def tried_version() -> Iterator[None]:
    """Name the versions where a JAX that was never tried lacks something that MultiMesh needs."""
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        if not _NEWER:
            raise
        raise MultiMeshError(
            f"this version of MultiMesh does not work with jax {jax.__version__} ({error}), with which it was never "
            f"tried: upgrade multimesh-jax, or pip install 'jax<{_NEWEST_TRIED[0]}.{_NEWEST_TRIED[1] + 1}'"
        ) from error


def launcher(method: str | None) -> Any:
    """JAX's knowledge of what launched this process; None where that is nothing it knows, or where it is not used."""
    known = () if _clusters is None else _clusters.ClusterEnv._cluster_types
    asked = (env for env in known if (not env.opt_in_only_method if method is None else env.name == method))
    return next((env for env in asked if env.is_env_present()), None)


def backends_started() -> bool:
    """Whether JAX knows its devices already; without its own answer, no."""
    return _xla_bridge is not None and _xla_bridge.backends_are_initialized()


def key_value_store() -> Any:
    """Where the processes of ``jax.distributed`` leave each other messages; ``jax.process_count()`` is more than one.

    Raises
    ------
    MultiMeshError
        Where JAX does not give it.
    """
    client = None if _distributed is None else _distributed.global_state.client
    if client is None:
        raise MultiMeshError(
            f"several processes need the key-value store of jax.distributed, which jax {jax.__version__} does not give "
            f"here: call jax.distributed.initialize() first, with {SUPPORTED} and without MULTIMESH_PUBLIC_JAX"
        )
    return client


def own_address() -> str:
    """Address of this machine as the coordinator of ``jax.distributed``, and so every other process, reaches it."""
    host, _, port = _distributed.global_state.coordinator_address.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        found: str = probe.getsockname()[0]
    return f"[{found}]" if ":" in found else found


def device_put_address() -> str:
    """Where this process listens for ``jax.device_put`` from others; empty where it does not."""
    flag = getattr(_xla_bridge, "CROSS_HOST_TRANSFER_SOCKET_ADDRESS", None)
    return flag.value if flag is not None else ""


Literal = _extend.Literal

jit_p = _primitives.jit_p
remat_p = _primitives.remat_p
sharding_constraint_p = _primitives.sharding_constraint_p
add_p = _primitives.add_p
device_put_p = _primitives.device_put_p
copy_p = _primitives.copy_p


def _primitive_of(fn: Callable[..., Any], size: int) -> Any:
    """The primitive of a function of one that JAX does not name in public."""
    return jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((size,), np.float32)).jaxpr.eqns[0].primitive


optimization_barrier_p = _primitive_of(jax.lax.optimization_barrier, 1)
PRIMITIVES: Mapping[str, Any] = {  # by name; an extension may give another primitive one of these names
    p.name: p
    for p in (
        *vars(_primitives).values(),
        optimization_barrier_p,
        _primitive_of(lambda x: jax.lax.split(x, (1, 1)), 2),
    )
    if isinstance(p, _extend.Primitive)
}


def is_tracer(x: Any) -> bool:
    """Whether ``x`` is a value of an enclosing trace."""
    return isinstance(x, jax.core.Tracer)


def jaxpr_as_fun(closed: Any) -> Callable[..., Any]:
    """A traced function as a function of flat arrays."""
    fun: Callable[..., Any] = _extend.jaxpr_as_fun(closed)
    return fun


def staged() -> bool:
    """Whether operations are being recorded (``jax.jit``, ``scan``, ``make_jaxpr``), not run, whatever they read.

    Without JAX's own answer an operation tells, which is then recorded too.
    """
    if _core is None:
        return is_tracer(jax.lax.neg(np.float32(0)))
    trace = _core.trace_ctx.trace
    while not isinstance(trace, _core.EvalTrace):
        if isinstance(trace, _tracing.DynamicJaxprTrace) or not hasattr(trace, "parent_trace"):
            return True
        trace = trace.parent_trace
    return False


def eager() -> bool:
    """Whether no transformation is in force; without JAX's own answer, whether operations run."""
    if _core is None:
        return not is_tracer(jax.lax.neg(np.float32(0)))
    return isinstance(_core.trace_ctx.trace, _core.EvalTrace)


def primal(x: Any) -> Any:
    """What a value of an enclosing differentiation stands for, such as the array that ``jax.grad`` was called with."""
    while isinstance(x, _core.Tracer) and hasattr(x, "primal"):
        x = x.primal
    return x


def abstractify(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an argument, without its sharding."""
    return shape_of(jax.typeof(x))


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """An abstract value as the argument of a trace."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def stacked(aval: Any, length: int) -> Any:
    """The abstract value of ``length`` rows of another."""
    return jax.core.ShapedArray((length, *aval.shape), aval.dtype)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants and how many carries a scan has, which come first among its operands."""
    if "ft_in" in params:  # jax >= 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def scan_params(params: dict[str, Any], body: Any, num_consts: int, num_carry: int) -> dict[str, Any]:
    """Parameters of a scan that differs from another in its body and what goes into it."""
    if "ft_in" in params:  # jax >= 0.12
        trees = importlib.import_module("jax._src.flattree")
        rows, results = len(body.in_avals) - num_consts - num_carry, len(body.out_avals) - num_carry
        given = trees.pack(tuple(map(trees.nones, (num_consts, num_carry, rows))))
        return params | {
            "jaxpr": body,
            "ft_in": given,
            "ft_out": trees.pack((trees.nones(num_carry), trees.nones(results))),
        }
    return params | {"jaxpr": body, "num_consts": num_consts, "num_carry": num_carry}


def _concrete_mesh_is_empty() -> bool:
    if _mesh is not None:
        return _mesh.get_concrete_mesh().empty
    try:
        return jax.sharding.get_mesh().empty
    except ValueError:  # inside a trace, where there are no devices
        return True


def without_mesh(*, concrete_only: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh of an enclosing ``jax.set_mesh``, under which programs of other devices can't be made or run."""
    if _concrete_mesh_is_empty() and (concrete_only or jax.sharding.get_abstract_mesh().empty):
        return contextlib.nullcontext()
    return jax.set_mesh(Mesh(np.empty((), object), ()))


@contextlib.contextmanager
def devices_free() -> Iterator[None]:
    """Leave the devices of an enclosing ``jax.set_mesh`` but keep its axes, which bare constraints in a trace name."""
    axes = auto(jax.sharding.get_abstract_mesh())
    with without_mesh(concrete_only=True), jax.sharding.use_abstract_mesh(axes):
        yield


def trace_context() -> Any:
    """Everything of JAX's configuration that a trace depends on (precision, x64, ambient mesh ...), hashable."""
    if _config is not None:
        return _config.trace_context()
    return jax.sharding.get_abstract_mesh(), *(getattr(jax.config, k, v) for k, v in jax.config.values.items())


def nbytes(aval: Any) -> int:
    """Size of an array of this abstract value in bytes; zero for tokens."""
    if not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)


REMATTED = "rematted_computation"
"""Scope of what a backward pass computes again under ``jax.checkpoint``."""


def scopes(eqn: Any) -> tuple[tuple[str, ...], bool]:
    """Named scopes around an equation, outermost first, and whether a transposition (backward pass) made it."""
    stack = eqn.source_info.name_stack.stack
    names = tuple(s.name for s in stack if type(s).__name__ == "Scope")
    backward = any(type(s).__name__ == "Transform" and s.name == "transpose" for s in stack)
    return names, backward


_OWN_FILES = os.path.dirname(__file__) + os.sep
_JAX_FILES = os.path.dirname(jax.__file__) + os.sep
_NOT_USERS = (_OWN_FILES, _JAX_FILES, contextlib.__file__)


def user_line(source_info: Any) -> str:
    """``file:line`` of the user's code that made an equation, or an empty string."""
    if source_info is not None and source_info.traceback is not None:
        if _source_info is not None:  # leaves out what libraries (Flax) registered as theirs
            frames = ((f.file_name, f.start_line) for f in _source_info.user_frames(source_info.traceback))
        else:
            frames = ((f.file_name, f.line_num) for f in source_info.traceback.frames)
        for file, line in frames:
            if not file.startswith(_NOT_USERS):
                return f"{file}:{line}"
    return ""


def dce(branches: Sequence[Any], used: Sequence[bool]) -> tuple[tuple[Any, ...], list[bool]]:
    """Branches of a conditional cut down to some results, and which operands any of them still reads."""
    reads = [_partial_eval.dce_jaxpr(b.jaxpr, list(used))[1] for b in branches]
    union = [any(flags) for flags in zip(*reads, strict=True)]
    cut = [_partial_eval.dce_jaxpr(b.jaxpr, list(used), instantiate=union)[0] for b in branches]
    return tuple(_extend.ClosedJaxpr(j, b.consts) for j, b in zip(cut, branches, strict=True)), union


def captured(closed: Any) -> dict[int, Any]:
    """Results of a traced function that it does not compute but hold: position to value."""
    held = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    found = enumerate(closed.jaxpr.outvars)
    return {i: v.val if isinstance(v, Literal) else held[v] for i, v in found if isinstance(v, Literal) or v in held}


def part(closed: Any, positions: Sequence[int]) -> Callable[[], list[Any]]:
    """Function that computes some of the results of a traced function without arguments, and only what they need."""
    wanted = [i in set(positions) for i in range(len(closed.jaxpr.outvars))]
    cut, used, _ = _partial_eval.dce_jaxpr_consts(closed.jaxpr, wanted)
    return _extend.jaxpr_as_fun(
        _extend.ClosedJaxpr(cut, [c for c, keep in zip(closed.consts, used, strict=True) if keep])
    )


def hoisted(closed: Any) -> tuple[Any, list[Any]]:
    """A traced function that takes the tracers it captured as its first arguments, and these."""
    tracers = [c for c in closed.consts if is_tracer(c)]
    if not tracers:
        return closed, []

    def fn(given: Sequence[Any], *args: Any) -> Any:
        left = iter(given)
        consts = [next(left) if is_tracer(c) else c for c in closed.consts]
        return jaxpr_as_fun(_extend.ClosedJaxpr(closed.jaxpr, consts))(*args)

    shapes = [shape_of(jax.typeof(c)) for c in tracers]
    return jax.make_jaxpr(fn)(shapes, *map(shape_of, closed.in_avals)), tracers


def caller_line() -> str:
    """``file:line`` of the innermost caller that is neither this package nor JAX."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def invalid_value(error: Exception) -> str | None:
    """What ``jax_debug_nans`` or ``jax_debug_infs`` found in results of a program, "nan" or "inf"; else None."""
    return getattr(error, "ty", None) if type(error).__name__ == "InternalFloatingPointError" else None


_CONCRETE = (
    *(jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError),
    *(jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError),
)


@contextlib.contextmanager
def traced_as(what: Callable[[], str]) -> Iterator[None]:
    """Name the user's function and line, not what wraps it, where JAX can't trace it.

    Raises
    ------
    UsageError
        Where a result is no array, or Python code asks for the value of an array that has none yet.
    """
    try:
        yield
    except TypeError as error:
        _, _, said = str(error).partition(" traced for jit returned ")
        if said:
            raise UsageError(
                f"{error_line(error)}: {what()} must return a pytree of arrays; it returned {said}"
            ) from None
        if not isinstance(error, _CONCRETE) and "concrete value" not in str(error):
            raise
        raise _not_concrete(what(), error) from error
    except _CONCRETE as error:
        raise _not_concrete(what(), error) from error


def _not_concrete(what: str, error: Exception) -> UsageError:
    return UsageError(
        f"{error_line(error)}: {what} is traced, and an array has no value in Python then; use jnp.where or "
        "jax.lax.cond in the place of `if`, or give it as a static Python value (static_argnums of multimesh.jit). "
        f"JAX says: {str(error).strip().splitlines()[0]}"
    )


def error_line(error: BaseException) -> str:
    """``file:line`` of the innermost of the user's frames that an exception went through."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [f"{name}:{line}" for name, line in frames if not name.startswith(_NOT_USERS)]
    return own[-1] if own else caller_line()


def subjaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Jaxprs among the parameters of an equation."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, _extend.Jaxpr | _extend.ClosedJaxpr):
                yield getattr(each, "jaxpr", each)


AnyMesh = TypeVar("AnyMesh", Mesh, AbstractMesh)


def auto(mesh: AnyMesh) -> AnyMesh:
    """The mesh with Auto axes only, under which all is traced and lowered.

    Types that name Explicit axes can't be mixed with those of another submesh, nor survive passes that move operations.
    """
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == kinds:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names) if isinstance(mesh, Mesh) else mesh.update(axis_types=kinds)


@contextlib.contextmanager
def abstract_mesh_context(mesh: Mesh) -> Iterator[None]:
    """Make ``mesh`` (without its devices) the mesh of bare ``PartitionSpec`` constraints while tracing.

    JAX goes from one mesh to one of another size only by way of none.
    """
    none, own = AbstractMesh((), ()), auto(mesh).abstract_mesh
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(own):
        yield


_leave_p = _extend.Primitive("multimesh_leave")
_leave_p.def_impl(lambda x: x)
_leave_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type))
_ad.deflinear2(_leave_p, lambda cotangent, _: [cotangent])
_batching.defvectorized(_leave_p)
_mlir.register_lowering(_leave_p, lambda ctx, x: [x])


def leave_mesh(x: Any) -> Any:
    """Identity that takes the abstract mesh of a task, or that of an array from outside, off the type of a value.

    Types of arrays name the mesh they were traced under, and JAX refuses to mix meshes of different sizes in one
    backward pass.
    """
    if not isinstance(x, jax.Array) or jax.typeof(x).sharding.mesh.empty:
        return x
    return _leave_p.bind(x)


def call_primitive(
    name: str,
    *,
    run: Callable[..., Sequence[Any]],
    inlined: Callable[..., Sequence[Any]],
    jvp: Callable[..., tuple[Sequence[Any], Sequence[Any]]],
    transpose: Callable[..., Sequence[Any]],
    batch: Callable[..., Sequence[Any]],
) -> Any:
    """A primitive that calls the traced function in its parameter ``jaxpr``.

    ``run`` is what it does on arrays, ``inlined`` inside a program. Rules get None for a tangent that is zero, for an
    argument to transpose, and for an argument without rows, and give None for what has no tangent or cotangent.
    """
    prim = _extend.Primitive(name)
    prim.multiple_results = True
    prim.def_impl(run)
    prim.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))
    _mlir.register_lowering(prim, _mlir.lower_fun(inlined, multiple_results=True))

    def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        given = [None if type(t) is _ad.Zero or t.dtype == jax.dtypes.float0 else t for t in tangents]
        results, pushed = jvp(primals, given, **params)
        zeros = [_ad.Zero(aval.to_tangent_aval()) for aval in params["jaxpr"].out_avals]
        return results, [z if t is None else t for t, z in zip(pushed, zeros, strict=True)]

    def transpose_rule(cotangents: Sequence[Any], *args: Any, **params: Any) -> Any:
        known = [None if _ad.is_undefined_primal(x) else x for x in args]
        return transpose([_ad.instantiate_zeros(c) for c in cotangents], known, **params)

    def batch_rule(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        results = batch(size, args, dims, **params)
        return results, [0] * len(results)

    _ad.primitive_jvps[prim] = jvp_rule
    _ad.primitive_transposes[prim] = transpose_rule
    _batching.primitive_batchers[prim] = batch_rule
    return prim


def _explicit(given: Any) -> bool:
    """Whether a parameter is a layout on Explicit axes, which has no meaning where axes are Auto."""
    return isinstance(given, NamedSharding) and given.mesh != auto(given.mesh)


def bind(prim: Any, params: dict[str, Any], ctx: Any, args: Sequence[Any], mesh: Mesh) -> Sequence[Any]:
    """Evaluate one equation again on ``mesh``, in the context it was traced in unless that was another mesh's."""
    if ctx is not None and not ctx.cur_abstract_mesh.empty and auto(ctx.cur_abstract_mesh) != auto(mesh).abstract_mesh:
        ctx = None
    if ctx is None or ctx.cur_abstract_mesh == auto(ctx.cur_abstract_mesh):
        params = {name: None if _explicit(given) else given for name, given in params.items()}
    with ctx.manager if ctx is not None else contextlib.nullcontext():
        out = prim.bind(*args, **prim.get_bind_params(params))
    return out if prim.multiple_results else [out]


def memory_kind(aval: Any) -> str | None:
    """Memory that an abstract value is in; None for that of the device."""
    space = getattr(aval, "memory_space", None)
    return "pinned_host" if space is not None and space.name == "Host" else None


def copy(x: Any) -> Any:
    """A copy; unlike the bare identity it is not optimised out of the forward pass by ``jax.grad``."""
    return copy_p.bind(x)


def typed_as(x: Any, aval: Any) -> Any:
    """``x`` with the weak type of an abstract value of its dtype."""
    weak = getattr(aval, "weak_type", False)
    if not hasattr(x, "dtype") or getattr(jax.typeof(x), "weak_type", False) == weak or x.dtype != aval.dtype:
        return x
    return _primitives.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)


def named(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give ``fn`` the name that ``jax.jit`` records in jaxprs, HLO modules and profiles."""
    fn.__name__ = fn.__qualname__ = name
    return fn
