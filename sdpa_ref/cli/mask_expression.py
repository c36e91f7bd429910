"""Masks written as text, in Python's grammar: calls of the mask objects, joined by ``& | ~``. Nothing is executed."""

import ast
import inspect
from difflib import get_close_matches
from typing import Any

from sdpa_ref import masks
from sdpa_ref.cli.errors import UsageError

MASKS = {name: masks.RULES[name] for name in sorted(masks.RULES) if name != "MaskFunction"}  # that takes a function
_DEEPEST = 100  # operators within operators; what walks through a mask calls itself for each
_MOST_AXES = 16  # of a list; the masks add some, and NumPy ends at 32


class _Wrong(Exception):
    """What is wrong with a piece of the text."""

    def __init__(self, message: str, node: ast.expr) -> None:
        super().__init__(message)
        self.node = node


def parse_mask(text: str) -> masks.Mask:
    """Return the mask that the text describes; a UsageError points at the piece that is wrong.

    Examples
    --------
    >>> parse_mask("Window(left=3, right=None) & ~KeyLengths([2, 5])")
    Window(3, None) & ~KeyLengths([2, 5])
    """
    line = " ".join(text.split())
    if not line:
        raise UsageError('the mask is empty; write for example "Causal() & Window(3, 0)"')
    try:
        tree = ast.parse(line, mode="eval")
    except SyntaxError as error:
        start, stop, message = (error.offset or 0) - 1, (error.end_offset or 0) - 1, error.msg
        if not 0 <= start < len(line):
            start, message = len(line), "the mask is not complete" if message == "invalid syntax" else message
        raise UsageError(_pointed(message, line, start, stop)) from None
    except (ValueError, MemoryError, RecursionError):  # characters or a depth that the parser does not take
        raise UsageError("the text cannot be read as a mask") from None
    try:
        return _mask(tree.body, 0)
    except _Wrong as wrong:
        # the syntax tree counts bytes
        start, stop = (
            len(line.encode()[:at].decode()) for at in (wrong.node.col_offset, wrong.node.end_col_offset or 0)
        )
        raise UsageError(_pointed(str(wrong), line, start, stop)) from None


def _pointed(message: str, line: str, start: int, stop: int) -> str:
    """Return the message above the line, or the part of a long one, with the piece underlined."""
    cut = max(start - 40, 0)
    shown = line[cut : cut + 100]
    return f"{message}\n    {shown}\n    {' ' * (start - cut)}{'^' * max(min(stop, cut + len(shown)) - start, 1)}"


def _mask(node: ast.expr, depth: int) -> masks.Mask:
    """Return the mask of a piece of the text."""
    if depth > _DEEPEST:
        raise _Wrong(f"more than {_DEEPEST} operators within one another", node)
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _mask(left, depth + 1) & _mask(right, depth + 1)
        case ast.BinOp(left, ast.BitOr(), right):
            return _mask(left, depth + 1) | _mask(right, depth + 1)
        case ast.UnaryOp(ast.Invert(), operand):
            return ~_mask(operand, depth + 1)
        case ast.Call(ast.Name(name) as function):
            return _call(_named(name, function), node)
        case ast.Name(name):
            raise _Wrong(f"{_named(name, node).__name__} must be called: {_usage(name)}", node)
        case ast.BoolOp() | ast.UnaryOp(ast.Not()):
            raise _Wrong("masks are combined with & | ~, not with and, or, not", node)
    raise _Wrong("expected a mask here, such as Causal(), or masks combined with & | ~", node)


def _named(name: str, node: ast.expr) -> type[masks.Mask]:
    if name == "MaskFunction":
        raise _Wrong("MaskFunction takes a Python function, and no code is run from text: use it in Python", node)
    if name not in MASKS:
        near = get_close_matches(name, MASKS, 1)
        raise _Wrong(
            f"unknown mask {name!r}; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(MASKS)}"), node
        )
    return MASKS[name]


def _usage(name: str) -> str:
    return f"{name}({', '.join(inspect.signature(MASKS[name]).parameters)})"


def _call(mask: type[masks.Mask], node: ast.Call) -> masks.Mask:
    """Return the mask object; what its class says against the arguments is said of the whole call."""
    arguments = [_value(argument) for argument in node.args]
    keywords: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise _Wrong("** is not allowed here", keyword.value)
        keywords[keyword.arg] = _value(keyword.value)
    try:
        inspect.signature(mask).bind(*arguments, **keywords)
    except TypeError as error:
        raise _Wrong(f"{_usage(mask.__name__)}: {error}", node) from None
    try:
        return mask(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise _Wrong(str(error).removeprefix("mask: "), node) from None


def _value(node: ast.expr, depth: int = 0) -> Any:
    """Return the integer, None, or list of integers."""
    if depth > _MOST_AXES:
        raise _Wrong(f"more than {_MOST_AXES} lists within one another", node)
    match node:
        case ast.Constant(value) if value is None or type(value) is int:
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if type(value) is int:
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_value(item, depth + 1) for item in items]
    raise _Wrong("expected an integer, None or a list of integers here", node)
