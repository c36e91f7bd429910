"""Golden vectors of stored keys: pages and codes, what they mean, and the attention over it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing.golden.collection import Array
from sdpa_ref.testing.golden.inputs import array_type, normal
from sdpa_ref.testing.golden.truth import attention

SIZES = (2, 4, 2, 3, 12, 4, 6)  # B, Hq, Hkv, L, S, E, Ev
LENGTHS = [7, 4]


@dataclass(frozen=True)
class How:
    """How keys or values lie.

    Attributes
    ----------
    page : int
        Slots of a page; 0 for an array.
    codes : str
        "int8", "uint8", "float8_e4m3fn", "float8_e5m2", or "nibbles", two a byte; "" for floats.
    zero : int
        The code that means 0.
    run : int
        How many numbers of a key share a scale; 0 for all.
    offset : bool
        Whether something is added to each column of a head.
    """

    page: int = 0
    codes: str = ""
    zero: int = 0
    run: int = 0
    offset: bool = False


@dataclass(frozen=True)
class Recipe:
    """One case, before its numbers are drawn."""

    name: str
    about: str
    key: How
    value: How
    dtype: str = "float32"
    sizes: tuple[int, ...] = SIZES
    lengths: list[int] = field(default_factory=lambda: LENGTHS)
    options: dict[str, Any] = field(default_factory=dict)


def recipes() -> Iterator[Recipe]:
    """Yield all cases."""
    last = {"mask": [["Causal"]], "query_offset": "end"}
    for page in (1, 2, 3, 4, 12):
        for dtype in ("float32", "float16", "float64"):
            how = How(page)
            yield Recipe(f"pages-{page}-{dtype}", "NaN in free slots and pages", how, how, dtype, options=last)
    coded = {
        "int8": How(codes="int8"),
        "int8-groups": How(codes="int8", run=2),
        "int8-offset": How(codes="int8", run=2, offset=True),
        "uint8": How(codes="uint8", zero=131, offset=True),
        "nibbles": How(codes="nibbles", zero=8, run=2),
        "e4m3": How(codes="float8_e4m3fn"),
        "e5m2": How(codes="float8_e5m2", run=2),
    }
    for name, how in coded.items():
        yield Recipe(f"{name}-float32", "codes in an array", how, how, options=last)
        yield Recipe(f"{name}-float16", "codes beside half precision", how, how, "float16", options=last)
        paged = How(2, how.codes, how.zero, how.run, how.offset)
        yield Recipe(f"{name}-pages", "codes in pages", paged, paged, options=last)
    yield Recipe("value-codes", "codes of values only", How(), coded["int8"])
    yield Recipe("key-pages", "pages of keys only", How(3), How())
    yield Recipe("mixed", "pages of another size on each side", How(2), How(3, "nibbles", 8, 2), options=last)
    yield Recipe("nothing", "an entry without keys", How(2), How(2), lengths=[0, 5], options=last)
    window = {"mask": [["Window", 3, 0]], "query_offset": "end", "softcap": 4.0}
    yield Recipe("window", "a window and a soft cap over pages", How(2, "int8"), How(2), options=window)
    places = [[0, 1, *range(5, 15)], [0, 1, *range(11, 21)]]
    rules: tuple[list[Any], ...] = (["Causal"], ["Window", 4, 0], ["Prefix", 2], ["Chunked", 4])
    for rule in rules:
        dropped = {"mask": [rule], "query_offset": "end", "key_positions": places}
        about = "keys whose positions have gaps"
        yield Recipe(f"positions-{rule[0].lower()}", about, How(), How(), lengths=[12, 12], options=dropped)
        yield Recipe(f"positions-{rule[0].lower()}-pages", about, How(2), How(2), options=dropped)


def made(recipe: Recipe) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the tensors of a case, and its entry in the index."""
    B, Hq, Hkv, L, S, E, Ev = recipe.sizes
    rng, dtype = Random(recipe.name), array_type(recipe.dtype)
    tensors = {"query": normal(rng, (B, Hq, L, E)).astype(dtype)}
    meant = {"query": tensors["query"]}
    sides: list[tuple[str, How, int]] = [("key", recipe.key, E), ("value", recipe.value, Ev)]
    for side, how, width in sides:
        own = _drawn(rng, how, dtype, (B, Hkv, S, width), recipe.lengths)
        meant[side] = _meant(own, how, (B, Hkv, S, width), recipe.lengths)
        tensors |= {f"{side}_{name}": part for name, part in own.items()}
    mask = [*recipe.options.get("mask", []), ["KeyLengths", recipe.lengths]]
    with np.errstate(all="ignore"):
        stages = attention(meant, recipe.options | {"mask": mask})
    tensors |= {name: stages[name] for name in ("output", "lse", "weights")}
    sizes = dict(zip(("B", "Hq", "Hkv", "L", "S", "E", "Ev"), recipe.sizes, strict=True))
    entry = {
        "name": recipe.name, "about": recipe.about, "dtype": recipe.dtype, "sizes": sizes, "lengths": recipe.lengths,
        "key": vars(recipe.key), "value": vars(recipe.value), "options": recipe.options,
    }  # fmt: skip
    return tensors, entry | {"tensors": sorted(tensors)}


def stored(entry: dict[str, Any], side: str, tensors: dict[str, Array]) -> Any:
    """Return key or value of a case as `sdpa` takes it."""
    how = entry[side]
    numbers: Any = tensors[f"{side}_numbers"]
    if how["codes"]:
        if how["codes"].startswith("float8"):
            numbers = numbers.view(array_type(how["codes"]))
        bits = 4 if how["codes"] == "nibbles" else 8
        offset = tensors.get(f"{side}_offset")
        numbers = sr.Quantized(numbers, tensors[f"{side}_scale"], offset, zero=how["zero"], bits=bits)
    return sr.Paged(numbers, tensors[f"{side}_table"], entry["lengths"]) if how["page"] else numbers


def _drawn(rng: Random, how: How, dtype: Any, shape: tuple[int, ...], lengths: list[int]) -> dict[str, Array]:
    """Return numbers, and where there are any table, scale and offset: NaN in what no row needs."""
    B, H, S, width = shape
    drawn: dict[str, Array] = {}
    lead: tuple[int, ...] = (B, H, S)
    if how.page:
        M = -(-S // how.page)
        order = list(range(B * M + 2))
        rng.shuffle(order)
        table = np.array(order[: B * M], np.int32).reshape(B, M)
        for b, n in enumerate(lengths):
            table[b, -(-n // how.page) :] = (-1, 10**6)[b % 2]
        drawn["table"], lead = table, (B * M + 2, H, how.page)
    if not how.codes:
        drawn["numbers"] = normal(rng, (*lead, width)).astype(dtype)
        hidden = drawn["numbers"]
    else:
        count = int(np.prod(lead)) * width
        codes: Array = np.array([rng.randrange(256) for _ in range(count)], np.uint8).reshape(*lead, width)
        if how.codes.startswith("float8"):
            codes = codes & np.uint8(0xBF)  # numbers below 2, and never infinite or NaN
        if how.codes == "nibbles":
            codes = np.ascontiguousarray(codes[..., : width // 2])
        drawn["numbers"] = codes.view(np.int8) if how.codes == "int8" else codes
        drawn["scale"] = (abs(normal(rng, (*lead, width // (how.run or width)))) / 64 + 1 / 64).astype(np.float16)
        if how.offset:
            drawn["offset"] = normal(rng, (H, 1, width)).astype(np.float16)
        hidden = drawn["scale"]
    keep = np.zeros(hidden.shape[:-1], bool)
    for b, n in enumerate(lengths):
        for j in range(n):
            page, slot = (drawn["table"][b, j // how.page], j % how.page) if how.page else (b, j)
            keep[page, :, slot] = True
    hidden[~keep] = np.nan
    return drawn


def _meant(drawn: dict[str, Array], how: How, shape: tuple[int, ...], lengths: list[int]) -> Array:
    """Return the numbers that are meant, number by number; 0 beyond the lengths."""
    meant = np.zeros(shape, np.float64)
    for b, h, j, e in product(*map(range, shape)):
        if j >= lengths[b]:
            continue
        place = (int(drawn["table"][b, j // how.page]), h, j % how.page) if how.page else (b, h, j)
        if not how.codes:
            meant[b, h, j, e] = drawn["numbers"][(*place, e)]
            continue
        half = how.codes == "nibbles"
        code = int(drawn["numbers"][(*place, e // 2 if half else e)])
        code = (code >> 4 * (e % 2) & 15) if half else code
        number = _float8(code, how.codes) if how.codes.startswith("float8") else Fraction(code - how.zero)
        number *= Fraction(float(drawn["scale"][(*place, e // (how.run or shape[-1]))]))
        number += Fraction(float(drawn["offset"][h, 0, e])) if how.offset else 0
        meant[b, h, j, e] = float(number)
        if Fraction(meant[b, h, j, e]) != number:
            raise ArithmeticError("a number that is meant must be a float64")
    return meant


def _float8(code: int, name: str) -> Fraction:
    """Return what a byte means as a floating-point number of eight bits."""
    mantissa, bias = (3, 7) if name == "float8_e4m3fn" else (2, 15)
    exponent, fraction = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
    magnitude = Fraction(fraction + (1 << mantissa if exponent else 0), 1 << mantissa)
    power = max(exponent, 1) - bias
    magnitude *= Fraction(1 << power) if power >= 0 else Fraction(1, 1 << -power)
    return -magnitude if code & 128 else magnitude
