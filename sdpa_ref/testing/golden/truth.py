"""Attention and its gradients in decimal arithmetic of 50 digits, a number at a time.

Python's `decimal` is specified to the last digit, exponential and logarithm included, so that every machine gets the
same result. It is slow, shares nothing with the rest of this project, and is rounded once, to float64.
"""

from collections.abc import Callable, Iterator, Sequence
from decimal import Context, Decimal, localcontext
from itertools import product
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Rules = Sequence[Sequence[Any]]  # [["Causal"], ["KeyLengths", [2, 5]]], joined by "and"
ZERO, ONE, INF = Decimal(0), Decimal(1), Decimal("Infinity")
_PLACED = ("Causal", "Window", "Prefix", "Chunked", "FirstTokens")  # what goes by the positions of keys
_CONTEXT = Context(prec=50, Emin=-(10**9), Emax=10**9, traps=[])


class Row(NamedTuple):
    """Every stage of one row, a number a key; `weights` after dropout, `shares` before it."""

    raw: list[Decimal]
    scaled: list[Decimal]
    capped: list[Decimal]
    biased: list[Decimal]
    keep: list[bool]
    shares: list[Decimal]
    weights: list[Decimal]
    lse: Decimal
    output: list[Decimal]


def attention(tensors: dict[str, Array], options: dict[str, Any]) -> dict[str, Array]:
    """Return every stage of attention, and its gradients where `grad_output` is given, in float64.

    Parameters
    ----------
    tensors : dict of array
        query (B, Hq, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev); optional mask, bias, slopes (Hq,), sink (Hq,),
        grad_output (B, Hq, L, Ev), grad_lse (B, Hq, L).
    options : dict
        Optional mask (rules), query_offset, key_positions (a list a batch entry), scale, softcap, dropout
        ``{"p": p, "seed": seed}``.
    """
    with localcontext(_CONTEXT):
        return _attention(tensors, options)


def _attention(tensors: dict[str, Array], options: dict[str, Any]) -> dict[str, Array]:
    (B, Hq, L, E), (S, Ev) = tensors["query"].shape, tensors["value"].shape[2:]
    group = Hq // max(1, tensors["key"].shape[1])
    exact = {name: _decimals(array) for name, array in tensors.items() if array.dtype != bool}
    scale = ONE / Decimal(E or 1).sqrt() if options.get("scale") is None else Decimal(options["scale"])
    bias = _over(exact, "bias", (B, Hq, L, S))
    mask = None if "mask" not in tensors else np.broadcast_to(tensors["mask"], (B, Hq, L, S))
    stages = {name: np.zeros((B, Hq, L, S)) for name in ("raw", "scaled", "capped", "biased", "weights")}
    stages |= {"keep": np.zeros((B, Hq, L, S), bool), "lse": np.zeros((B, Hq, L)), "output": np.zeros((B, Hq, L, Ev))}
    gradients: dict[str, Any] = {
        name: _zeros(tensors[name].shape) for name in ("query", "key", "value", "bias", "sink") if name in tensors
    }

    for b, h in product(range(B), range(Hq)):
        keys, values = exact["key"][b, h // group], exact["value"][b, h // group]
        places = options["key_positions"][b] if "key_positions" in options else range(S)
        sees, positions = visible(options.get("mask", ()), options.get("query_offset"), b, L, S, places)
        for i in range(L):
            extra = [_extra(exact, bias, abs(positions[i] - places[j]), (b, h, i, j)) for j in range(S)]
            keep = [sees(i, j) and (mask is None or bool(mask[b, h, i, j])) and extra[j] != -INF for j in range(S)]
            kept = [_kept(options.get("dropout"), b, h, i, j) for j in range(S)]
            sink = None if "sink" not in exact else exact["sink"][h]
            row = _row(exact["query"][b, h, i], keys, values, scale, options.get("softcap"), extra, keep, kept, sink)
            for name, stage in stages.items():
                stage[b, h, i] = getattr(row, name) if name == "keep" else _floats(getattr(row, name))
            if "grad_output" in exact:
                _differentiate(row, exact, gradients, (b, h, i), h // group, scale, options.get("softcap"), kept, sink)
    if "grad_output" in exact:
        stages |= {f"d_{name}": _floats(gradient) for name, gradient in gradients.items()}
    return stages


def _row(
    query: Any, keys: Any, values: Any, scale: Decimal, softcap: float | None, extra: list[Decimal], keep: list[bool],
    kept: list[Decimal], sink: Decimal | None,
) -> Row:  # fmt: skip
    """Return every stage of one row."""
    raw = [sum((q * k for q, k in zip(query, key, strict=True)), ZERO) for key in keys]
    scaled = [scale * s for s in raw]
    capped = scaled if softcap is None else [Decimal(softcap) * _tanh(s / Decimal(softcap)) for s in scaled]
    biased = [c + e if k else -INF for c, e, k in zip(capped, extra, keep, strict=True)]
    logits = [s for s, k in zip(biased, keep, strict=True) if k] + ([] if sink is None else [sink])
    Ev = values.shape[-1]
    if any(s.is_nan() or s == INF for s in logits):
        nan = Decimal("NaN")
        shares = [nan if k else ZERO for k in keep]
        return Row(raw, scaled, capped, biased, keep, shares, shares, nan, [nan] * Ev)
    m = max(logits, default=-INF)
    z = sum((_exp(s - m) for s in logits), ZERO) if m > -INF else ZERO
    lse = m + z.ln() if m > -INF else -INF
    shares = [_exp(s - m) / z if k and s > -INF else ZERO for s, k in zip(biased, keep, strict=True)]
    weights = [share * factor for share, factor in zip(shares, kept, strict=True)]
    empty = not any(k and s > -INF for s, k in zip(biased, keep, strict=True))
    seen = [(w, v) for w, v, k in zip(weights, values, keep, strict=True) if k and not empty]
    return Row(
        raw,
        scaled,
        capped,
        biased,
        keep,
        shares,
        weights,
        lse,
        [sum((w * v[e] for w, v in seen), ZERO) for e in range(Ev)],
    )


def _differentiate(
    row: Row, exact: dict[str, Any], gradients: dict[str, Any], at: tuple[int, int, int], g: int, scale: Decimal,
    softcap: float | None, kept: list[Decimal], sink: Decimal | None,
) -> None:  # fmt: skip
    """Add what one row contributes to the gradients."""
    b, h, _ = at
    if row.lse == -INF:
        return
    incoming, through_lse = exact["grad_output"][at], exact["grad_lse"][at] if "grad_lse" in exact else ZERO
    seen = [j for j, k in enumerate(row.keep) if k and row.biased[j] > -INF]
    d_weight = {j: kept[j] * _dot(incoming, exact["value"][b, g, j]) for j in seen}
    inner = sum((row.shares[j] * d_weight[j] for j in seen), ZERO)
    for j in seen:
        d = row.shares[j] * (d_weight[j] - inner + through_lse)
        if "bias" in gradients:
            place = (b, h, at[2], j)[4 - gradients["bias"].ndim :]
            gradients["bias"][
                tuple(p if n > 1 else 0 for p, n in zip(place, gradients["bias"].shape, strict=True))
            ] += d
        d = scale * d if softcap is None else scale * d * (ONE - (row.capped[j] / Decimal(softcap)) ** 2)
        gradients["query"][at] += d * exact["key"][b, g, j]
        gradients["key"][b, g, j] += d * exact["query"][at]
        gradients["value"][b, g, j] += row.weights[j] * incoming
    if sink is not None:
        gradients["sink"][h] += _exp(sink - row.lse) * (through_lse - inner)


def visible(
    rules: Rules, offset: Any, b: int, L: int, S: int, places: Sequence[int]
) -> tuple[Callable[[int, int], bool], list[int]]:
    """Return whether query i sees key j in batch entry b, as a function, and the position of each query.

    `places` are the positions of the keys.
    """
    lengths = {rule[0]: _entry(rule[1], b) for rule in rules if rule[0] in ("KeyLengths", "QueryLengths")}
    packed = next((rule for rule in rules if rule[0] == "Packed"), None)
    documents = (
        list(_documents(packed, L))
        if packed
        else [(0, 0, lengths.get("QueryLengths", L), lengths.get("KeyLengths", S))] * L
    )

    def moved(queries: int, keys: int) -> int:
        if isinstance(offset, str):
            if offset == "start":
                return 0
            return (keys if packed or not keys else places[keys - 1] + 1) - queries
        return _entry(offset or 0, b)

    p = [i - q + k + moved(queries, keys) for i, (q, k, queries, keys) in enumerate(documents)]
    first = [k for _, k, _, _ in documents]

    def sees(i: int, j: int) -> bool:
        at = [places[j] if rule[0] in _PLACED else j for rule in rules]
        document = p[i], first[i], documents[i][3]
        return all(_sees(rule[0], rule[1:], i, key, *document, b, L, S) for rule, key in zip(rules, at, strict=True))

    return sees, p


def _sees(
    name: str, given: Sequence[Any], i: int, j: int, p: int, first: int, keys: int, b: int, L: int, S: int
) -> bool:
    """Return whether one rule lets query i, at position p, see key j."""
    if name == "Causal":
        return j <= p
    if name == "Window":
        left, right = given
        return (left is None or j >= p - left) and (right is None or j <= p + right)
    if name == "Segments":
        return bool(given[0][i] == given[-1][j])
    if name == "Packed":
        return first <= j < first + keys
    if name == "Tree":
        node, past = i, S - L
        while node >= 0 and past + node != j:
            node = given[0][node]
        return j < past or node >= 0
    n = _entry(given[0], b)
    if name == "Chunked":
        return j <= p and (j - first) // n == (p - first) // n
    return {
        "KeyLengths": j < n,
        "KeyStarts": j >= n,
        "QueryLengths": i < n,
        "Prefix": j < first + n or j <= p,
        "FirstTokens": j < first + n,
    }[name]


def _documents(packed: Sequence[Any], L: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield of each row's document the first query, the first key, and the two lengths: 0 in the tail."""
    first_query = first_key = 0
    for queries, keys in zip(packed[1], packed[-1], strict=True):
        yield from [(first_query, first_key, queries, keys)] * queries
        first_query, first_key = first_query + queries, first_key + keys
    yield from [(first_query, first_key, 0, 0)] * (L - first_query)


def _entry(n: Any, b: int) -> int:
    return int(n[b] if isinstance(n, list) else n)


def _extra(exact: dict[str, Any], bias: Any, distance: int, at: tuple[int, int, int, int]) -> Decimal:
    """Return what is added to a score: bias and ALiBi."""
    extra: Decimal = ZERO if bias is None else bias[at]
    return extra - exact["slopes"][at[1]] * distance if "slopes" in exact else extra


def _kept(dropout: dict[str, Any] | None, b: int, h: int, i: int, j: int) -> Decimal:
    """Return the factor of a weight after dropout, whose bits are those of Philox 4x32-10."""
    if dropout is None:
        return ONE
    c0, c1, c2, c3 = j // 4, i, h, b
    k0, k1 = dropout["seed"] % 2**32, dropout["seed"] >> 32
    for _ in range(10):
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * c0, 2**32), divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    p = Decimal(dropout["p"])
    return ONE / (ONE - p) if (c0, c1, c2, c3)[j % 4] >= int(p * 2**32) else ZERO


def _exp(x: Decimal) -> Decimal:
    return ZERO if x == -INF else x.exp()


def _tanh(x: Decimal) -> Decimal:
    """Return the hyperbolic tangent, in a form that loses no digit near 0 that matters and never overflows."""
    if x.is_nan() or abs(x) > 100:
        return x if x.is_nan() else ONE.copy_sign(x)
    e = (2 * x).exp()
    return (e - 1) / (e + 1)


def _dot(a: Any, b: Any) -> Decimal:
    return sum((x * y for x, y in zip(a, b, strict=True)), ZERO)


def _decimals(array: Array) -> Any:
    """Return the numbers of an array, exactly, as an array of Decimal."""
    exact = np.empty(array.shape, object)
    exact[...] = np.array([Decimal(float(x)) for x in array.ravel()], object).reshape(array.shape)
    return exact


def _over(exact: dict[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    return np.broadcast_to(exact[name], shape) if name in exact else None


def _zeros(shape: tuple[int, ...]) -> Any:
    zeros = np.empty(shape, object)
    zeros[...] = ZERO
    return zeros


def _floats(numbers: Any) -> Any:
    """Return decimals rounded to float64."""
    array = np.asarray(numbers, object)
    return np.array([float(x) for x in array.ravel()], np.float64).reshape(array.shape)
