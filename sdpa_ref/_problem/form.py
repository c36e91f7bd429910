"""What a call's arrays are, lengths aside: found out once for each combination of types, axes, heads and widths."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref._problem import checks
from sdpa_ref._problem.caller import Caller
from sdpa_ref.arrays import accumulation_dtype, result_dtype
from sdpa_ref.backend import Form

Shape = tuple[int, ...]
MOST = 1024  # forms that are kept, the most recently used ones


class Arrays(NamedTuple):
    """The form of query, key and value, and what their caller passed.

    Attributes
    ----------
    form : Form
    headless, heads_missing : bool
        Whether none of them has a head axis, and whether some have none.
    as_given : bool
        Whether they are of type `form.dtype` and the query has all leading axes.
    scale : float
        The default scale.
    largest, tiny : float
        The largest number of the accumulation type, and the smallest normal one.
    caller : Caller
        What turns results back where there is no `out`.
    """

    form: Form
    headless: bool
    heads_missing: bool
    as_given: bool
    scale: float
    largest: float
    tiny: float
    caller: Caller


@lru_cache(maxsize=MOST)
def arrays_of(
    kind: str, layout: str,
    query_dtype: np.dtype[Any], query: Shape, E: int,
    key_dtype: np.dtype[Any], key: Shape, key_width: int,
    value_dtype: np.dtype[Any] | None, value: Shape, Ev: int,
) -> Arrays:  # fmt: skip
    """Return what arrays are that have these types, axes before the last two (the head axis among them) and widths.

    Raises
    ------
    TypeError, ValueError
        They do not fit together. The message speaks of lengths that are 1.
    """
    given = {"query": (query_dtype, (*query, 1, E)), "key": (key_dtype, (*key, 1, key_width))}
    if value_dtype is not None:
        given["value"] = (value_dtype, (*value, 1, Ev))
    dtype = result_dtype(**{name: dtype for name, (dtype, _) in given.items()})
    shapes = {name: shape for name, (_, shape) in given.items()}
    batch, Hq, Hkv, *_ = checks.sizes(shapes, layout)
    acc_dtype = accumulation_dtype(dtype)
    form = Form(dtype, acc_dtype, kind, batch, Hq, Hkv, E, Ev)
    as_given = all(own == dtype for own, _ in given.values()) and query[:-1] == batch
    without = [len(shape) == 2 for shape in shapes.values()]
    limits = np.finfo(acc_dtype)
    scale = 1 / math.sqrt(E) if E else 1.0
    caller = Caller(layout, all(without))
    return Arrays(form, all(without), any(without), as_given, scale, float(limits.max), float(limits.tiny), caller)


@lru_cache(maxsize=MOST)
def arrays_alike(
    kind: str, layout: str, dtype: np.dtype[Any], query: Shape, key: Shape, value: Shape, E: int, Ev: int
) -> Arrays:
    """Return what arrays of one type are, as `arrays_of`: what most calls have is found under a shorter name."""
    return arrays_of(kind, layout, dtype, query, E, dtype, key, E, dtype, value, Ev)
