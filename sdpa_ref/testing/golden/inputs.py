"""The numbers of the golden vectors, from a generator that is the same on every machine."""

from random import Random
from typing import Any

import numpy as np

from sdpa_ref.testing.golden.collection import Array, Recipe


def drawn(recipe: Recipe) -> dict[str, Array]:
    """Return the arrays of a case, the same on every machine: exact sums of `random.Random`, rounded to the type."""
    B, Hq, Hkv, L, S, E, Ev = recipe.sizes
    rng, dtype = Random(recipe.name), array_type(recipe.dtype)
    query, key, value = (normal(rng, shape) for shape in ((B, Hq, L, E), (B, Hkv, S, E), (B, Hkv, S, Ev)))
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
    for name, given in recipe.arrays.items():
        wide = {"mask": bool, "bias": np.float32, "slopes": np.float64, "sink": np.float64}[name]
        if isinstance(given, tuple):
            given = normal(rng, given)
            given = given > -0.5 if name == "mask" else abs(given) / 4 if name == "slopes" else given
        tensors[name] = np.asarray(given).astype(wide)
    if recipe.poison:
        _spoil(tensors, recipe)
    if recipe.poison in ("", "hidden"):
        tensors["grad_output"] = normal(rng, (B, Hq, L, Ev)).astype(dtype)
        tensors["grad_lse"] = normal(rng, (B, Hq, L)).astype(np.float64 if recipe.dtype == "float64" else np.float32)
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


def normal(rng: Random, shape: tuple[int, ...]) -> Array:
    """Return numbers that are nearly normal: sums of twelve uniform ones, exact in float64."""
    count = int(np.prod(shape, dtype=int))
    return np.array([sum(rng.randrange(2**20) for _ in range(12)) / 2.0**20 - 6 for _ in range(count)]).reshape(shape)


def array_type(name: str) -> np.dtype[Any]:
    """Return a type of NumPy or of ml_dtypes by its name."""
    if name != "bfloat16" and not name.startswith("float8"):
        return np.dtype(name)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype
