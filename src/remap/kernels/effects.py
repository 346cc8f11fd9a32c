"""What working an expression out may do besides giving a value: change memory, or fail."""

from __future__ import annotations

from remap.kernels import ir
from remap.kernels.ir import Array


def harmless(value: ir.Expr) -> bool:
    """Tell whether an expression can be worked out where it is not wanted: it touches no memory and cannot fail."""
    match value:
        case ir.Load() | ir.Call() | ir.Atomic() | ir.Cast(checked=True):
            return False
        case ir.Cast(value=inner) | ir.Member(value=inner):
            return harmless(inner)
        case ir.Op(operands=operands):
            return all(harmless(one) for one in operands)
        case _:
            return True


def acts(block: ir.Block) -> bool:
    """Tell whether statements may change memory: atomic operations, and functions that are given more than a Slice."""
    for statement in block:
        match statement:
            case ir.Assign(value=ir.Atomic()):
                return True
            case (
                ir.Assign(value=ir.Call(arguments=arguments))
                | ir.Evaluate(value=ir.Call(arguments=arguments))
            ):
                if any(isinstance(one.type, Array) and one.type.kind != "slice" for one in arguments):
                    return True
            case ir.If(body=body, orelse=orelse):
                if acts(body) or acts(orelse):
                    return True
            case _:
                pass
    return False


def checks(value: ir.Expr) -> bool:
    """Tell whether an expression has a Python number in it that may not fit into the type of what it meets."""
    match value:
        case ir.Cast(value=inner, checked=checked):
            return checked or checks(inner)
        case ir.Op(operands=operands) | ir.Load(indices=operands):
            return any(map(checks, operands))
        case ir.Member(value=inner):
            return checks(inner)
        case _:
            return False
