"""Attention one scalar at a time, written from the specification: it shares nothing with the code."""

import math

import numpy as np

SIZES = {"B": 2, "Hq": 6, "Hkv": 3, "L": 5, "S": 7, "E": 4, "Ev": 8}  # no two alike: a swapped axis cannot hide


def qkv(dtype=np.float64, seed=0, **sizes):
    """Return query (B, Hq, L, E), key (B, Hkv, S, E) and value (B, Hkv, S, Ev) of standard normal numbers."""
    B, Hq, Hkv, L, S, E, Ev = {**SIZES, **sizes}.values()
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in ((B, Hq, L, E), (B, Hkv, S, E), (B, Hkv, S, Ev))]


def attention(
    query, key, value, *, keep=None, bias=None, scale=None, softcap=None, sink=None, score_mod=None, dropout=None
):
    """Return output, lse and weights in float64; `keep` and `bias` are (B, Hq, L, S), `dropout` is (p, seed)."""
    (B, Hq, L, E), (Hkv, S, Ev) = query.shape, value.shape[1:]
    output, lse, weights = np.zeros((B, Hq, L, Ev)), np.full((B, Hq, L), -np.inf), np.zeros((B, Hq, L, S))
    scale = 1 / math.sqrt(E) if scale is None else scale
    for b, h, i in np.ndindex(B, Hq, L):
        k, v = key[b, h // (Hq // Hkv)], value[b, h // (Hq // Hkv)]
        scores = {}
        for j in range(S):
            added = 0.0 if bias is None else float(bias[b, h, i, j])
            if (keep is not None and not keep[b, h, i, j]) or added == -math.inf:
                continue
            s = scale * math.fsum(float(query[b, h, i, e]) * float(k[j, e]) for e in range(E))
            s = s if softcap is None else softcap * math.tanh(s / softcap)
            s = s + added
            scores[j] = s if score_mod is None else float(score_mod(s, b, h, i, j))
        m = max([*scores.values(), -math.inf if sink is None else float(sink[h])])
        if m == -math.inf:
            continue
        z = math.fsum([*(math.exp(s - m) for s in scores.values()), 0.0 if sink is None else math.exp(sink[h] - m)])
        lse[b, h, i] = m + math.log(z)
        for j, s in scores.items():
            factor = 1.0
            if dropout is not None:
                p, seed = dropout
                word = philox((j // 4, i, h, b), (seed % 2**32, seed // 2**32))[j % 4]
                factor = 1 / (1 - p) if word >= math.floor(p * 2**32) else 0.0
            weights[b, h, i, j] = math.exp(s - m) / z * factor
        for e in range(Ev):
            output[b, h, i, e] = math.fsum(weights[b, h, i, j] * float(v[j, e]) for j in scores)
    return output, lse, weights


def philox(counter, key):
    """Return the four words of Philox 4x32-10, in Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def visible(rule, B, Hq, L, S):
    """Return the boolean array (B, Hq, L, S) of the rule ``rule(b, h, i, j)``, asked pair by pair."""
    keep = np.zeros((B, Hq, L, S), bool)
    for index in np.ndindex(keep.shape):
        keep[index] = rule(*index)
    return keep


def agree(actual, expected, *, error=None):
    """Assert equal shapes, equal NaN and infinities, and numbers as close as the type of `actual` lets one ask for.

    That is the empirical budget of `sdpa_ref.testing`, 4 * (7 + 1) eps, for a straight formula that errs by 7 eps.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    exact, wide = expected.astype(np.float64), actual.astype(np.float64)
    odd = ~np.isfinite(exact)
    np.testing.assert_array_equal(wide[odd], exact[odd])
    largest = max(1.0, abs(exact[~odd]).max(initial=0.0))
    unit = 2.0**-7 if actual.dtype.name == "bfloat16" else float(np.finfo(actual.dtype).eps)
    np.testing.assert_allclose(wide[~odd], exact[~odd], rtol=0, atol=(32 * unit if error is None else error) * largest)
