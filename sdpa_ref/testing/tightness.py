"""How tight the bound is: error by bound, number for number, of three implementations that share no code.

``python -m sdpa_ref.testing.tightness`` prints the table of the documentation (numerics).
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sdpa_ref._problem import pose
from sdpa_ref.api import sdpa
from sdpa_ref.arrays import Array
from sdpa_ref.reference import stages
from sdpa_ref.testing.bounds import wide
from sdpa_ref.testing.budget import error_budget
from sdpa_ref.testing.cases import Case, case
from sdpa_ref.testing.museum import Kernel, target_of
from sdpa_ref.testing.straight import straight

DTYPES = ("float16", "bfloat16", "float32", "float64")
LENGTHS = (1, 5, 16, 33, 64, 129, 300)


def contenders() -> dict[str, Callable[[Case], Array]]:
    """Return what solves a case, by name: the plain formula, tiles with an online softmax, and compiled kernels."""

    def plain(case: Case) -> Array:
        p = pose(*case.arrays, **case.options)[0].rows(0, case.query.shape[-2])
        return straight(p, stages(p).keep, p.acc_dtype).output.astype(p.dtype)

    tiled = target_of(Kernel()).forward
    return {
        "plain formula": plain,
        "tiles, online softmax": lambda case: tiled(*case.arrays, **case.options),
        "numba": lambda case: sdpa(*case.arrays, backend="numba", **case.options),
    }


def drawn(dtype: str, number: int) -> Iterator[Case]:
    """Return so many cases of this type: normal and loud numbers, causal and not, lengths around tile edges."""
    for seed in range(number):
        rng = np.random.default_rng(seed)
        L, S, E = (int(n) for n in rng.choice(LENGTHS, 3))
        mask = ("causal",) if seed % 3 == 0 else ()
        yield case(seed, heads=(2, 1), L=L, S=S, E=min(E, 128), Ev=4, dtype=dtype, mask=mask, offset="end",
                   numbers=("normal", "needles")[seed % 2])  # fmt: skip


def measure(dtype: str, number: int) -> dict[str, tuple[float, float, float]]:
    """Return median, 99th percentile and maximum of error by bound for each contender."""
    ratios: dict[str, list[Array]] = {name: [] for name in contenders()}
    for each in drawn(dtype, number):
        budget = error_budget(*each.arrays, **each.options)
        for name, solve in contenders().items():
            with np.errstate(all="ignore"):
                ratio = abs(wide(solve(each)) - budget.expected) / budget.bound
            ratios[name].append(ratio[np.isfinite(ratio)].ravel())
    return {name: _summary(np.concatenate(parts)) for name, parts in ratios.items()}


def _summary(ratios: Any) -> tuple[float, float, float]:
    return float(np.median(ratios)), float(np.quantile(ratios, 0.99)), float(ratios.max(initial=0))


if __name__ == "__main__":
    print("| type | implementation | median | 99 % | largest |\n| --- | --- | --- | --- | --- |")
    for dtype in DTYPES:
        for name, (median, most, largest) in measure(dtype, 300).items():
            print(f"| {dtype} | {name} | {median:.3f} | {most:.3f} | {largest:.3f} |")
