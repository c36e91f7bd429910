"""The CPU backend: the whole forward specification in kernels that Numba compiles for the processor at hand."""

from functools import lru_cache

import numba
import numpy as np
from numba.core.errors import NumbaError
from numba.extending import is_jitted

from sdpa_ref.problem import Result

from . import decode, panels, threads
from .plan import plan
from .strips import strips, with_scores

ARRAYS = "numpy"


def unavailable():
    """Return why the backend cannot run here, None when it can."""
    return None


def unsupported(problem):
    """Return None: the backend does everything."""
    return None


def forward(problem, want):
    """Return what is wanted of the attention that `problem` states."""
    score_mod = problem.score_mod and compiled(problem.score_mod, problem.acc_dtype.name)
    if not problem.blockwise and (problem.score_mod is None or score_mod):
        return attend(problem, want, score_mod)
    shape = problem.query.shape[:-1]
    whole = Result(
        problem.new_output() if "output" in want else None,
        np.empty(shape, problem.acc_dtype) if "lse" in want else None,
        np.empty((*shape, problem.S), problem.dtype) if "weights" in want else None,
    )
    for first, last in strips(problem):
        rows = problem.rows(first, last)
        part = attend(rows, want, score_mod) if score_mod or rows.score_mod is None else attend(with_scores(rows), want, final=True)
        for name in want:
            axis = -1 if name == "lse" else -2
            np.moveaxis(getattr(whole, name), axis, 0)[first:last] = np.moveaxis(getattr(part, name), axis, 0)
    return whole


@lru_cache(maxsize=64)
def compiled(score_mod, acc):
    """Return the user's function compiled for scores of type `acc`, None where Numba cannot compile it."""
    function = score_mod if is_jitted(score_mod) else numba.njit(score_mod)
    try:
        function.compile((getattr(numba, acc), *[numba.int64] * 4))
    except (NumbaError, TypeError):
        return None
    return function


def attend(problem, want, score_mod=None, final=False):
    """Return what is wanted, by one kernel; `final` says that the bias holds the scores themselves."""
    known = problem.plans.get("numba")
    if known is None:
        known = problem.plans["numba"] = plan(problem, final)
    output = problem.new_output() if "output" in want else None
    shape = problem.query.shape[:-1]
    lse = np.empty(shape, problem.acc_dtype) if "lse" in want else None
    weights = np.zeros((*shape, problem.S), problem.dtype) if "weights" in want else None
    dtype = problem.dtype.name
    arrays = (id(problem.query), id(problem.key), address(problem.value), address(output), address(lse))
    intervals = tuple(map(address, problem.intervals or (None, None, None)))
    if known.chunks and weights is None and output is not None:
        attend_rows, merge = decode.kernels(dtype, known.sizes)
        states, start = memory(known.state_bytes)
        arguments = (known.address, start, *arrays, *intervals, address(problem.sink))
        run(attend_rows, arguments, known.units * known.chunks)
        if known.chunks > 1:
            run(merge, arguments, known.units)
        return Result(output, lse, None)
    packed, start = memory(known.packed_bytes)
    if known.pack_tasks:
        run(panels.packing(dtype, known.sizes)[1], (known.address, start, *arrays[:3]), known.pack_tasks)
    others = (problem.dense, problem.bias, problem.slopes, problem.positions, problem.sink)
    arguments = (known.address, start, *arrays, address(weights), *intervals, *map(address, others))
    run(panels.kernel(dtype, known.sizes, score_mod), arguments, known.tasks)
    return Result(output, lse, weights)


def memory(count):
    """Return an array to keep and the address in it from which `count` bytes are aligned; (None, 0) for none."""
    if count == 0:
        return None, 0
    array = np.empty(count + 64, np.uint8)
    return array, array.ctypes.data + -array.ctypes.data % 64


def run(kernel, arguments, tasks):
    """Run the kernel, on this thread alone where there is just one task."""
    if tasks == 1:
        kernel(np.zeros(1, np.int64), *arguments)
    else:
        threads.run(kernel, arguments, tasks)


def address(array):
    """Return what a kernel knows an array by: the address of its object, 0 for None."""
    return 0 if array is None else id(array)
