"""ALiBi: a bias that is a rule instead of an array."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_ref.arrays import as_integer, host_array
from sdpa_ref.frozen import Frozen

_MOST = 1e24  # times any distance of positions it is a float32


@dataclass(frozen=True, eq=False)
class ALiBi(Frozen):
    """Attention with linear biases: adds ``-slopes[h] * |i + offset - j|`` to the scores.

    Parameters
    ----------
    slopes : float or array of float, shape ``(Hq,)`` or ``(*batch, Hq)``
        One slope a query head, or one for each batch entry and head, within +-1e24; a number serves all heads.

    Notes
    -----
    Press, Smith and Lewis, "Train Short, Test Long" (ICLR 2022), with the distance taken on both sides, so that the
    bias is defined without a causal mask too. The signed form ``slope * (j - i)`` differs only for keys ahead of the
    query; write it as ``score_mod`` or as an array.

    Examples
    --------
    >>> from sdpa_ref import sdpa_stages
    >>> x = np.zeros((1, 3, 2))
    >>> sdpa_stages(x, x, x, bias=ALiBi(0.5)).biased
    array([[[ 0. , -0.5, -1. ],
            [-0.5,  0. , -0.5],
            [-1. , -0.5,  0. ]]])
    """

    slopes: Any

    def __post_init__(self) -> None:
        slopes = host_array("bias: ALiBi slopes", self.slopes)
        if slopes.dtype.kind not in "fiu" and slopes.dtype.name != "bfloat16":
            raise TypeError(f"bias: ALiBi slopes must be real numbers, got {slopes.dtype}")
        slopes = slopes.astype(np.float64)
        if not (abs(slopes) <= _MOST).all():
            raise ValueError(f"bias: ALiBi slopes must be finite and within +-{_MOST:g}, got {slopes}")
        slopes.setflags(write=False)
        object.__setattr__(self, "slopes", slopes)


def alibi_slopes(heads: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the slopes of the ALiBi paper for so many heads, shape (Hq,), float64.

    For a power of two they are ``2**(-8 / heads)`` and its powers. Otherwise, as the authors' code does it: those of
    the next smaller power of two, then every second one of the next larger.

    Parameters
    ----------
    heads : int
        Number of query heads, at least 0.

    Examples
    --------
    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    >>> alibi_slopes(3)
    array([0.0625    , 0.00390625, 0.25      ])
    """
    heads = as_integer("heads", heads)
    if heads < 0:
        raise ValueError(f"heads must be at least 0, got {heads}")
    if heads == 0:
        return np.empty(0)
    whole = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8.0 / whole * np.arange(1, whole + 1))
    between = 2.0 ** (-4.0 / whole * np.arange(1, 2 * (heads - whole), 2))
    return np.concatenate([first, between])
