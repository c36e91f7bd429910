"""Problems that no kernel takes as they are: a strip of query rows at a time, their rules are evaluated with NumPy."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.errors import NumbaError
from numba.extending import is_jitted

from sdpa_ref.backend import Problem, Result
from sdpa_ref.floating_point import ieee
from sdpa_ref.storage import Stored

from .calls import solve
from .plan import forward_sizes

Array = np.ndarray[Any, np.dtype[Any]]
NUMBERS_AT_ONCE = 2**19  # scores in a strip: what a rule makes of them stays in the cache
PRODUCT_ROWS = 16
WORK_AT_ONCE = 2**22  # multiplications of a head in one matrix product, and of all heads if there are more products:
# NumPy answers no signal before it has done what it was called for


def forward(problem: Problem, want: frozenset[str]) -> Result:
    """Return what is wanted of output, lse (with m and z) and weights; of "wide", the output as it was accumulated."""
    if "wide" in want:
        want = want - {"wide"}
        if not forward_sizes(problem.dtype.name).products:  # else it would be another output than without gradients
            problem = widened(problem)
    if problem.plain or not (problem.blockwise or problem.score_mod is not None):
        return solve(problem, want)
    score_mod = compiled(problem.score_mod, problem.acc_dtype.name)
    if problem.blockwise or score_mod is None:
        return forward_in_strips(problem, want, score_mod)
    return solve(problem, want, score_mod)


def widened(problem: Problem) -> Problem:
    """Return the problem in its accumulation type, with an output of its own."""
    acc = problem.acc_dtype
    if problem.dtype == acc:
        return problem
    query, key, value = (as_type(array, acc) for array in (problem.query, problem.key, problem.value))
    return problem._replace(form=problem.form._replace(dtype=acc), query=query, key=key, value=value, out=None)


def as_type(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return the array in this type and aligned, a copy only where that takes one; repeated axes stay repeated."""
    once = array[tuple(slice(None if stride else 1) for stride in array.strides)]
    with np.errstate(over="ignore"):
        return np.broadcast_to(np.require(once, dtype, "A"), array.shape)


@lru_cache(maxsize=64)
def compiled(score_mod: Any, acc: str) -> Any:
    """Return a function that its user has compiled with Numba, if it is of use for scores of type `acc`, else None.

    A plain function is never compiled here: that takes seconds for every new one, and freezes what it reads.
    """
    if not is_jitted(score_mod):
        return None
    arguments = (getattr(numba, acc), *[numba.int64] * 4)
    try:
        score_mod.compile(arguments)
    except (NumbaError, TypeError):
        return None
    result = score_mod.overloads[arguments].signature.return_type
    return score_mod if isinstance(result, types.Float | types.Integer) else None


@ieee
def forward_in_strips(problem: Problem, want: frozenset[str], score_mod: Any) -> Result:
    """Return what is wanted, by `solve` for one strip of rows after the other."""
    shape, out = problem.query.shape[:-1], problem.out
    problem = problem._replace(out=None)  # a rule of the caller's may fail in any strip
    whole = Result(
        problem.new_output() if "output" in want else None,
        np.empty(shape, problem.acc_dtype) if "lse" in want else None,
        np.empty((*shape, problem.S), problem.dtype) if "weights" in want else None,
        *(np.empty(shape, problem.acc_dtype) if name in want else None for name in ("m", "z")),
    )
    for here, product in row_strips(problem):
        strip = problem.rows(here.start, here.stop)
        if score_mod is None and problem.score_mod is not None:
            part = solve(with_scores(strip, product), want, final=True)
        else:
            part = solve(strip, want, score_mod)
        for name in want:
            target, source = getattr(whole, name), getattr(part, name)
            if name in ("lse", "m", "z"):
                target[..., here] = source
            else:
                target[..., here, :] = source
    if out is None or whole.output is None:
        return whole
    out[...] = whole.output
    return whole._replace(output=out)


def row_strips(problem: Problem) -> Iterator[tuple[slice, int]]:
    """Yield the rows of each strip, and how many of them a matrix product takes."""
    product = max(1, min(PRODUCT_ROWS, problem.L))
    products = NUMBERS_AT_ONCE // max(1, product * problem.B * problem.Hq * problem.S)
    rows = product * max(1, products)
    for i in range(0, problem.L, rows):
        yield slice(i, min(i + rows, problem.L)), product


def with_scores(problem: Problem, product: int) -> Problem:
    """Return `problem` with the scores that the user's function makes in the place of all that leads to them."""
    _, s, keep = scores(problem, product)
    with np.errstate(all="ignore"):
        s = applied(problem, problem.score_mod, s)
    no_keys = np.empty((*problem.key.shape[:-1], 0), problem.dtype)
    return problem._replace(
        form=problem.form._replace(E=0), query=problem.query[..., :0], key=no_keys, scale=1.0,
        softcap=None, bias=s, slopes=None, keep=keep, score_mod=None,
    )  # fmt: skip


def scores(problem: Problem, product: int) -> tuple[Array, Array, Array | None]:
    """Return the scores after the soft cap, those for the user's function, and what is kept (None for all).

    Matrix products take so many rows and keys each, whatever the batch, as their number can show in the last bits.
    """
    acc = problem.acc_dtype
    products = -(-problem.L // product)
    filled = np.zeros((*problem.batch, problem.Hq, products * product, problem.E), acc)
    filled[..., : problem.L, :] = problem.query
    q = filled.reshape(*problem.batch, problem.Hkv, problem.group, products, product, problem.E)
    s = np.empty((*q.shape[:-1], problem.S), acc)
    keys = max(1, WORK_AT_ONCE // (product * max(1, problem.E)))
    step = max(1, WORK_AT_ONCE // max(1, problem.B * problem.Hq * product * problem.E * min(keys, problem.S)))
    with np.errstate(all="ignore"):
        for j in range(0, problem.S, keys):
            piece = _piece(problem.key, j, min(j + keys, problem.S))
            k = np.array(piece, acc, order="C").swapaxes(-1, -2)[..., None, None, :, :]
            for x in range(0, products, step):
                s[..., x : x + step, :, j : j + keys] = q[..., x : x + step, :, :] @ k
        s = s.reshape(*filled.shape[:-1], problem.S)[..., : problem.L, :] * acc.type(problem.scale)
        if problem.softcap is not None:
            s = np.tanh(s / acc.type(problem.softcap)) * acc.type(problem.softcap)
        capped, keep = s, problem.keep
        if problem.bias is not None:
            keep = (problem.bias != -np.inf) & (True if keep is None else keep)
        s = s + np.asarray(problem.added()).astype(acc)
    return capped, s, keep


def _piece(key: Any, j0: int, j1: int) -> Array:
    """Return the keys [j0, j1), gathered where they are stored."""
    piece: Array = key.rows(j0, j1) if isinstance(key, Stored) else key[..., j0:j1, :]
    return piece


def applied(problem: Problem, function: Any, s: Array) -> Array:
    """Return what a function of the user makes of the scores."""
    made = function(s, *problem.indices())
    return np.broadcast_to(np.asarray(made, s.dtype), s.shape)
