"""The intermediate representation: frozen operations on values."""

from multimesh.ir.program import Atom, Carry, Item, Loop, Op, Program, Sum, Value, is_value, live, nbytes, shape, values

__all__ = ["Atom", "Carry", "Item", "Loop", "Op", "Program", "Sum", "Value"]
__all__ += ["is_value", "live", "nbytes", "shape", "values"]
