"""From words to the input of a layer: embeddings and positions."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sdpa_ref._problem.checks import checked_sizes
from sdpa_ref.arrays import Array, accumulation_dtype, as_array
from sdpa_ref.floating_point import ieee
from sdpa_ref.layers.coded import dense, of_rows
from sdpa_ref.layers.gradients import LayerGradients, Vjp, checked_gradient, like
from sdpa_ref.layers.layer import Layer
from sdpa_ref.layers.weights import Axes, float_dtype
from sdpa_ref.stored.quantized import Quantized


@dataclass(init=False, eq=False, repr=False)
class Embedding(Layer):
    """A vector for each entry of a vocabulary.

    Parameters
    ----------
    num_embeddings : int
        Size of the vocabulary.
    width : int
        Length of a vector.
    rng, dtype
        As in `Linear`; the random vectors are standard normal, as in PyTorch.

    Attributes
    ----------
    weight : array or Quantized, shape (num_embeddings, width)
        Vectors from quantised weights are float32.

    Examples
    --------
    >>> words = "Wie geht es dir".split()
    >>> embedding = Embedding(len(words), 48, rng=0)
    >>> x = embedding(range(len(words))) + sinusoidal_positions(len(words), 48)
    >>> x.shape, x.dtype
    ((4, 48), dtype('float32'))
    """

    num_embeddings: int
    width: int
    weight: Array

    _weights: ClassVar[Axes] = {"weight": "num_embeddings width"}

    def __init__(self, num_embeddings: int, width: int, *, rng: Any = None, dtype: Any = np.float32) -> None:
        sizes = checked_sizes(num_embeddings=num_embeddings, width=width)
        weight = np.random.default_rng(rng).standard_normal(tuple(sizes.values())).astype(float_dtype(dtype))
        self._fill({"weight": weight}, sizes)

    def __call__(self, ids: Any) -> Array:
        """Return the vectors of these entries.

        Parameters
        ----------
        ids : array of int, shape (...)
            Numbers of entries, in ``[0, num_embeddings)``.

        Returns
        -------
        array, shape (..., width)
        """
        return self.value_and_vjp(ids)[0]

    def value_and_vjp(self, ids: Any) -> tuple[Array, Vjp]:
        """Return the vectors of these entries, and the function that gives the gradients by all vectors.

        There is none by vectors that are codes.
        """
        ids = as_array("ids", ids)
        if ids.dtype.kind not in "iu":
            raise TypeError(f"ids must be integers, got {ids.dtype}")
        wrong = ids[(ids < 0) | (ids >= self.num_embeddings)]
        if wrong.size:
            raise ValueError(f"ids must be in [0, {self.num_embeddings}), got {wrong[0]}")

        @ieee
        def vjp(grad_value: Any) -> LayerGradients:
            grad = checked_gradient(grad_value, (*ids.shape, self.width))
            if isinstance(self.weight, Quantized):
                return LayerGradients(None, None, {})
            total = np.zeros_like(self.weight, accumulation_dtype(self.weight.dtype))
            with np.errstate(all="ignore"):
                np.add.at(total, ids, grad.astype(total.dtype, copy=False))
                return LayerGradients(None, None, {"weight": like(total, self.weight)})

        if not isinstance(self.weight, Quantized):
            return self.weight[ids], vjp
        return dense(of_rows(self.weight, ids.reshape(-1)), np.float32).reshape(*ids.shape, self.width), vjp


def sinusoidal_positions(L: int, width: int, *, dtype: Any = np.float32) -> Array:
    """Return the positions of L tokens as vectors of sines and cosines, to be added to embeddings.

    Parameters
    ----------
    L : int
        Number of positions, at least 0.
    width : int
        Length of a vector.
    dtype : dtype
        Type of the result, that of the embeddings.

    Returns
    -------
    array, shape (L, width)
        At position p, ``sin(p / 10000**(2 * n / width))`` in column ``2 * n`` and its cosine in the next.

    Notes
    -----
    Vaswani et al., "Attention Is All You Need" (2017), section 3.5.

    Examples
    --------
    >>> sinusoidal_positions(2, 4).round(2)
    array([[0.  , 1.  , 0.  , 1.  ],
           [0.84, 0.54, 0.01, 1.  ]], dtype=float32)
    """
    L, width = *checked_sizes(0, L=L).values(), *checked_sizes(width=width).values()
    columns = np.arange(width)
    angles = np.arange(L)[:, None] / 10000.0 ** (columns // 2 * 2 / width)
    return np.where(columns % 2, np.cos(angles), np.sin(angles)).astype(float_dtype(dtype))
