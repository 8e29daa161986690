"""The registry of primitives: what the passes may assume of an operation.

The passes leave a primitive that is not here as it is. Operations without effects are pure: they may be repeated.

*Sums.* Integers wrap, so a sum of them is the same in every order. Floats with the range of float32 sum to the same up
to rounding. Half floats (float16, float8) overflow easily: their sums keep their order. See ``reorders``.

*Linear operations*: ``f(a + b) == f(a) + f(b)`` with all other operands fixed, so a sum may be taken after ``f``. A
division is linear in its dividend over inexact dtypes only (``3 // 2 + 3 // 2 != 6 // 2``), a conversion only from an
inexact dtype to one that holds all its values: elsewhere a part may wrap, round or overflow where the sum would not.

*Cheap operations* cost less than the memory traffic of their result. In another kernel they may differ in the last bit
of a float, since compilers contract. *Exact operations*, which choose, move or compare, do not.

*Links* say which dimensions of operands and results go together. Layouts never change a result, so an operation may
link nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from multimesh import ir
from multimesh.core import _compat

Group = tuple[tuple[ir.Value, int], ...]  # dimensions that go together
_Groups = Iterator[Sequence[tuple[ir.Atom, int]]]
_Rule = Callable[[ir.Op], Any]
_SUMMABLE = frozenset(
    (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *("bfloat16", "float32", "float64", "complex64", "complex128"),
    )
)


@dataclass(frozen=True)
class Primitive:
    """The properties of a primitive that the passes use.

    ``buffer`` says where the compiler keeps its result: ``fused`` into the only operation that reads it, an array of
    its ``own``, its ``operand``, or made ``again`` wherever it is read.
    """

    links: _Rule | None = None  # groups of dimensions that go together
    cheap: bool = False  # to repeat it costs less than to keep or send its result
    linear: tuple[int, ...] | _Rule = ()  # positions of operands in which it is linear, in the dtypes that allow that
    sums: _Rule | None = None  # groups of operands' dimensions that it sums over
    adds: bool = False  # it adds its two operands
    exact: bool = False  # its result can't differ by rounding from one kernel to another
    compares: bool = False  # it is true or false of two operands, so that a last bit decides
    buffer: str = "fused"
    absorbs: bool = False  # it has a buffer of its own, and compilers for GPUs compute what it reads within it
    spreads: bool = False  # its result may be larger than its operands, and is then better made where it is read
    control: bool = False  # it runs jaxprs of its own: a loop or a condition


def reorders(dtype: Any) -> bool:
    """Return whether a sum over this dtype may be reordered: exactly, or up to rounding of its largest addends."""
    return getattr(dtype, "name", "") in _SUMMABLE


def is_pure(eqn: Any) -> bool:
    """Return whether an equation may be repeated: no effects inside, and no random numbers but those of a key."""
    if eqn.effects or eqn.primitive is _DRAWS:
        return False
    return all(is_pure(inner) for jaxpr in _compat.subjaxprs(eqn.params) for inner in jaxpr.eqns)


def _facts(prim: Any) -> Primitive:
    return _REGISTRY.get(prim) or _BY_NAME.get(prim.name, _UNKNOWN)


def lookup(op: ir.Op) -> Primitive:
    """Return the properties of an operation's primitive; the defaults if it is not in the registry."""
    return _facts(op.prim)


def is_cheap(prim: Any) -> bool:
    """Return whether a primitive may be evaluated wherever its result is used."""
    return _facts(prim).cheap


def fuses(prim: Any) -> bool:
    """Return whether the compiler computes a primitive's result within the kernel that uses it."""
    return _facts(prim).buffer != "own"


def elementwise(op: ir.Op) -> bool:
    """Return whether each element of a result depends only on the operands' elements at its place, and scalars."""
    return lookup(op).links is _same_shape and op.prim not in _ACROSS


def links(op: ir.Op) -> Iterator[Group]:
    """Yield groups of dimensions that an operation keeps together."""
    rule = lookup(op).links
    for group in rule(op) if rule is not None else ():
        dims = tuple((atom, dim) for atom, dim in group if isinstance(atom, ir.Value))
        if len(dims) > 1:
            yield dims


def linear_in(op: ir.Op) -> tuple[int, ...]:
    """Return the positions of operands in which an operation is linear, so that it may come before their sum."""
    rule = lookup(op).linear
    if not rule or op.effects or not all(reorders(o.aval.dtype) for o in op.outs):
        return ()
    return tuple(i for i in (rule(op) if callable(rule) else rule) if reorders(op.ins[i].aval.dtype))


def sums_over(op: ir.Op, maker: Mapping[ir.Value, ir.Op]) -> Iterator[Group]:
    """Yield the dimensions that a reduction sums over. A group has one dimension of each operand that has it."""
    rule = lookup(op).sums
    if rule is None or op.effects or not all(reorders(o.aval.dtype) for o in op.outs):
        return
    if op.prim is _SCATTER_ADD and not is_zero(op.ins[0], maker):
        return  # what it adds to would be in every part of the sum
    for group in rule(op):
        dims = tuple((atom, dim) for atom, dim in group if isinstance(atom, ir.Value))
        if len({v for v, _ in dims}) == len(group):
            yield dims


def is_zero(atom: ir.Atom, maker: Mapping[ir.Value, ir.Op]) -> bool:
    """Return whether a value is all zeros, made from a literal."""
    while isinstance(atom, ir.Value):
        op = maker.get(atom)
        if op is None or op.prim not in _KEEP_ZERO:
            return False
        atom = op.ins[0]
    return bool(np.all(np.asarray(atom.val) == 0))


def _same_shape(op: ir.Op) -> _Groups:
    """Link elementwise operands and results. Each of several results (of a barrier) goes with its own operand."""
    if len(op.outs) > 1:
        for operand, out in zip(op.ins, op.outs, strict=False):
            yield from ([(operand, d), (out, d)] for d in range(len(ir.shape(out))))
        return
    (out,) = op.outs
    operands = [i for i in op.ins if len(ir.shape(i)) == len(ir.shape(out))]
    for d, size in enumerate(ir.shape(out)):
        yield [(out, d), *((i, d) for i in operands if ir.shape(i)[d] == size)]


def _broadcast(op: ir.Op) -> _Groups:
    x, out = op.ins[0], op.outs[0]
    for d, at in enumerate(op.params["broadcast_dimensions"]):
        if ir.shape(x)[d] == ir.shape(out)[at]:
            yield [(x, d), (out, at)]


def _transpose(op: ir.Op) -> _Groups:
    yield from ([(op.ins[0], d), (op.outs[0], at)] for at, d in enumerate(op.params["permutation"]))


def _reshape(op: ir.Op) -> _Groups:
    """Link dimensions that stay, and the outermost of those split or merged: shards stay contiguous along it."""
    x, out = op.ins[0], op.outs[0]
    old, new = ir.shape(x), ir.shape(out)
    i = j = 0
    while i < len(old) and j < len(new):
        i_end, j_end, i_size, j_size = i + 1, j + 1, old[i], new[j]
        while i_size != j_size and (i_end < len(old) or j_end < len(new)):
            if i_size < j_size and i_end < len(old):
                i_size, i_end = i_size * old[i_end], i_end + 1
            elif j_end < len(new):
                j_size, j_end = j_size * new[j_end], j_end + 1
            else:
                return
        yield [(x, _outermost(old, i, i_end)), (out, _outermost(new, j, j_end))]
        i, j = i_end, j_end


def _outermost(shape: Sequence[int], start: int, end: int) -> int:
    return next((d for d in range(start, end) if shape[d] > 1), start)


def _squeeze(op: ir.Op) -> _Groups:
    x, gone = op.ins[0], {d % len(ir.shape(op.ins[0])) for d in op.params["dimensions"]}
    dims = (d for d in range(len(ir.shape(x))) if d not in gone)
    yield from ([(x, d), (op.outs[0], at)] for at, d in enumerate(dims))


def _reduce(op: ir.Op) -> _Groups:
    gone = set(op.params["axes"])
    for x in op.ins:
        dims = (d for d in range(len(ir.shape(x))) if d not in gone)
        yield from ([(x, d), (op.outs[0], at)] for at, d in enumerate(dims))


def _dot(op: ir.Op) -> _Groups:
    """Link batch dimensions, contracted dimensions, and those of one operand with the result's."""
    (left_sum, right_sum), (left_batch, right_batch) = op.params["dimension_numbers"]
    lhs, rhs, out = op.ins[0], op.ins[1], op.outs[0]
    yield from ([(lhs, a), (rhs, b)] for a, b in zip(left_sum, right_sum, strict=True))
    at = 0
    for a, b in zip(left_batch, right_batch, strict=True):
        yield [(lhs, a), (rhs, b), (out, at)]
        at += 1
    for x, used in ((lhs, {*left_sum, *left_batch}), (rhs, {*right_sum, *right_batch})):
        for d in range(len(ir.shape(x))):
            if d not in used:
                yield [(x, d), (out, at)]
                at += 1


def _gather(op: ir.Op) -> _Groups:
    """Link dimensions that are taken whole (the width of an embedding), and those of the indices (its tokens)."""
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    x, indices, out = op.ins[0], op.ins[1], op.outs[0]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    full = [d for d in range(len(ir.shape(x))) if d not in gone]
    for d, at in zip(full, numbers.offset_dims, strict=True):
        if sizes[d] == ir.shape(x)[d]:
            yield [(x, d), (out, at)]
    for d, at in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        yield [(x, d), (indices, at)]
    batch_dims = [at for at in range(len(ir.shape(out))) if at not in numbers.offset_dims]
    yield from ([(indices, d), (out, at)] for d, at in enumerate(batch_dims))


def _same_index(op: ir.Op) -> _Groups:
    """Link dimensions of one size at one place, as in slices, padding and concatenation."""
    for x in op.ins:
        for out in op.outs:
            if len(ir.shape(x)) == len(ir.shape(out)):
                yield from ([(x, d), (out, d)] for d, n in enumerate(ir.shape(out)) if ir.shape(x)[d] == n)


def _scatter(op: ir.Op) -> _Groups:
    """Link the operand's dimensions to the updates' that cover them whole, and the indices' to the updates'."""
    numbers = op.params["dimension_numbers"]
    x, indices, updates = op.ins
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = dict(zip((d for d in range(len(ir.shape(x))) if d not in gone), numbers.update_window_dims, strict=True))
    for d, size in enumerate(ir.shape(x)):
        full = d in window and ir.shape(updates)[window[d]] == size
        yield [(x, d), (op.outs[0], d), *([(updates, window[d])] if full else [])]
    batch_dims = [at for at in range(len(ir.shape(updates))) if at not in numbers.update_window_dims]
    yield from ([(indices, d), (updates, at)] for d, at in enumerate(batch_dims))


def _convolution(op: ir.Op) -> _Groups:
    """Link rows, features, and spatial dimensions whose size stays."""
    numbers = op.params["dimension_numbers"]
    x, kernel, out = op.ins[0], op.ins[1], op.outs[0]
    (rows, features, *places), (outputs, inputs, *_) = numbers.lhs_spec, numbers.rhs_spec
    out_rows, out_features, *out_places = numbers.out_spec
    if op.params["batch_group_count"] == 1:
        yield [(x, rows), (out, out_rows)]
    if op.params["feature_group_count"] == 1:
        yield [(x, features), (kernel, inputs)]
        yield [(kernel, outputs), (out, out_features)]
    for d, at in zip(places, out_places, strict=True):
        if ir.shape(x)[d] == ir.shape(out)[at]:
            yield [(x, d), (out, at)]


def _attention(op: ir.Op) -> _Groups:
    """Link rows and heads of fused attention. Gradients lie as their operands, the softmax sums as the queries."""
    gradients = "bwd" in op.prim.name
    for x, out in zip(op.ins[:3] if gradients else op.ins[:1], op.outs, strict=False):
        yield from ([(x, d), (out, d)] for d in range(len(ir.shape(out))))
    if not gradients:
        heads_first = op.params.get("layout") == _HEADS_FIRST
        order = (0, 1, 2) if heads_first else (0, 2, 1)
        for out in op.outs[1:]:
            yield from ([(op.ins[0], d), (out, at)] for at, d in enumerate(order) if len(ir.shape(out)) == len(order))


def _product_sums(op: ir.Op) -> _Groups:
    (lhs, rhs), _ = op.params["dimension_numbers"]
    yield from ([(op.ins[0], a), (op.ins[1], b)] for a, b in zip(lhs, rhs, strict=True))


def _scatter_sums(op: ir.Op) -> _Groups:
    _, indices, updates = op.ins
    numbers = op.params["dimension_numbers"]
    scattered = [d for d in range(updates.aval.ndim) if d not in numbers.update_window_dims]
    for d, at in enumerate(scattered):
        if d not in numbers.scatter_indices_batching_dims:
            yield [(indices, d), (updates, at)]


def _dividend(op: ir.Op) -> tuple[int, ...]:
    return (0,) if jnp.issubdtype(op.outs[0].aval.dtype, jnp.inexact) else ()


def _widening(op: ir.Op) -> tuple[int, ...]:
    """Return (0,) for a conversion from an inexact dtype to one that has all of its values, else ()."""
    old, new = op.ins[0].aval.dtype, op.outs[0].aval.dtype
    return (0,) if jnp.issubdtype(old, jnp.inexact) and np.can_cast(old, new, "safe") else ()


def _table() -> Iterator[tuple[str, Primitive]]:
    for name in (
        *("sub", "square", "integer_pow", "sqrt", "rsqrt", "cbrt", "exp", "exp2", "expm1", "log", "log2", "log1p"),
        *("pow", "logistic", "tanh", "erf", "sin", "cos", "one_minus_square", "polynomial"),
    ):
        yield name, Primitive(_same_shape, cheap=True)
    for name in (
        *("max", "min", "abs", "sign", "real", "imag", "conj", "complex", "and", "or", "xor", "not", "select_n"),
        *("is_finite", "rev"),
    ):
        yield name, Primitive(_same_shape, cheap=True, exact=True)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        yield name, Primitive(_same_shape, cheap=True, exact=True, compares=True)
    for name in (  # of what costs more, or is no element's own
        *("optimization_barrier", "reduce_precision", "clamp", "rem", "round", "floor", "ceil", "atan2", "tan"),
        *("erf_inv", "sinh", "cosh", "cumsum", "cumlogsumexp", "cummax", "cumprod"),
    ):
        yield name, Primitive(_same_shape)
    yield from (
        ("add", Primitive(_same_shape, cheap=True, adds=True)),
        ("add_any", Primitive(_same_shape, cheap=True, adds=True)),
        ("neg", Primitive(_same_shape, cheap=True, linear=(0,), exact=True)),
        ("mul", Primitive(_same_shape, cheap=True, linear=(0, 1))),
        ("div", Primitive(_same_shape, cheap=True, linear=_dividend)),
        ("convert_element_type", Primitive(_same_shape, cheap=True, linear=_widening, exact=True)),
        ("copy", Primitive(_same_shape, cheap=True, linear=(0,), exact=True)),
        ("iota", Primitive(cheap=True, exact=True)),
        ("broadcast_in_dim", Primitive(_broadcast, cheap=True, exact=True)),
        ("reshape", Primitive(_reshape, cheap=True, linear=(0,), exact=True)),
        ("transpose", Primitive(_transpose, cheap=True, linear=(0,), exact=True)),
        ("squeeze", Primitive(_squeeze, cheap=True, linear=(0,), exact=True)),
        ("slice", Primitive(_same_index, cheap=True, exact=True)),
        ("split", Primitive(_same_index, cheap=True, exact=True)),
        ("gather", Primitive(_gather)),
        ("dot_general", Primitive(_dot, sums=_product_sums)),
        ("reduce_sum", Primitive(_reduce, linear=(0,), sums=lambda op: ([(op.ins[0], a)] for a in op.params["axes"]))),
        ("scatter", Primitive(_scatter)),
        ("scatter-add", Primitive(_scatter, sums=_scatter_sums)),
        ("conv_general_dilated", Primitive(_convolution)),
    )
    for name in ("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"):
        yield name, Primitive(_reduce)
    for name in ("dynamic_slice", "dynamic_update_slice", "pad", "concatenate"):
        yield name, Primitive(_same_index)


_BUFFERS = {
    "own": (
        *("dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add", "sort", "cumsum", "top_k"),
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "dynamic_update_slice"),
        *("concatenate", "pad", "random_bits", "scan", "while", "cond", "transpose"),
        *("all_gather", "all_to_all", "ragged_all_to_all", "ppermute", "psum"),
    ),
    "operand": ("sharding_constraint", "name", "optimization_barrier", "reshape", "squeeze", "copy"),
    "again": (*("broadcast_in_dim", "iota", "convert_element_type", "eq", "lt", "le", "gt", "ge", "and", "or", "not"),),
}
_ABSORBING = frozenset(
    (
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "dynamic_update_slice"),
        *("concatenate", "pad", "transpose", "gather"),
    )
)
_SPREADS = frozenset(
    (
        *("broadcast_in_dim", "pad", "dynamic_update_slice", "scatter", "scatter-add", "iota", "reshape", "transpose"),
        *("squeeze", "convert_element_type", "copy", "neg", "add", "add_any", "sub", "mul", "div", "select_n", "max"),
        *("min", "and", "or", "not", "eq", "ne", "lt", "le", "gt", "ge", "rev", "sign"),
    )
)


def _registry() -> dict[Any, Primitive]:
    rules = dict(_table())
    buffers = {name: buffer for buffer, names in _BUFFERS.items() for name in names}
    return {
        _compat.PRIMITIVES[name]: replace(
            rules.get(name, _UNKNOWN),
            buffer=buffers.get(name, "fused"),
            absorbs=name in _ABSORBING,
            spreads=name in _SPREADS,
            control=name in ("scan", "while", "cond"),
        )
        for name in {**rules, **buffers}
        if name in _compat.PRIMITIVES
    }


_UNKNOWN = Primitive()
_REGISTRY = _registry()
_BY_NAME = {  # primitives that JAX makes when their module is imported
    name: Primitive(_attention, buffer="own")
    for name in ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
} | dict.fromkeys(
    ("ragged_dot_general", "pallas_call", "reduce_scatter", "psum_invariant", "all_gather_invariant"),
    Primitive(buffer="own"),
)
_HEADS_FIRST = 1  # cuDNN's attention numbers its layouts: [rows, heads, tokens, width] is the second
_DRAWS = _compat.PRIMITIVES.get("rng_uniform")
_SCATTER_ADD = _compat.PRIMITIVES["scatter-add"]
_KEEP_ZERO = frozenset(_compat.PRIMITIVES[name] for name in ("broadcast_in_dim", "convert_element_type", "copy"))
_ACROSS = frozenset(
    _compat.PRIMITIVES[name]
    for name in ("optimization_barrier", "rev", "cumsum", "cumlogsumexp", "cummax", "cumprod")
    if name in _compat.PRIMITIVES
)


_KEY = 4  # elements of the largest PRNG key; scalars and keys are copied rather than owned


def is_small(value: ir.Value) -> bool:
    """Return whether a value is a scalar or a PRNG key: it goes wherever it is used and attracts no operation."""
    return value.aval.size <= _KEY


def halves(op: ir.Op, value: ir.Value) -> bool:
    """Return whether an operation takes at most half of an operand, as a slice of stacked weights does."""
    return 2 * sum(o.aval.size for o in op.outs) <= value.aval.size or (
        op.prim.name == "split" and all(2 * o.aval.size <= value.aval.size for o in op.outs)
    )
