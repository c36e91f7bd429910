"""Problems that are hard on purpose, made from a few words and a seed, so that each can be replayed and shrunk."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing.case_options import LOUD, Array, biased, masked, offset_of
from sdpa_ref.testing.strides import REPEATED, stored

NUMBERS = ("normal", "needles", "huge", "ties", "integers", "low", "one key", "tiny")


@dataclass(frozen=True)
class Case:
    """Arguments for `sdpa`.

    Attributes
    ----------
    query, key, value : array
    options : dict
        The keywords.
    recipe : str
        The call that makes this case again.
    """

    query: Array
    key: Array
    value: Array
    options: dict[str, Any]
    recipe: str

    def __repr__(self) -> str:
        return self.recipe

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Query, key and value."""
        return self.query, self.key, self.value


def case(
    seed: int,
    *,
    batch: tuple[int, ...] | None = (),
    heads: tuple[int, int] = (1, 1),
    L: int = 1,
    S: int = 1,
    E: int = 1,
    Ev: int = 1,
    dtype: str = "float32",
    numbers: str = "normal",
    memory: str = "plain",
    mask: tuple[str, ...] = (),
    bias: tuple[str, ...] = (),
    offset: str = "start",
    scale: float | None = None,
    softcap: float | None = None,
    sink: str | None = None,
    dropout: float = 0.0,
    score_mod: bool = False,
    layout: str = "HLE",
    poison: bool = False,
) -> Case:
    """Return the case that these words describe.

    Parameters
    ----------
    seed : int
        For everything that is drawn: the numbers, the entries of masks, which axes broadcast.
    batch : tuple of int, or None
        Leading axes; None for arrays without a head axis, whatever `heads` says.
    heads : tuple of int
        Hq and Hkv.
    L, S, E, Ev : int
    dtype : str
        One of float16, bfloat16, float32, float64.
    numbers : str
        One of `NUMBERS`: "needles" makes each query a scaled copy of one key (the first, the last, one at the edge of a
        tile, or any), "huge" makes scores of 1e5, "ties" draws keys from two vectors, "integers" has small integers,
        "low" an lse far below -88, "one key" hides the others behind it, and "tiny" has values that 16 bits hold badly.
    memory : str
        One of `strides.MEMORIES`: how the arrays lie there, masks and biases too.
    mask : tuple of str
        Of `case_options.MASKS`, each after the first preceded by "&" or "|", any by "~", as in
        ``("causal", "|~window")``.
    bias : tuple of str
        Of `case_options.BIASES`, and `LOUD`.
    offset : str
        "start", "end", "number", "batch" or "far" (a number before the first key, beyond the last, or beyond 16 or 32
        bits); used where the mask or ALiBi needs positions.
    scale, softcap : float, optional
    sink : str, optional
        "number", "heads", or `LOUD`.
    dropout : float
        Probability.
    score_mod : bool
        Whether scores pass through a function.
    layout : str
    poison : bool
        Whether keys and values that no query sees, and queries that see nothing, hold NaN and infinity.

    Examples
    --------
    >>> small = case(1, L=2, S=3, E=4, Ev=5, mask=("causal",), offset="end")
    >>> small.query.shape, small.options["mask"], small.options["query_offset"]
    ((1, 2, 4), Causal(), 'end')
    >>> small
    case(1, L=2, S=3, E=4, Ev=5, mask=('causal',), offset='end')
    """
    recipe = _recipe(seed, {k: v for k, v in locals().items() if k != "seed"})
    rng = np.random.default_rng(seed)
    lead, heads = batch or (), (1, 1) if batch is None else heads
    numbers_drawn = _numbers(rng, numbers, lead, heads, L, S, E, Ev)
    whole = rng.integers(2)  # query or key has all leading axes, so that those of the weights are known
    arrays = [array if n == whole else _broadcast_some(rng, array, lead) for n, array in enumerate(numbers_drawn)]
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    if mask:
        options["mask"] = masked(rng, mask, lead, heads[0], L, S)
    if bias:
        parts = [biased(rng, word, lead, heads[0], L, S) for word in bias]
        options["bias"] = parts[0] if len(parts) == 1 else tuple(parts)
    if options.get("mask") is not None or any(word.startswith("alibi") for word in bias):
        options["query_offset"] = offset_of(rng, offset, mask, lead, L, S)
    if sink:
        options["sink"] = rng.normal(0, 300 if sink == LOUD else 3, () if sink == "number" else heads[0])
    if dropout:
        options["dropout"] = sr.Dropout(dropout, seed=int(rng.integers(2**40)))
    if score_mod:
        options["score_mod"] = bent
    options = {name: option for name, option in options.items() if option is not None}
    with np.errstate(all="ignore"):
        arrays = [array.astype(_dtype(dtype)) for array in arrays]
    if poison:
        arrays = poisoned(rng, arrays[0], arrays[1], arrays[2], options)
        memory = "plain" if memory in REPEATED else memory  # which would show it
    if batch is None:
        arrays = [array[0] for array in arrays]
    elif layout == "LHE":
        arrays, options["layout"] = [array.swapaxes(-2, -3) for array in arrays], layout
    query, key, value = (stored(array, memory) for array in arrays)
    options = {name: _stored(option, memory) for name, option in options.items()}
    return Case(query, key, value, options, recipe)


def poisoned(rng: np.random.Generator, query: Array, key: Array, value: Array, options: dict[str, Any]) -> list[Array]:
    """Return the arrays, canonical, with NaN and infinity in all that no result depends on."""
    keep = sr.sdpa_stages(query, key, value, **options).keep
    Hkv, (Hq, L, S) = key.shape[-3], keep.shape[-3:]
    group = keep.reshape(*keep.shape[:-3], Hkv, L * (Hq // Hkv if Hkv else 1), S)
    unseen, idle = np.asarray(~group.any(-2)), np.asarray(~keep.any(-1))
    return [_spoilt(rng, array, where) for array, where in ((query, idle), (key, unseen), (value, unseen))]


def _spoilt(rng: np.random.Generator, array: Array, where: Array) -> Array:
    """Return the array with NaN and infinity in the rows where all of `where`, over broadcast axes, agrees."""
    lead = array.shape[:-1]
    where = np.broadcast_to(where, np.broadcast_shapes(where.shape, lead))
    where = np.asarray(where.all(tuple(range(where.ndim - len(lead)))))
    axes = tuple(axis for axis, size in enumerate(lead) if size == 1 and where.shape[axis] != 1)
    spoil = np.broadcast_to(where.all(axes, keepdims=True), lead)
    bad = rng.choice([np.nan, np.inf, -np.inf], array.shape).astype(array.dtype)
    return np.where(spoil[..., None], bad, array)


def bent(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Return a score that depends on everything a `score_mod` is given."""
    return s / (1 + abs(s) / 64) + (h - b) % 2 * ((i - j) % 3 - 1) / 4


def _bent_slope(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 1 / (1 + abs(s) / 64) ** 2


bent.derivative = _bent_slope  # type: ignore[attr-defined]


def edge(rng: np.random.Generator, n: int, shape: Any) -> Array:
    """Return indices below n, among which the first, the last and those at the edges of tiles are common."""
    likely = [0, n - 1, *(j for at in (16, 32, 64, 128, 256, 512, 1024, 2048) for j in (at - 1, at) if j < n)]
    if n > 1 << 15:
        likely = [n - 1, n - 1, *(j for j in (32_767, 32_768, 65_535, 65_536) if j < n)]
    indices: Array = np.where(rng.random(shape) < 0.5, rng.choice(likely, shape), rng.integers(n, size=shape))
    return indices


def _stored(option: Any, memory: str) -> Any:
    """Return the mask or the bias in this memory; other options as they are."""
    if isinstance(option, tuple):
        return tuple(_stored(part, memory) for part in option)
    return stored(option, memory) if isinstance(option, np.ndarray) and option.ndim > 1 else option


def _numbers(
    rng: np.random.Generator, how: str, lead: tuple[int, ...], heads: tuple[int, int], L: int, S: int, E: int, Ev: int
) -> list[Array]:
    """Return query, key and value in float64."""
    Hq, Hkv = heads
    q, k, v = (rng.standard_normal((*lead, *shape)) for shape in ((Hq, L, E), (Hkv, S, E), (Hkv, S, Ev)))
    if how == "needles" and S and E and Hq:
        target = edge(rng, S, (*lead, Hq, L))
        own = np.take_along_axis(np.repeat(k, Hq // Hkv, -3), target[..., None], -2)
        q = own * 16 * np.sqrt(E) / np.maximum((own**2).sum(-1, keepdims=True), 1e-3)
    elif how == "huge":
        q, k = 316 * q, 316 * k
    elif how == "ties" and S:
        k = np.take_along_axis(k, rng.integers(min(S, 2), size=(*lead, Hkv, S, 1)), -2)
    elif how == "integers":
        q, k, v = (np.round(2 * array) for array in (q, k, v))
    elif how == "low":
        q, k = -300 * abs(q), 300 * abs(k)
    elif how == "one key" and S:
        k[..., int(edge(rng, S, ())), :] *= 32
    elif how == "tiny":
        v = v * 1e-7
    return [q, k, v]


def _broadcast_some(rng: np.random.Generator, array: Array, lead: tuple[int, ...]) -> Array:
    """Return the array with some leading axes cut down to one entry, or left out."""
    for axis in range(len(lead)):
        if rng.random() < 0.2 and lead[axis]:
            array = array.take([0], axis)
    while array.ndim > 3 and array.shape[0] == 1 and lead[0] != 1 and rng.random() < 0.5:
        array = array[0]
        lead = lead[1:]
    return array


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    return np.dtype(name)


def _recipe(seed: int, words: dict[str, Any]) -> str:
    defaults = case.__kwdefaults__ or {}
    return f"case({', '.join([str(seed), *(f'{k}={v!r}' for k, v in words.items() if v != defaults[k])])})"
