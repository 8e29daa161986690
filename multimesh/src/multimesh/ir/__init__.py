"""The intermediate representation: frozen operations on values."""

from multimesh.ir.program import Atom as Atom
from multimesh.ir.program import Carry as Carry
from multimesh.ir.program import Item as Item
from multimesh.ir.program import Loop as Loop
from multimesh.ir.program import Op as Op
from multimesh.ir.program import Program as Program
from multimesh.ir.program import Sum as Sum
from multimesh.ir.program import Value as Value
from multimesh.ir.program import is_value as is_value
from multimesh.ir.program import live as live
from multimesh.ir.program import nbytes as nbytes
from multimesh.ir.program import shape as shape
from multimesh.ir.program import values as values
