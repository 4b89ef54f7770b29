"""Environments in which the policy calls a tool: a calculator, or Python."""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from crosstrain import Environment, Episode, PositiveFloat, PositiveInt, registry, run_python

_CALL = re.compile(r"<(calculator|python)>(.*?)</\1>", re.DOTALL)
_OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_LONGEST = 200  # characters of an expression
_SHOWN = 2000  # characters of a program's output


@registry.register_environment("calculator")
class Calculator(Environment):
    """Replies to <calculator>3 * (4 + 5)</calculator> with the value; a turn without a call ends the episode."""

    role: ClassVar[str] = "tool"

    def reply(self, episode: Episode) -> str | None:
        return _reply(episode, "calculator", calculate)


@registry.register_environment("python")
class Python(Environment):
    """Runs <python>print(3 * 9)</python> as the reward `program` does, and replies with the output."""

    role: ClassVar[str] = "tool"

    @dataclass
    class Options:
        """Limits of the process."""

        seconds: PositiveFloat = 5.0  # of CPU time, and twice as much in all
        megabytes: PositiveInt = 512  # of memory

    options: Options

    def reply(self, episode: Episode) -> str | None:
        return _reply(episode, "python", self._output)

    def _output(self, program: str) -> str:
        output = run_python(program, self.options.seconds, self.options.megabytes)
        return "error" if output is None else output[:_SHOWN]


def _reply(episode: Episode, name: str, tool: Callable[[str], str]) -> str | None:
    """Return the reply of a tool to its last call in the policy's last turn; None: the turn does not call it."""
    calls = [text for called, text in _CALL.findall(episode.text) if called == name]
    return tool(calls[-1]) if calls else None


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression of numbers, or `error`."""
    try:
        value = _value(ast.parse(expression[:_LONGEST].strip(), mode="eval").body)
        return format(value, ".10g") if isinstance(value, float) else str(value)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(operand))
    raise ValueError("not an arithmetic expression")
