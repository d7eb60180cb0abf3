"""Tools that a policy may call between turns: text in, text out."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from e2e_fp8.config.task import ToolConfig
from e2e_fp8.tasks.rewards import imported_function

_CALL = re.compile(r"<tool>\s*([\w.:]+)\s*:(.*)</tool>", re.DOTALL)
_MAX_EXPONENT, _MAX_DIGITS = 64, 200
_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Tool(Protocol):
    """Deterministic function of its input; an exception is what the tool answers, not a failure of the run."""

    def __call__(self, text: str) -> str: ...


def load_tools(cfg: ToolConfig) -> dict[str, Tool]:
    """The tools on offer by name.

    Raises:
        ConfigError: an import path that cannot be imported.
    """
    return {name: calculator if name == "calculator" else imported_function(name, "task.tools.names") for name in cfg.names}


def tool_call(turn_text: str) -> tuple[str, str] | None:
    """(tool name, input) of the last call in a turn, None where there is none; the token that ends the call may carry more text."""
    start = turn_text.rfind("<tool>")
    match = _CALL.match(turn_text[start:]) if start >= 0 else None
    return (match[1], match[2].strip()) if match else None


def tool_result(call: tuple[str, str], tools: Mapping[str, Tool]) -> str:
    """What the policy reads after its call, an error in the tool's input included."""
    name, text = call
    if name not in tools:
        return f"<result>error: no tool {name}</result>"
    try:
        return f"<result>{tools[name](text)}</result>"
    except Exception as error:
        return f"<result>error: {type(error).__name__}: {error}</result>"


def calculator(text: str) -> str:
    """Value of an arithmetic expression of numbers, ``+ - * / // % **`` and parentheses; whole numbers exactly.

    Raises:
        ValueError: anything else, or a number too large.
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an arithmetic expression") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return repr(value)


def _value(node: ast.expr) -> int | float:
    # bool is a kind of int, and no number here
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _power(_value(node.left), _value(node.right))
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses")
    if isinstance(value, complex) or (isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS):
        raise ValueError("number too large")
    return value


def _power(base: int | float, exponent: int | float) -> int | float:
    # checked before it is computed: 9**9**9 would never end
    if abs(exponent) > _MAX_EXPONENT:
        raise ValueError("exponent too large")
    return base**exponent
