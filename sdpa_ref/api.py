"""The public functions: normalise and check, choose a backend, call it, return the caller's layout."""

from collections.abc import Callable
from typing import Any, Never, Unpack

import numpy as np

from sdpa_ref import registry
from sdpa_ref._problem import NO_VALUE, differentiable, pose
from sdpa_ref.arrays import Array
from sdpa_ref.backend import OUTPUT, Gradients, ScoreMod
from sdpa_ref.dropout import Dropout
from sdpa_ref.floating_point import ieee
from sdpa_ref.options import GradientOptions, Options, StateOptions, spelled_out
from sdpa_ref.reference import Stages
from sdpa_ref.spelling import parted, unknown_keyword
from sdpa_ref.state import AttentionState

_STATE = frozenset({"output", "lse", "m", "z"})
_WEIGHTS = frozenset({"weights"})


def sdpa(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
    query_offset: Any = None,
    key_positions: Any = None,
    score_mod: ScoreMod | None = None,
    dropout: Dropout | None = None,
    layout: str = "HLE",
    backend: str | None = None,
    out: Any = None,
    **unknown: Never,
) -> Array:
    """Return scaled dot-product attention: ``softmax(scale * query @ key.T + bias) @ value`` over the kept keys.

    Heads come before lengths: ``(..., H, L, E)``; for ``(..., L, H, E)`` say ``layout="LHE"``.

    Parameters
    ----------
    query : array, shape (..., Hq, L, E)
        float16, bfloat16, float32 or float64. Two axes mean one head without a head axis.
    key : array, Paged or Quantized, shape (..., Hkv, S, E)
        ``Hq`` is a multiple of ``Hkv``: query head h reads key head ``h // (Hq // Hkv)``.
    value : array, Paged or Quantized, shape (..., Hkv, S, Ev)
        Leading axes broadcast. Strides are free, and nothing is written to. Dask arrays give lazy results; keys and
        values in a store, such as zarr arrays, are read a piece at a time (`reading`).
    mask : Mask or bool array, optional
        What a query may attend to (True): an object such as ``Causal() & KeyLengths(n)``, or an array that broadcasts
        to ``(..., Hq, L, S)``. A row that sees no key gives 0.
    bias : float array, ALiBi, or tuple of such, optional
        Added to the scaled scores, broadcasting to ``(..., Hq, L, S)``; -inf drops the key.
    scale : float, optional
        Any finite number; ``1 / sqrt(E)`` by default.
    softcap : float, optional
        Above 0: scores become ``softcap * tanh(score / softcap)``, before the bias.
    sink : float or array, shape (Hq,), optional
        One logit a head that only adds to the denominator; 0 is "softmax plus one".
    query_offset : int, int array over the batch, "start" or "end", optional
        Position of the first query among the keys. Needed when L and S differ and the mask or ALiBi depends on
        positions: "start" puts the first query on the first key, "end" the last (valid) query on the last (valid) key.
    key_positions : int array, shape ``(S,)`` or ``(*batch, S)``, optional
        Positions of the keys, at least 0 and strictly increasing over the valid ones, where they are not 0, 1, 2 and so
        on: in a cache that has dropped keys. `Causal`, `Window`, `Prefix`, `Chunked`, `FirstTokens` and `ALiBi` go by
        them; all else counts keys as they lie. What depends on positions then needs `query_offset`.
    score_mod : callable, optional
        ``f(s, b, h, i, j)``, applied elementwise to scores and indices, written with NumPy functions. The Numba backend
        builds a function that is decorated with ``numba.njit`` into its kernel.
    dropout : Dropout, optional
        Drops weights, reproducibly.
    layout : {"HLE", "LHE"}
        Order of heads and lengths in query, key, value and output; mask and bias are always ``(..., Hq, L, S)``.
    backend : str, optional
        One of `names`. By default the one for the kind of array: CuPy arrays cupy; NumPy arrays numba where it is
        installed, else reference. Of Dask arrays and stores it computes the blocks. A named backend is never replaced
        by another.
    out : array, optional
        Receives the output; of its shape and type, and sharing no memory with an input. When the call raises, also
        because it was interrupted, part of it may be written.

    Returns
    -------
    array, shape (..., Hq, L, Ev)
        In the common type of query, key and value, as `numpy.result_type` gives it.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument, before any work; the message says what would be right.
    BackendUnavailable
        For a named backend that cannot run here.
    NotImplementedError
        For a named backend that cannot solve this problem.

    Notes
    -----
    Vaswani et al., "Attention Is All You Need" (2017). A position that is masked has no influence, bit for bit,
    whatever K and V hold there. The rules are in the documentation under "Semantics".

    Examples
    --------
    >>> import numpy as np
    >>> query = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> value = np.array([[1.0], [2.0]])
    >>> sdpa(query, query, value).round(3)
    array([[1.33],
           [1.67]])
    >>> from sdpa_ref import Causal
    >>> sdpa(query, query, value, mask=Causal()).round(3)
    array([[1.  ],
           [1.67]])
    """
    if unknown:
        raise unknown_keyword(unknown)
    problem, caller = pose(
        query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink, query_offset=query_offset,
        key_positions=key_positions, score_mod=score_mod, dropout=dropout, layout=layout, out=out, output=True,
    )  # fmt: skip
    return caller.output(registry.choose(problem, backend).forward(problem, OUTPUT).output)


scaled_dot_product_attention = sdpa


@spelled_out(StateOptions)
def sdpa_state(
    query: Any,
    key: Any,
    value: Any,
    **options: Unpack[StateOptions],
) -> AttentionState:
    """Return attention together with its log-sum-exp, as a state that can be merged with attention over other keys.

    Parameters
    ----------
    query, key, value, mask, bias, scale, softcap, query_offset, key_positions, score_mod, dropout, layout, backend, out
        As in `sdpa`. There is no `sink`: merge the states, then add it once with `AttentionState.with_sink`. Under
        `Causal`, `Window` and others that depend on the position, the `query_offset` of a piece of the keys is that of
        the whole, as a number, minus the index of the first key of the piece. "end" would align each piece with its own
        last key.

    Returns
    -------
    AttentionState
        Its lse is float32, or float64 for float64 inputs.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros((1, 2, 4))  # equal scores: lse is the logarithm of the number of keys
    >>> np.exp(sdpa_state(x, x, x).lse)
    array([[2., 2.]])
    """
    backend, rest = parted(options, StateOptions)
    problem, caller = pose(query, key, value, **rest, output=True)
    result = registry.choose(problem, backend).forward(problem, _STATE)
    m, z = (None if number is None else caller.lse(number) for number in (result.m, result.z))
    return AttentionState(caller.output(result.output), caller.lse(result.lse), caller.layout)._with(m, z)


@spelled_out(Options)
def sdpa_weights(
    query: Any,
    key: Any,
    **options: Unpack[Options],
) -> Array:
    """Return the attention weights: after softmax, and after dropout where it is given.

    Parameters
    ----------
    query, key, mask, bias, scale, softcap, sink, query_offset, key_positions, score_mod, dropout, layout, backend, out
        As in `sdpa`.

    Returns
    -------
    array, shape (..., Hq, L, S) in both layouts
        In the common type of query and key. It takes memory for every pair of query and key, which `sdpa` does not.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros((3, 2))
    >>> sdpa_weights(x, x, mask=np.tri(3, dtype=bool)).round(2)
    array([[1.  , 0.  , 0.  ],
           [0.5 , 0.5 , 0.  ],
           [0.33, 0.33, 0.33]])
    """
    backend, rest = parted(options, Options)
    problem, caller = pose(query, key, NO_VALUE, **rest)
    return caller.weights(registry.choose(problem, backend).forward(problem, _WEIGHTS).weights)


@spelled_out(GradientOptions, backend="reference")
def sdpa_stages(
    query: Any,
    key: Any,
    value: Any,
    **options: Unpack[GradientOptions],
) -> Stages:
    """Return every stage of attention in float64: scores raw, scaled, capped and biased, keep, lse, weights, output.

    Parameters
    ----------
    query, key, value, mask, bias, scale, softcap, sink, query_offset, key_positions, score_mod, dropout, layout
        As in `sdpa`.
    backend : str
        Only the reference has stages.

    Returns
    -------
    Stages
        Scores and weights ``(..., Hq, L, S)``; `biased` is -inf where a key is dropped.

    Examples
    --------
    >>> import numpy as np
    >>> stages = sdpa_stages(np.array([[2.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.0], [1.0]]))
    >>> stages.raw, stages.scaled.round(2), stages.weights.round(2), stages.output.round(2)
    (array([[2., 0.]]), array([[1.41, 0.  ]]), array([[0.8, 0.2]]), array([[0.2]]))
    """
    backend, rest = parted(options, GradientOptions, "reference")
    problem, caller = pose(query, key, value, **rest)
    stages: Stages = registry.choose(problem, backend, "stages").stages(problem)
    scores = {name: caller.weights(stage) for name, stage in stages._asdict().items() if name not in ("lse", "output")}
    return Stages(**scores, lse=caller.lse(stages.lse), output=caller.turned(stages.output))


@spelled_out(GradientOptions)
def sdpa_vjp(
    query: Any,
    key: Any,
    value: Any,
    grad_output: Any,
    *,
    grad_lse: Any = None,
    **options: Unpack[GradientOptions],
) -> Gradients:
    """Return the gradients of attention: the vector-Jacobian product with `grad_output`.

    Parameters
    ----------
    query, key, value, mask, bias, scale, softcap, sink, query_offset, key_positions, score_mod, dropout, layout
        As in `sdpa`. A `score_mod` must have its derivative by s as an attribute:
        ``score_mod.derivative(s, b, h, i, j)``.
    backend : str, optional
        One that has gradients.
    grad_output : array, shape of the output
        Gradient by the output; any of the float types.
    grad_lse : array, shape of the lse, optional
        Gradient by the lse of `sdpa_state` (with a sink: by the lse that includes it).

    Returns
    -------
    Gradients
        By query, key, value, bias and sink, in the types and shapes of what was passed: broadcast axes and grouped
        heads are summed. None for what was not given and for ALiBi; a tuple for a tuple of biases. An empty row has
        zero gradients.

    Examples
    --------
    >>> import numpy as np
    >>> query, key, value = np.zeros((1, 2)), np.eye(2), np.array([[0.0], [1.0]])
    >>> gradients = sdpa_vjp(query, key, value, np.ones((1, 1)))
    >>> gradients.value.tolist(), gradients.bias
    ([[0.5], [0.5]], None)
    """
    backend, rest = parted(options, GradientOptions)
    problem, caller = pose(query, key, value, **rest)
    incoming = caller.incoming(differentiable(problem), grad_output, grad_lse)
    gradients = registry.choose(problem, backend, "vjp").vjp(problem, *incoming)
    return caller.gradients(gradients, query, key, value, rest.get("bias"), rest.get("sink"))


@spelled_out(GradientOptions)
def sdpa_with_vjp(
    query: Any,
    key: Any,
    value: Any,
    **options: Unpack[GradientOptions],
) -> tuple[Array, Callable[..., Gradients]]:
    """Return attention, and a function that returns its gradients and uses what the forward pass has kept.

    Parameters
    ----------
    query, key, value, mask, bias, scale, softcap, sink, query_offset, key_positions, score_mod, dropout, layout
        As in `sdpa_vjp`.
    backend : str, optional
        One that has gradients.

    Returns
    -------
    output : array, shape (..., Hq, L, Ev)
        As `sdpa` returns it.
    vjp : callable
        ``vjp(grad_output, grad_lse=None)`` returns the `Gradients`, as `sdpa_vjp` does, and may be called several
        times. It holds the inputs and the output without copying them: do not write to them before its last call.

    Examples
    --------
    >>> import numpy as np
    >>> query, key, value = np.zeros((1, 2)), np.eye(2), np.array([[0.0], [1.0]])
    >>> output, vjp = sdpa_with_vjp(query, key, value)
    >>> output, vjp(2 * output).value.tolist()  # of the square of the output
    (array([[0.5]]), [[0.5], [0.5]])
    """
    backend, rest = parted(options, GradientOptions)
    problem, caller = pose(query, key, value, **rest)
    solver = registry.choose(differentiable(problem), backend, "vjp")
    half = problem.dtype.itemsize == 2
    result = solver.forward(problem, _STATE | {"wide"} if half and "wide" in solver.TASKS else _STATE)
    output = result.output if result.output.dtype == problem.dtype else _rounded(result.output, problem.dtype)

    def vjp(grad_output: Any, grad_lse: Any = None) -> Gradients:
        incoming = caller.incoming(problem, grad_output, grad_lse)
        gradients = solver.vjp(problem, *incoming, result)
        return caller.gradients(gradients, query, key, value, rest.get("bias"), rest.get("sink"))

    return caller.output(output), vjp


@ieee
def _rounded(output: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        rounded: Array = output.astype(dtype)
    return rounded
