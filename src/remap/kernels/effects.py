"""What working an expression out may do besides giving a value: change memory, or fail."""

from __future__ import annotations

from collections.abc import Sequence

from remap.kernels import ir
from remap.kernels.ir import Array, Witness


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


def acts(block: Sequence[ir.Stmt]) -> bool:
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


def may_fail(what: ir.Expr | ir.Stmt) -> bool:
    """Tell whether something is wrong for some threads, perhaps: a number that lies outside, or does not fit."""
    match what:
        case ir.Call():  # whatever it does
            return True
        case ir.Load(indices=(index, *_), default=None) if not isinstance(index.type, Witness):
            return True
        case ir.Cast(value=inner, checked=checked):
            return checked or may_fail(inner)
        case ir.Load(indices=indices, default=default):
            return any(map(may_fail, indices)) or (default is not None and may_fail(default))
        case ir.Op(operands=operands):
            return any(map(may_fail, operands))
        case (
            ir.Member(value=inner) | ir.Assign(value=inner) | ir.Evaluate(value=inner) | ir.Store(value=inner)
        ):
            return may_fail(inner)
        case ir.If(test=test, body=body, orelse=orelse):
            return may_fail(test) or any(map(may_fail, [*body, *orelse]))
        case _:
            return False
