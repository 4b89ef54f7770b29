"""Evaluate expressions of literals, known names and arithmetic. The size of values is limited; nothing is called."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

UNKNOWN = "???"  # a value known only at run time; also OmegaConf's marker for a value that the user must give
LONGEST = 2**16  # maximum number of characters in a text, or of items in a list
_LARGEST = 2**63
_TYPES = ("bfloat16", "float16", "float32")  # torch dtypes
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.MatMult: lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1),  # `@` stands for the shell's division
    ast.FloorDiv: operator.floordiv,
    ast.Mod: lambda a, b: a - a // b * b,  # only for numbers: % on a string could request a huge field width
    ast.Pow: lambda a, b: a**b if abs(b) <= 64 else None,
}


def value_of(expression: str | ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of a Python expression; UNKNOWN if it needs more than literals, `known` and arithmetic."""
    try:
        return _value(
            ast.parse(expression.strip(), mode="eval").body if isinstance(expression, str) else expression, known
        )
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        SyntaxError,
        TypeError,
        ValueError,
    ):
        return UNKNOWN


def _value(node: ast.expr | None, known: Mapping[str, Any]) -> Any:
    value: Any = None
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            pass
        case ast.Name(id=name):
            value = known[name]
        case ast.Attribute(attr=name) if name in _TYPES:
            value = name
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            value = [_value(item, known) for item in items]
        case ast.Dict(keys=keys, values=items):
            value = {_value(key, known): _value(item, known) for key, item in zip(keys, items, strict=True)}
        case ast.Subscript(value=whole, slice=part):
            value = _value(whole, known)[_value(part, known)]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand, known)
        case ast.BinOp(left=left, op=kind, right=right):
            a, b = _value(left, known), _value(right, known)
            if isinstance(a, (str, list)) != isinstance(b, (str, list)) and len(a) * b > LONGEST:
                raise ValueError("too long")
            value = _OPERATORS[type(kind)](a, b)
    if value == UNKNOWN or (
        len(value) > LONGEST if isinstance(value, (str, list, dict)) else not abs(value) < _LARGEST
    ):
        raise ValueError("unknown, or too large")
    return value
