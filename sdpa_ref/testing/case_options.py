"""The masks, biases and offsets of cases, each made of a word and random numbers."""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.masks import RULES

Array = np.ndarray[Any, np.dtype[Any]]
EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Lengths at which kernels change tiles."""
SHAPES = ("array", "rows", "keys", "heads", "head rows", "entry rows", "one", "queries")
"""Masks that are boolean arrays, by the axes that they have."""
MASKS: tuple[str, ...] = (
    "causal", "window", "key lengths", "key starts", "query lengths", "prefix", "chunked", "first tokens",
    "segments", "packed", "tree", "function", *SHAPES,
)  # fmt: skip
BY_WORD = {re.sub(r"\B(?=[A-Z])", " ", name.removeprefix("Mask")).lower(): rule for name, rule in RULES.items()}
MASKS += tuple(word for word in BY_WORD if word not in MASKS)  # a new rule comes after those in kept recipes
BIASES = ("array", "row", "holes", "alibi", *SHAPES[1:], "alibi entries")
LOUD = "loud"
"""Biases, some of whose rows and entries are the lowest finite number of their type; sinks of some hundreds."""


def masked(rng: np.random.Generator, words: tuple[str, ...], lead: tuple[int, ...], Hq: int, L: int, S: int) -> Any:
    """Return the mask object, or a bare array where the words describe no more."""
    mask: Any = None
    for word in words:
        name = word.lstrip("&|~")
        part = _make_mask[name](rng, lead, Hq, L, S) if name in _make_mask else _of_numbers(rng, name, lead, L, S)
        if name == "key lengths" and L <= S and any("tree" in other for other in words):  # its nodes are keys
            part = sr.KeyLengths(np.where(np.asarray(part.n) == 0, 0, np.maximum(part.n, L)))
        part = ~part if "~" in word else part
        mask = part if mask is None else (mask | part if "|" in word else mask & part)
    return mask


def _some(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return a boolean array with its share of True drawn first, now and then 0 or 1."""
    return np.asarray(rng.random(shape) < rng.choice([0, 0.1, 0.5, 0.9, 1]))


def _ids(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    ids = rng.integers(3, size=shape)
    return np.sort(ids) if rng.random() < 0.5 else ids


def _lengths(rng: np.random.Generator, n: int, lead: tuple[int, ...]) -> Array:
    size = lead if rng.random() < 0.7 else ()
    if rng.random() < 0.4:
        return rng.choice([0, n, *(at for at in EDGES if at < n)], size)
    return rng.integers(n + 1, size=size)


def _of_numbers(rng: np.random.Generator, word: str, lead: tuple[int, ...], L: int, S: int) -> Any:
    """Return a mask whose parameters are ints, or one number a batch entry."""
    rule = BY_WORD[word]
    n = L if getattr(rule, "of", "S") == "L" else S
    kinds = [field.type for field in fields(rule)]  # type: ignore[arg-type]  # all rules are dataclasses
    return rule(*(int(rng.choice([1, 3, 16, 33])) if kind is int else _lengths(rng, n, lead) for kind in kinds))


def _tree(rng: np.random.Generator, lead: tuple[int, ...], Hq: int, L: int, S: int) -> Any:
    if S < L:  # the nodes are keys, too
        return sr.Causal()
    return sr.Tree((rng.random(L) * (np.arange(L) + 1)).astype(int) - 1)


def _documents(rng: np.random.Generator, total: int) -> Array:
    cuts = np.sort(rng.integers(total + 1, size=4))
    return np.asarray(np.diff(cuts, prepend=0))


_make_mask: dict[str, Callable[..., Any]] = {
    "causal": lambda rng, lead, Hq, L, S: sr.Causal(),
    "window": lambda rng, lead, Hq, L, S: sr.Window(*rng.choice([None, 0, 1, 3, 16, 40, 64, 127, 128, 300], 2)),
    "key lengths": lambda rng, lead, Hq, L, S: sr.KeyLengths(_lengths(rng, S, lead)),
    "key starts": lambda rng, lead, Hq, L, S: sr.KeyStarts(_lengths(rng, S, lead)),
    "query lengths": lambda rng, lead, Hq, L, S: sr.QueryLengths(_lengths(rng, L, lead)),
    "prefix": lambda rng, lead, Hq, L, S: sr.Prefix(_lengths(rng, S, lead)),
    "chunked": lambda rng, lead, Hq, L, S: sr.Chunked(int(rng.choice([1, 3, 16, 33, 64, 128]))),
    "first tokens": lambda rng, lead, Hq, L, S: sr.FirstTokens(int(rng.integers(5))),
    "segments": lambda rng, lead, Hq, L, S: sr.Segments(_ids(rng, (L,)), _ids(rng, (S,))),
    "packed": lambda rng, lead, Hq, L, S: sr.Packed(_documents(rng, L), _documents(rng, S)),
    "tree": _tree,
    "function": lambda rng, lead, Hq, L, S: sr.MaskFunction(lambda b, h, i, j: (i + 2 * j + h + b) % 5 != 0),
    **{name: lambda rng, lead, Hq, L, S, name=name: _some(rng, _shape(name, lead, Hq, L, S)) for name in SHAPES},
}


def _shape(word: str, lead: tuple[int, ...], Hq: int, L: int, S: int) -> tuple[int, ...]:
    """Return the shape of a mask or a bias, one of `SHAPES`."""
    return {
        "array": (*lead, Hq, L, S),
        "rows": (L, S),
        "keys": (*lead, 1, 1, S),
        "heads": (Hq, 1, S),
        "head rows": (Hq, L, S),
        "entry rows": (*lead, 1, L, S),
        "one": (*(1 for _ in lead), 1, L, S),
        "queries": (*lead, 1, L, 1),
    }[word]


def biased(rng: np.random.Generator, word: str, lead: tuple[int, ...], Hq: int, L: int, S: int) -> Any:
    """Return the bias, in a float type that is drawn; ALiBi with slopes that are, a head or an entry and head."""
    if word.startswith("alibi"):
        return sr.ALiBi(rng.random((*lead, Hq) if word == "alibi entries" else Hq))
    shape = (1, S) if word == "row" else _shape(word if word in SHAPES else "array", lead, Hq, L, S)
    array = rng.standard_normal(shape).astype(rng.choice(["float16", "float32", "float64"]))
    if word == "holes":
        return np.where(rng.random(array.shape) < 0.3, array.dtype.type(-np.inf), array)
    if word == LOUD:
        share = rng.choice([0.3, 1], (*array.shape[:-1], 1))
        return np.where(rng.random(array.shape) < share, np.finfo(array.dtype).min, array)
    return array


def offset_of(rng: np.random.Generator, how: str, mask: tuple[str, ...], lead: tuple[int, ...], L: int, S: int) -> Any:
    """Return the offset; "start" where "end" would not say which lengths it means."""
    if how == "number":
        return int(rng.integers(-4, 20))
    if how == "far":
        edges = (-L - 3, -L, 1 - L, -(L // 2), S - L - 1, S - 1, S, S + 1, S + 100, 40_000, 70_000, 2**31 + 7)
        return int(rng.choice(edges))
    if how == "batch":
        return rng.integers(-4, 20, lead)
    names = [word.lstrip("&|~") for word in mask]
    clear = all(names.count(name) <= 1 for name in ("key lengths", "query lengths"))
    plain = not any("|" in word or "~" in word for word in mask)
    return how if how == "start" or (clear and plain) or "lengths" not in " ".join(names) else "start"
