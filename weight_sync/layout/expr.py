"""Arithmetic in family files: `heads * head_dim`, `ceil(vocab, 128 * tp)`, `tied and pp > 1`.

A tiny evaluator over Python's own parser: integers, names, + - * // %, comparisons, and/or/not, and the function
ceil(value, multiple). Nothing else parses, so a family file cannot run code.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

from weight_sync.errors import FamilyError

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LONGEST = 500


def ceil_to(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` (at least 1) that is not below `value`."""
    return -(-value // multiple) * multiple


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr | str:
    """The parsed expression, or what is wrong with it."""
    if len(text) > _LONGEST:  # deep nesting would exhaust the parser's stack
        return f"longer than {_LONGEST} characters"
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return str(error) or type(error).__name__


def evaluate(text: str | int, names: Mapping[str, int], where: str) -> int:
    """The integer (or 0/1) value of an expression. `where` names the place in the family file, for errors."""
    if isinstance(text, int):
        return int(text)
    parsed = _parse(text)
    if isinstance(parsed, str):
        raise FamilyError(f"{where}: cannot parse the expression {text[:_LONGEST]!r}: {parsed}")
    return int(_value(parsed, names, f"{where}: {text!r}"))


def _value(node: ast.expr, names: Mapping[str, int], where: str) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise FamilyError(f"{where}: unknown name {name!r}; known: {', '.join(sorted(names))}")
            return names[name]
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            a, b = _value(left, names, where), _value(right, names, where)
            if b == 0 or a % b:
                raise FamilyError(f"{where}: {a} // {b} is not a whole number")
            return a // b
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            a, b = _value(left, names, where), _value(right, names, where)
            if b < 1:
                raise FamilyError(f"{where}: {a} % {b}: a modulus must be at least 1")
            return a % b
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, names, where), _value(right, names, where))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _value(operand, names, where))
        case ast.BoolOp(op=ast.And(), values=values):
            return int(all(_value(v, names, where) for v in values))
        case ast.BoolOp(op=ast.Or(), values=values):
            return int(any(_value(v, names, where) for v in values))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return int(_COMPARE[type(op)](_value(left, names, where), _value(right, names, where)))
        case ast.Call(func=ast.Name(id="ceil"), args=[value, multiple], keywords=[]):
            number, step = _value(value, names, where), _value(multiple, names, where)
            if step < 1:
                raise FamilyError(f"{where}: ceil to a multiple of {step}; a multiple must be at least 1")
            return ceil_to(number, step)
        case _:
            raise FamilyError(f"{where}: only integers, names, + - * // %, comparisons, and/or/not and ceil(a, b) are allowed")
