"""A `score_mod` as C++: it is called once with stand-ins for its arguments, which write down what is done with them.

Types go as NumPy's go on arrays: each operation has the type that NumPy gives it, and so its rounding. Numbers that the
function brings are data of the call, at their places in the parameter block: other numbers need no other kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from sdpa_ref.backend import Problem

CONSTANTS = 24  # numbers that a function may bring
MOST_LINES = 64
_TYPES = {"bool": "bool", "int64": "i64", "float32": "float", "float64": "double"}
_SAME = {  # of operands that have the type of the result
    "add": "{} + {}", "subtract": "{} - {}", "multiply": "{} * {}", "divide": "{} / {}", "negative": "-{}",
    "positive": "{}", "absolute": "magnitude({})", "maximum": "greater_of({}, {})", "minimum": "lesser_of({}, {})",
    "floor_divide": "quotient({}, {})", "remainder": "modulo({}, {})", "exp": "exponential({})", "log": "logarithm({})",
    "sqrt": "square_root({})", "tanh": "hyperbolic_tangent({})",
}  # fmt: skip
_OF_BOOLS = {
    "logical_and": "{} & {}", "logical_or": "{} | {}", "logical_not": "!{}", "bitwise_and": "{} & {}",
    "bitwise_or": "{} | {}", "bitwise_xor": "{} ^ {}", "invert": "!{}",
}  # fmt: skip
_COMPARISONS = {
    "greater": "{} > {}", "greater_equal": "{} >= {}", "less": "{} < {}", "less_equal": "{} <= {}", "equal": "{} == {}",
    "not_equal": "{} != {}",
}  # fmt: skip
_OF_INTEGERS = ("floor_divide", "remainder")


class Untraceable(TypeError):
    """What a function does that the kernels cannot."""


@dataclass(frozen=True)
class Traced:
    """A function of scores, and what it does to one: C++ statements, and the numbers that they read."""

    function: Callable[..., Any]
    text: str
    constants: tuple[float, ...]

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function makes of scores."""
        return self.function(*arguments)


class Lines:
    """The statements of a function as far as it was traced, each written once."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self.constants: list[float] = []

    def written(self, expression: str, dtype: np.dtype[Any]) -> "Value":
        """Return the value of an expression."""
        kind = _TYPES.get(dtype.name)
        if kind is None or len(self.lines) == MOST_LINES:
            raise Untraceable(f"a value of {dtype}, or more than {MOST_LINES} operations")
        name = self.lines.setdefault(f"{kind} {{}} = {expression};", f"t{len(self.lines)}")
        return Value(self, name, dtype)

    def operand(self, given: Any, dtype: np.dtype[Any]) -> str:
        """Return an operand of this type."""
        if isinstance(given, Value):
            return given.name if given.dtype == dtype else f"({_TYPES[dtype.name]}){given.name}"
        number = float(given)
        if dtype.name not in _TYPES or (not isinstance(given, float | np.floating) and int(number) != int(given)):
            raise Untraceable(f"the number {given!r}")
        if len(self.constants) == CONSTANTS:
            raise Untraceable(f"more than {CONSTANTS} numbers")
        self.constants.append(number)
        return f"({_TYPES[dtype.name]})p.constants[{len(self.constants) - 1}]"


class Value(np.lib.mixins.NDArrayOperatorsMixin):
    """The stand-in for an argument, or for what a function has made of it."""

    def __init__(self, lines: Lines, name: str, dtype: np.dtype[Any]) -> None:
        self.lines, self.name, self.dtype = lines, name, dtype

    def __bool__(self) -> NoReturn:
        raise Untraceable("a branch by a value")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **keywords: Any) -> "Value":
        """Return the value of a universal function."""
        name = ufunc.__name__
        if method != "__call__" or keywords or not all(map(_is_number, inputs)):
            raise Untraceable(f"{name} of arrays")
        if name == "square" or (name == "power" and type(inputs[1]) is int and inputs[1] == 2):
            inputs, name, ufunc = (inputs[0], inputs[0]), "multiply", np.multiply
        with np.errstate(all="ignore"):
            result = ufunc(*map(_sample, inputs)).dtype
        if name in _COMPARISONS:
            form, types = _COMPARISONS[name], np.result_type(*map(_sample, inputs))
        elif name in _OF_BOOLS and all(_sample(x).dtype == np.bool_ for x in inputs if isinstance(x, Value)):
            form, types = _OF_BOOLS[name], result
        elif name in _OF_INTEGERS and result == np.int64 and type(inputs[1]) is int and 0 < inputs[1] < 1 << 53:
            form, types, inputs = _SAME[name].format("{}", f"{inputs[1]}ll"), result, inputs[:1]  # divides much faster
        elif name in _SAME and result != np.bool_ and (name not in _OF_INTEGERS or result == np.int64):
            form, types = _SAME[name], result
        else:
            raise Untraceable(name)
        operands = [self.lines.operand(x, types) for x in inputs]
        return self.lines.written(form.format(*operands), result)

    def __array_function__(self, function: Any, types: Any, arguments: Any, keywords: Any) -> "Value":
        """Return the value of `numpy.where` or `numpy.clip`."""
        if keywords or len(arguments) != 3 or not all(map(_is_number, arguments)):
            raise Untraceable(function.__name__)
        if function is np.clip:
            clipped: Value = np.minimum(np.maximum(arguments[0], arguments[1]), arguments[2])
            return clipped
        if function is not np.where:
            raise Untraceable(function.__name__)
        here, one, other = arguments
        if getattr(here, "dtype", None) != np.bool_:
            raise Untraceable("where of numbers")
        dtype = np.where(True, _sample(one), _sample(other)).dtype
        place = self.lines.operand
        return self.lines.written(f"{place(here, here.dtype)} ? {place(one, dtype)} : {place(other, dtype)}", dtype)


def traced(problem: Problem) -> Problem:
    """Return the problem with its `score_mod` traced where that can be."""
    function = problem.score_mod
    if function is None or type(function) is Traced:
        return problem
    found = trace(function, problem.acc_dtype)
    return problem if found is None else problem._replace(score_mod=found)


def trace(function: Callable[..., Any], dtype: np.dtype[Any]) -> Traced | None:
    """Return what a function does to a score of this type, or None where it does more than is known here.

    Whatever it raises it raises again where it is called with arrays.
    """
    lines = Lines()
    index = np.dtype(np.int64)
    arguments = Value(lines, "s", dtype), *(Value(lines, name, index) for name in "bhij")
    try:
        result = getattr(function, "py_func", function)(*arguments)  # of a function that Numba would compile
    except Exception:  # of any library, and of the function's own
        return None
    if not isinstance(result, Value) or result.lines is not lines or result.dtype == np.bool_:
        return None
    text = "".join(line.format(name) + " " for line, name in lines.lines.items())
    return Traced(function, f"{text}return (Number){result.name};", tuple(lines.constants))


def _is_number(given: Any) -> bool:
    return isinstance(given, Value | bool | int | float | np.generic)


def _sample(given: Any) -> Any:
    """Return an array of the type of a value, or the number itself, which may be of no type of its own."""
    return np.ones((1, 1), given.dtype) if isinstance(given, Value) else given
