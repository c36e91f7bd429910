"""The cases of the golden vectors: what they are called, and their arguments."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
DTYPES = ("float32", "float64", "float16", "bfloat16")
EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
SIZES = (2, 4, 2, 3, 5, 4, 3)
SQUARE, WIDE, TALL = (2, 4, 2, 4, 4, 4, 3), (2, 4, 2, 3, 6, 4, 3), (2, 4, 2, 6, 3, 4, 3)
HOLES = np.array([[0, -np.inf, 1, 2, -np.inf], [-np.inf] * 5, [0.5, 0, -1, -np.inf, 3]])


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
    poison : str
        What holds NaN: "" or "hidden" (keys and values beyond the lengths), "key" or "value" (a visible one).
    arrays : dict of str to tuple of int or array
        mask, bias, slopes, sink: shapes of arrays to draw, or the arrays.
    options : dict
        mask (rules), query_offset, scale, softcap, dropout.
    """

    name: str
    about: str
    sizes: tuple[int, ...]
    dtype: str
    numbers: str
    poison: str
    arrays: dict[str, Any]
    options: dict[str, Any]


def recipes() -> Iterator[Recipe]:
    """Yield all cases."""
    yield from _plain()
    yield from _numbers()
    yield from _masks()
    yield from _arrays()
    yield from _scores()
    yield from _edges()
    yield from _mixed()


def _of(
    name: str,
    about: str,
    sizes: tuple[int, ...] = SIZES,
    dtype: str = "float32",
    numbers: str = "normal",
    poison: str = "",
    arrays: dict[str, Any] | None = None,
    **options: Any,
) -> Recipe:
    return Recipe(name, about, sizes, dtype, numbers, poison, arrays or {}, options)


def _plain() -> Iterator[Recipe]:
    shapes = (1, 1, 1, 1, 1, 1, 1), SIZES, (1, 2, 2, 5, 3, 7, 8), (1, 6, 3, 2, 4, 16, 2), (1, 8, 1, 1, 7, 8, 4)
    for dtype in DTYPES:
        for sizes in shapes:
            yield _of(f"plain-{dtype}-{'x'.join(map(str, sizes))}", "no options", sizes, dtype)
    for S in EDGES:
        yield _of(f"edge-{S}", "a number of keys at the edge of a tile", (1, 1, 1, 1, S, 4, 2), numbers="needles")
    for L in (16, 17, 33):
        yield _of(f"rows-{L}", "a number of queries at the edge of a tile", (1, 1, 1, L, 3, 2, 2))


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
            yield _of(f"{numbers}-{dtype}", why, (1, 2, 1, 3, 6, 4, 3), dtype, numbers)


def _masks() -> Iterator[Recipe]:
    positional: dict[str, list[Any]] = {
        "causal": ["Causal"],
        "window": ["Window", 1, 0],
        "window-both": ["Window", 1, 2],
        "window-open": ["Window", None, 1],
        "window-diagonal": ["Window", 0, 0],
        "prefix": ["Prefix", 2],
        "chunked": ["Chunked", 2],
    }
    for name, rule in positional.items():
        yield _of(f"{name}-square", "as many queries as keys", SQUARE, mask=[rule], query_offset="start")
        for size, sizes in (("wide", WIDE), ("tall", TALL)):
            for offset in ("start", "end"):
                yield _of(f"{name}-{size}-{offset}", "aligned on purpose", sizes, mask=[rule], query_offset=offset)
    for number in (2, -2, [3, 0], [-1, 5]):
        name = "-".join(map(str, np.ravel(number)))
        yield _of(f"causal-offset-{name}", "queries anywhere", WIDE, mask=[["Causal"]], query_offset=number)
    others: dict[str, list[Any]] = {
        "key-lengths": ["KeyLengths", [4, 0]],
        "key-starts": ["KeyStarts", [2, 6]],
        "query-lengths": ["QueryLengths", [1, 3]],
        "first-tokens": ["FirstTokens", 2],
        "segments": ["Segments", [0, 1, 1], [1, 0, 0, 2, 1, 1]],
        "tree": ["Tree", [-1, 0, 0]],
        "packed": ["Packed", [1, 2], [2, 3]],
    }
    for name, rule in others.items():
        yield _of(name, "one rule", WIDE, mask=[rule])
    joined: dict[str, tuple[list[Any], str]] = {
        "decode": ([["Causal"], ["KeyLengths", [4, 6]]], "end"),
        "decode-window": ([["Window", 2, 0], ["KeyLengths", [5, 3]]], "end"),
        "valid-both": ([["Causal"], ["KeyLengths", [4, 6]], ["QueryLengths", [2, 3]]], "end"),
        "left-padded": ([["Causal"], ["KeyStarts", [1, 3]]], "end"),
        "packed-causal-start": ([["Packed", [1, 2], [2, 3]], ["Causal"]], "start"),
        "packed-causal-end": ([["Packed", [1, 2], [2, 3]], ["Causal"]], "end"),
        "packed-window-end": ([["Packed", [2, 1], [4, 2]], ["Window", 1, 0]], "end"),
        "chunked-lengths": ([["Chunked", 2], ["KeyLengths", [5, 6]]], "end"),
    }
    for name, (rules, offset) in joined.items():
        for dtype in ("float32", "bfloat16"):
            yield _of(f"{name}-{dtype}", "rules joined by and", WIDE, dtype, mask=rules, query_offset=offset)


def _arrays() -> Iterator[Recipe]:
    for shape in ((6,), (3, 6), (3, 1), (2, 1, 1, 6), (4, 1, 6), (2, 4, 3, 6)):
        yield _of(f"mask-{'x'.join(map(str, shape))}", "a boolean array that broadcasts", WIDE, arrays={"mask": shape})
    yield _of("mask-none", "no row sees a key", WIDE, arrays={"mask": np.zeros((1, 1), bool)})
    for shape in ((5,), (3, 1), (4, 1, 5), (2, 1, 3, 5), (2, 4, 3, 5)):
        yield _of(f"bias-{'x'.join(map(str, shape))}", "a bias that broadcasts", arrays={"bias": shape})
    for dtype in DTYPES:
        yield _of(f"bias-holes-{dtype}", "-inf in a bias drops the key", dtype=dtype, arrays={"bias": HOLES})
    lowest = np.where(np.isfinite(HOLES), HOLES, np.finfo(np.float32).min)[[0, 0, 2]]
    about = "keys with the most negative number weigh nothing beside others"
    yield _of("bias-lowest", about, arrays={"bias": lowest})
    for name, rule in (("key-lengths", ["KeyLengths", [4, 0]]), ("key-starts", ["KeyStarts", [2, 6]])):
        for dtype in DTYPES:
            about = "NaN and infinity where no row looks"
            yield _of(f"poison-{name}-{dtype}", about, WIDE, dtype, poison="hidden", mask=[rule])
    for what in ("key", "value"):
        about = "NaN in one key, which some rows see"
        yield _of(f"visible-nan-{what}", about, SQUARE, poison=what, mask=[["Causal"]], query_offset="start")


def _scores() -> Iterator[Recipe]:
    for scale in (0.0, -0.5, 1.0, 8.0, 1e-8):
        yield _of(f"scale-{scale:g}", "an explicit scale", scale=scale)
    for cap in (0.5, 30.0):
        yield _of(f"softcap-{cap:g}", "a soft cap", softcap=cap, scale=2.0)
        yield _of(f"softcap-{cap:g}-masked", "the mask comes after", softcap=cap, mask=[["KeyLengths", [2, 0]]])
        yield _of(f"softcap-{cap:g}-bias", "the bias comes after", softcap=cap, arrays={"bias": (3, 5)})
    for offset in ("start", "end", [2, -1]):
        name = offset if isinstance(offset, str) else "batch"
        yield _of(f"alibi-{name}", "linear biases", query_offset=offset, arrays={"slopes": (4,)})
    for dtype in DTYPES:
        yield _of(f"sink-{dtype}", "a sink a head", dtype=dtype, arrays={"sink": (4,)})
    yield _of("sink-empty", "rows that see only the sink", mask=[["KeyLengths", [3, 0]]], arrays={"sink": (4,)})
    large = np.array([100.0, 0.0, -100.0, 1e4])
    yield _of("sink-large", "a sink that drowns the keys, or nearly vanishes", arrays={"sink": large})
    for p in (0.1, 0.5):
        yield _of(f"dropout-{p}", "dropped weights", WIDE, dropout={"p": p, "seed": 2**33 + 7})


def _edges() -> Iterator[Recipe]:
    sizes = {
        "batch": (0, 2, 1, 3, 5, 4, 3),
        "heads": (2, 0, 0, 3, 5, 4, 3),
        "queries": (2, 2, 1, 0, 5, 4, 3),
        "keys": (2, 2, 1, 3, 0, 4, 3),
        "width": (2, 2, 1, 3, 5, 0, 3),
        "value-width": (2, 2, 1, 3, 5, 4, 0),
    }
    for name, without in sizes.items():
        yield _of(f"no-{name}", "an axis of length 0", without)
    yield _of("no-keys-sink", "no keys but a sink: lse = sink", sizes["keys"], arrays={"sink": (2,)})


def _mixed() -> Iterator[Recipe]:
    rules: tuple[list[list[Any]], ...] = (
        [["Causal"]],
        [["Window", 2, 1]],
        [["Causal"], ["KeyLengths", [3, 5]]],
        [["Prefix", [1, 3]]],
        [["KeyStarts", [1, 0]]],
    )
    for n in range(24):
        options: dict[str, Any] = {"mask": rules[n % 5], "query_offset": ("start", "end", 1)[n % 3]}
        options |= {"scale": 0.7} if n % 2 else {}
        options |= {"softcap": 4.0} if n % 4 > 1 else {}
        options |= {"dropout": {"p": 0.25, "seed": n}} if n % 6 == 5 else {}
        arrays: dict[str, Any] = {"bias": ((5,), (4, 1, 5), (2, 1, 3, 5))[n % 3]} if n % 3 else {}
        arrays |= {"slopes": (4,)} if n % 7 == 3 else {}
        arrays |= {"sink": (4,)} if n % 5 > 2 else {}
        yield _of(f"mixed-{n}", "several options", dtype=DTYPES[n % 4], arrays=arrays, **options)
