"""Partial attention that can be merged: a commutative monoid."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sdpa_ref._problem.checks import checked_shape, checked_sizes, sink_logits
from sdpa_ref.arrays import Array, accumulation_dtype, as_array, is_float, kind, module_of, result_dtype
from sdpa_ref.floating_point import ieee


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Attention over some of the keys, mergeable with attention over others.

    ``a + b`` is attention over the union of two disjoint sets of keys. The sum is commutative, and `empty` is its
    identity, so that any split of the keys, merged in any order, equals the whole within rounding.

    In an lse the logarithm of the sum is lost in rounding beside a large maximum. A state from `sdpa_state`, or a sum
    of states, keeps the two apart, and merges exactly at every size of score. One that is made of `output` and `lse`
    has the precision of these.

    Under `Causal`, `Window` and other masks that depend on positions, each piece needs its own `query_offset`: that of
    the whole, as a number, minus the index of the first key of the piece. "end" would align each piece with its own
    last key.

    Attributes
    ----------
    output : array, shape (..., Hq, L, Ev), or (..., L, Hq, Ev) in layout "LHE"
    lse : array, ``output.shape[:-1]``, float32, or float64 for float64
        Natural logarithm of the sum of the exponentials; -inf for a row that saw no key.
    layout : {"HLE", "LHE"}
    has_sink : bool
        Whether `with_sink` made it. Such a state is final: it cannot be merged, which would count the sink twice.

    Notes
    -----
    The merge of FlashInfer's "recursive attention" and of ring attention, with the empty state that those leave out.

    Examples
    --------
    >>> from sdpa_ref import Causal, sdpa, sdpa_state
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))  # two heads, five rows
    >>> halves = sdpa_state(q, k[:, :2], v[:, :2]) + sdpa_state(q, k[:, 2:], v[:, 2:])
    >>> bool(np.allclose(halves.output, sdpa(q, k, v), atol=1e-14))
    True

    Causal, with a second piece that begins at key 2:

    >>> first = sdpa_state(q, k[:, :2], v[:, :2], mask=Causal(), query_offset=0)
    >>> second = sdpa_state(q, k[:, 2:], v[:, 2:], mask=Causal(), query_offset=0 - 2)
    >>> bool(np.allclose((first + second).output, sdpa(q, k, v, mask=Causal()), atol=1e-14))
    True
    """

    output: Array
    lse: Array
    layout: str = "HLE"
    has_sink: bool = False
    _parts: Any = field(default=None, init=False, repr=False)  # the lse, and the maximum and the sum that it came from

    def __post_init__(self) -> None:
        if self.layout not in ("HLE", "LHE"):
            raise ValueError(f'layout must be "HLE" or "LHE", got {self.layout!r}')
        output, lse = as_array("output", self.output), as_array("lse", self.lse)
        for name, array in (("output", output), ("lse", lse)):
            if not is_float(array.dtype):
                raise TypeError(f"{name} must be float, got {array.dtype}")
            object.__setattr__(self, name, array)
        if lse.dtype.name not in ("float32", "float64"):
            raise TypeError(f"lse must be float32 or float64, got {lse.dtype}")
        if lse.shape != output.shape[:-1] or output.ndim < 2:
            raise ValueError(
                f"lse must have the shape of output without its last axis, got {lse.shape} and {output.shape}"
            )

    @staticmethod
    def empty(
        shape: tuple[int, ...], Ev: int, *, dtype: Any = np.float32, layout: str = "HLE", like: Array = None
    ) -> "AttentionState":
        """Return the identity: attention over no keys, output 0 and lse -inf.

        Parameters
        ----------
        shape : tuple of int
            Shape of the lse.
        Ev : int
            Value width.
        dtype : data type, default float32
            Type of the output.
        layout : {"HLE", "LHE"}
        like : array, optional
            An array whose library (NumPy or CuPy) is to be used.

        Examples
        --------
        >>> nothing = AttentionState.empty((2, 3), Ev=4)
        >>> (nothing + nothing).lse.tolist()
        [[-inf, -inf, -inf], [-inf, -inf, -inf]]
        """
        module, dtype = module_of(kind(like)), np.dtype(dtype).newbyteorder("=")
        shape, width = checked_shape(shape), checked_sizes(0, Ev=Ev)["Ev"]
        lse = module.full(shape, -np.inf, accumulation_dtype(dtype))
        return AttentionState(module.zeros((*shape, width), dtype), lse, layout)

    @ieee
    def __add__(self, other: "AttentionState") -> "AttentionState":
        if not isinstance(other, AttentionState):
            return NotImplemented
        if self.has_sink or other.has_sink:
            raise ValueError("a state with a sink cannot be merged: merge first, then add the sink once with with_sink")
        if self.layout != other.layout or self.output.shape != other.output.shape:
            raise ValueError(
                "states must agree in layout and shape, got "
                f"{self.layout} {self.output.shape} and {other.layout} {other.output.shape}"
            )
        dtype = result_dtype(output=self.output.dtype, other=other.output.dtype)
        m, z, share_a, share_b = _union(*self._apart, *other._apart)
        with np.errstate(all="ignore"):  # NaN and inf follow IEEE, silently
            a, b = self.output.astype(m.dtype), other.output.astype(m.dtype)
            mixed = share_a[..., None] * a + share_b[..., None] * b
            lse = (m + np.log(z)).astype(np.result_type(self.lse.dtype, other.lse.dtype))
            lse = np.where(share_b == 0, self.lse, np.where(share_a == 0, other.lse, lse))
            return AttentionState(mixed.astype(dtype), lse, self.layout)._with(m, z)

    def __radd__(self, other: object) -> "AttentionState":
        """Return the state itself for ``0 + state``, with which `sum` begins."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    @ieee
    def with_sink(self, sink: Any) -> "AttentionState":
        """Return the state with one more logit a head that only adds to the denominator.

        Parameters
        ----------
        sink : float or array of float, shape (Hq,)
            Raw logit; 0 is "softmax plus one".
        """
        if self.has_sink:
            raise ValueError("the sink is added once, and this state has one")
        heads = 1 if self.lse.ndim == 1 else self.lse.shape[-1 if self.layout == "LHE" else -2]
        m, z = self._apart
        logits = sink_logits(sink, heads, self.lse.dtype).astype(m.dtype)
        logits = module_of(kind(self.lse)).asarray(logits)
        if self.lse.ndim > 1 and self.layout == "HLE":
            logits = logits[:, None]
        m, z, share, _ = _union(m, z, logits, 1)
        with np.errstate(all="ignore"):
            output = (share[..., None] * self.output.astype(m.dtype)).astype(self.output.dtype)
            lse = (m + np.log(z)).astype(self.lse.dtype)
        return AttentionState(output, lse, self.layout, has_sink=True)._with(m, z)

    @property
    def _apart(self) -> tuple[Array, Any]:
        """The maximum and the sum; the lse and 1 where these are unknown, or the lse was written to."""
        if self._parts is None:
            return self.lse, 1
        lse, m, z = self._parts
        known = self.lse == lse
        return np.where(known, m, self.lse), np.where(known, z, 1).astype(z.dtype)

    def _with(self, m: Array, z: Array) -> "AttentionState":
        """Return the state itself, now with what its lse is made of."""
        object.__setattr__(self, "_parts", None if m is None else (self.lse.copy(), m, z))
        return self


def _union(m_a: Array, z_a: Any, m_b: Array, z_b: Any) -> tuple[Array, Array, Array, Array]:
    """Return maximum and sum of two states together, and the shares of both: -inf, 0, 0 and 0 where both are empty."""
    m = np.maximum(m_a, m_b)
    with np.errstate(all="ignore"):
        base = np.where(m == -np.inf, 0, m).astype(m.dtype)
        a, b = z_a * np.exp(m_a - base), z_b * np.exp(m_b - base)
        z = a + b
        divisor = np.where(z == 0, 1, z).astype(z.dtype)
        return m, z, a / divisor, b / divisor
