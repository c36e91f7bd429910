"""The cases of the golden vectors: names, arguments, and numbers from a generator that is the same everywhere."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
DTYPES = ("float32", "float64", "float16", "bfloat16")
EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@dataclass(frozen=True)
class Recipe:
    """One case, before its numbers are drawn.

    Attributes
    ----------
    name : str
        Seeds the numbers, too.
    about : str
    sizes : tuple of int
        B, Hq, Hkv, L, S, E, Ev.
    dtype : str
    numbers : str
        "normal", "needles", "huge", "low", "ties", "integers", "loud" or "tiny".
    options : dict
        mask (rules), query_offset, scale, softcap, dropout.
    extra : dict of str to tuple of int or array
        mask, bias, slopes, sink: shapes of arrays to draw, or the arrays.
    poison : str
        What holds NaN and infinity: "" or "hidden" (keys and values that the last rule hides), "key" or "value" (a visible one).
    """

    name: str
    about: str
    sizes: tuple[int, int, int, int, int, int, int] = (2, 4, 2, 3, 5, 4, 3)
    dtype: str = "float32"
    numbers: str = "normal"
    options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    poison: str = ""


def recipes() -> Iterator[Recipe]:
    """Yield all cases."""
    yield from _plain()
    yield from _numbers()
    yield from _masks()
    yield from _scores()
    yield from _edges()
    yield from _mixed()


def _plain() -> Iterator[Recipe]:
    for dtype in DTYPES:
        for sizes in ((1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 3, 5, 4, 3), (1, 2, 2, 5, 3, 7, 8), (1, 6, 3, 2, 4, 16, 2), (1, 8, 1, 1, 7, 8, 4)):
            yield Recipe(f"plain-{dtype}-{'x'.join(map(str, sizes))}", "no options", sizes, dtype)
    for S in EDGES:
        yield Recipe(f"edge-{S}", "a number of keys at the edge of a tile", (1, 1, 1, 1, S, 4, 2), numbers="needles")
    for L in (16, 17, 33):
        yield Recipe(f"rows-{L}", "a number of queries at the edge of a tile", (1, 1, 1, L, 3, 2, 2))


def _numbers() -> Iterator[Recipe]:
    about = {
        "needles": "each query is a multiple of one key",
        "huge": "scores of 1e5",
        "low": "an lse far below -88",
        "ties": "keys that are alike",
        "integers": "small whole numbers",
        "loud": "one key that drowns the others, last",
        "tiny": "values near the smallest of the type",
    }
    for numbers, why in about.items():
        for dtype in DTYPES:
            yield Recipe(f"{numbers}-{dtype}", why, (1, 2, 1, 3, 6, 4, 3), dtype, numbers)


def _masks() -> Iterator[Recipe]:
    square, wide, tall = (2, 4, 2, 4, 4, 4, 3), (2, 4, 2, 3, 6, 4, 3), (2, 4, 2, 6, 3, 4, 3)
    single: dict[str, list[Any]] = {
        "causal": ["Causal"], "window": ["Window", 1, 0], "window-both": ["Window", 1, 2], "window-open": ["Window", None, 1],
        "window-diagonal": ["Window", 0, 0], "prefix": ["Prefix", 2], "chunked": ["Chunked", 2],
    }  # fmt: skip
    for name, rule in single.items():
        yield Recipe(f"{name}-square", "as many queries as keys", square, options={"mask": [rule], "query_offset": "start"})
        for size, sizes in (("wide", wide), ("tall", tall)):
            for offset in ("start", "end"):
                yield Recipe(f"{name}-{size}-{offset}", "aligned on purpose", sizes, options={"mask": [rule], "query_offset": offset})
    for offset in (2, -2, [3, 0], [-1, 5]):
        text = "-".join(map(str, np.ravel(offset)))
        yield Recipe(f"causal-offset-{text}", "queries that stand somewhere", wide, options={"mask": [["Causal"]], "query_offset": offset})
    others: dict[str, list[Any]] = {
        "key-lengths": [["KeyLengths", [4, 0]]], "key-starts": [["KeyStarts", [2, 6]]], "query-lengths": [["QueryLengths", [1, 3]]],
        "first-tokens": [["FirstTokens", 2]], "segments": [["Segments", [0, 1, 1], [1, 0, 0, 2, 1, 1]]],
        "tree": [["Tree", [-1, 0, 0]]], "packed": [["Packed", [1, 2], [2, 3]]],
    }  # fmt: skip
    for name, rules in others.items():
        yield Recipe(name, "one rule", wide, options={"mask": rules})
    joined: dict[str, tuple[list[Any], Any]] = {
        "decode": ([["Causal"], ["KeyLengths", [4, 6]]], "end"),
        "decode-window": ([["Window", 2, 0], ["KeyLengths", [5, 3]]], "end"),
        "valid-both": ([["Causal"], ["KeyLengths", [4, 6]], ["QueryLengths", [2, 3]]], "end"),
        "left-padded": ([["Causal"], ["KeyStarts", [1, 3]]], "end"),
        "packed-causal-start": ([["Packed", [1, 2], [2, 3]], ["Causal"]], "start"),
        "packed-causal-end": ([["Packed", [1, 2], [2, 3]], ["Causal"]], "end"),
        "packed-window-end": ([["Packed", [2, 1], [4, 2]], ["Window", 1, 0]], "end"),
        "chunked-lengths": ([["Chunked", 2], ["KeyLengths", [5, 6]]], "end"),
    }  # fmt: skip
    for name, (rules, offset) in joined.items():
        for dtype in ("float32", "bfloat16"):
            yield Recipe(f"{name}-{dtype}", "rules joined by and", wide, dtype, options={"mask": rules, "query_offset": offset})
    for shape in ((6,), (3, 6), (3, 1), (2, 1, 1, 6), (4, 1, 6), (2, 4, 3, 6)):
        yield Recipe(f"mask-{'x'.join(map(str, shape))}", "a boolean array that broadcasts", wide, extra={"mask": shape})
    yield Recipe("mask-none", "no row sees a key", wide, extra={"mask": np.zeros((1, 1), bool)})
    for name, rules in (("key-lengths", [["KeyLengths", [4, 0]]]), ("key-starts", [["KeyStarts", [2, 6]]])):
        for dtype in DTYPES:
            yield Recipe(f"poison-{name}-{dtype}", "NaN and infinity where no row looks", wide, dtype,
                         options={"mask": rules}, poison="hidden")  # fmt: skip
    for what in ("key", "value"):
        yield Recipe(f"visible-nan-{what}", "NaN in one key, which some rows see", square,
                     options={"mask": [["Causal"]], "query_offset": "start"}, poison=what)  # fmt: skip


def _scores() -> Iterator[Recipe]:
    for scale in (0.0, -0.5, 1.0, 8.0, 1e-8):
        yield Recipe(f"scale-{scale:g}", "an explicit scale", options={"scale": scale})
    for softcap in (0.5, 30.0):
        yield Recipe(f"softcap-{softcap:g}", "a soft cap", options={"softcap": softcap, "scale": 2.0})
        yield Recipe(f"softcap-{softcap:g}-masked", "the mask comes after the cap", options={"softcap": softcap, "mask": [["KeyLengths", [2, 0]]]})
        yield Recipe(f"softcap-{softcap:g}-bias", "the bias comes after the cap", options={"softcap": softcap}, extra={"bias": (3, 5)})
    for shape in ((5,), (3, 1), (4, 1, 5), (2, 1, 3, 5), (2, 4, 3, 5)):
        yield Recipe(f"bias-{'x'.join(map(str, shape))}", "a bias that broadcasts", extra={"bias": shape})
    holes = np.array([[0, -np.inf, 1, 2, -np.inf], [-np.inf] * 5, [0.5, 0, -1, -np.inf, 3]])
    for dtype in DTYPES:
        yield Recipe(f"bias-holes-{dtype}", "-inf in a bias drops the key", dtype=dtype, extra={"bias": holes})
    lowest = np.where(np.isfinite(holes), holes, np.finfo(np.float32).min)[[0, 0, 2]]
    yield Recipe("bias-lowest", "keys with the most negative number weigh nothing beside others", extra={"bias": lowest})
    for offset in ("start", "end", [2, -1]):
        text = offset if isinstance(offset, str) else "batch"
        yield Recipe(f"alibi-{text}", "linear biases", options={"query_offset": offset}, extra={"slopes": (4,)})
    for dtype in DTYPES:
        yield Recipe(f"sink-{dtype}", "a sink a head", dtype=dtype, extra={"sink": (4,)})
    yield Recipe("sink-empty", "a row that sees nothing but the sink", options={"mask": [["KeyLengths", [3, 0]]]}, extra={"sink": (4,)})
    yield Recipe("sink-large", "a sink that drowns the keys", extra={"sink": np.array([100.0, 0.0, -100.0, 1e4])})
    for p in (0.1, 0.5):
        yield Recipe(f"dropout-{p}", "dropped weights", (2, 4, 2, 3, 6, 4, 3), options={"dropout": {"p": p, "seed": 2**33 + 7}})


def _edges() -> Iterator[Recipe]:
    empty = {"no-batch": (0, 2, 1, 3, 5, 4, 3), "no-heads": (2, 0, 0, 3, 5, 4, 3), "no-queries": (2, 2, 1, 0, 5, 4, 3),
             "no-keys": (2, 2, 1, 3, 0, 4, 3), "no-width": (2, 2, 1, 3, 5, 0, 3), "no-value-width": (2, 2, 1, 3, 5, 4, 0)}  # fmt: skip
    for name, sizes in empty.items():
        yield Recipe(name, "an axis of length 0", sizes)
    yield Recipe("no-keys-sink", "no keys but a sink: lse = sink", (2, 2, 1, 3, 0, 4, 3), extra={"sink": (2,)})


def _mixed() -> Iterator[Recipe]:
    rules = ([["Causal"]], [["Window", 2, 1]], [["Causal"], ["KeyLengths", [3, 5]]], [["Prefix", [1, 3]]], [["KeyStarts", [1, 0]]])
    for n in range(24):
        options: dict[str, Any] = {"mask": rules[n % 5], "query_offset": ("start", "end", 1)[n % 3]}
        options |= {"scale": 0.7} if n % 2 else {}
        options |= {"softcap": 4.0} if n % 4 > 1 else {}
        options |= {"dropout": {"p": 0.25, "seed": n}} if n % 6 == 5 else {}
        extra: dict[str, Any] = {"bias": ((5,), (4, 1, 5), (2, 1, 3, 5))[n % 3]} if n % 3 else {}
        extra |= {"slopes": (4,)} if n % 7 == 3 else {}
        extra |= {"sink": (4,)} if n % 5 > 2 else {}
        yield Recipe(f"mixed-{n}", "several options", dtype=DTYPES[n % 4], options=options, extra=extra)


def drawn(recipe: Recipe) -> dict[str, Array]:
    """Return the arrays of a case, the same on every machine: sums and products of `random.Random`, rounded to the type."""
    B, Hq, Hkv, L, S, E, Ev = recipe.sizes
    rng, dtype = Random(recipe.name), _dtype(recipe.dtype)
    query, key, value = (_normal(rng, shape) for shape in ((B, Hq, L, E), (B, Hkv, S, E), (B, Hkv, S, Ev)))
    if recipe.numbers == "needles":
        target = [rng.choice([0, S - 1, rng.randrange(S)]) for _ in range(L)]
        query = 4 * np.repeat(key, Hq // Hkv, 1)[:, :, target]
    elif recipe.numbers == "huge":
        query, key = 316 * query, 316 * key
    elif recipe.numbers == "low":
        query, key = -16 * abs(query), 16 * abs(key)
    elif recipe.numbers == "ties":
        key = key[:, :, [j % 2 for j in range(S)]]
    elif recipe.numbers == "integers":
        query, key, value = (np.round(2 * array) for array in (query, key, value))
    elif recipe.numbers == "loud":
        key[:, :, -1] *= 32
    elif recipe.numbers == "tiny":
        value = value * 2.0 ** {"float16": -22, "float64": -1060}.get(recipe.dtype, -140)
    tensors = {"query": query.astype(dtype), "key": key.astype(dtype), "value": value.astype(dtype)}
    for name, given in recipe.extra.items():
        wide = {"mask": bool, "bias": np.float32, "slopes": np.float64, "sink": np.float64}[name]
        if isinstance(given, tuple):
            given = _normal(rng, given)
            given = given > -0.5 if name == "mask" else abs(given) / 4 if name == "slopes" else given
        tensors[name] = np.asarray(given).astype(wide)
    if recipe.poison:
        _spoil(tensors, recipe)
    if recipe.poison in ("", "hidden"):
        tensors["grad_output"] = _normal(rng, (B, Hq, L, Ev)).astype(dtype)
        tensors["grad_lse"] = _normal(rng, (B, Hq, L)).astype(np.float64 if recipe.dtype == "float64" else np.float32)
    return tensors


def _spoil(tensors: dict[str, Array], recipe: Recipe) -> None:
    """Write NaN and infinity into keys and values: all that are hidden, or one that is not."""
    if recipe.poison != "hidden":
        tensors[recipe.poison][0, :, 2] = np.nan
        return
    name, lengths = recipe.options["mask"][0]
    for b, n in enumerate(lengths):
        hidden = slice(n, None) if name == "KeyLengths" else slice(0, n)
        tensors["key"][b, :, hidden], tensors["value"][b, :, hidden] = np.nan, np.inf


def _normal(rng: Random, shape: tuple[int, ...]) -> Array:
    """Return numbers that are nearly normal: sums of twelve uniform ones, exact in float64."""
    count = int(np.prod(shape, dtype=int))
    return np.array([sum(rng.randrange(2**20) for _ in range(12)) / 2.0**20 - 6 for _ in range(count)]).reshape(shape)


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)
