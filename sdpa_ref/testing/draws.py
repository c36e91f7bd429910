"""Words of cases, drawn within what a target claims: sizes where kernels change their path, and options."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import BIASES, EDGES, LOUD, MASKS
from sdpa_ref.testing.cases import NUMBERS
from sdpa_ref.testing.recipes import Words
from sdpa_ref.testing.strides import MEMORIES

_WORK = 1 << 20  # B * Hq * L * S * (E + Ev) of a case; more would mean few cases
_WIDTHS = (1, 2, 4, 7, 8, 16, 32, 64)
_WIDE = (65, 65, 72, 80, 80, 96, 96, 127, 128, 128, 129, 160, 192, 256, 257, 320, 512)
_TILES = (16, 32, 64, 128, 256)
BEYOND_4097 = (5000, 6145, 8193, 10_000, 12_289, 16_385, 20_000, 24_577)
BEYOND_16_BITS = (32_769, 40_000, 65_537, 65_537, 70_000, 80_000)
_GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
_BATCHES = (4, 5, 6, 7, 8, 9, 16, 17, 33)
REACHES = (
    "wide",
    "wide values",
    "both wide",
    "both wide",
    "keys",
    "keys",
    "queries",
    "both",
    "heads",
    "heads",
    "entries",
    "wide heads",
    "keys and heads",
)
"""What a case reaches for beyond small sizes: where kernels change their path."""


def draw(rng: np.random.Generator, claims: Capabilities, focus: Mapping[str, Any]) -> Words:
    """Return words for `case`: plain attention in any claimed type, size and layout, but for what `focus` says.

    Most cases reach for large sizes of one kind, and is small in the others.

    Parameters
    ----------
    rng : numpy.random.Generator
    claims : Capabilities
    focus : mapping
        Words, or functions ``(rng, claims) -> word``.
    """
    empty = claims.empty_axes and rng.random() < 0.1
    words: Words = {
        "batch": _batch(rng, claims, empty),
        "heads": _heads(rng, claims, empty),
        "L": 1 if rng.random() < 0.15 else length(rng, minimum=0 if empty else 1),  # 1: decoding
        "S": length(rng, minimum=0 if empty else 1),
        "E": int(rng.choice((0, 4))) if empty else _width(rng),
        "dtype": _pick(rng, claims.dtypes),
        "numbers": _pick(rng, ("normal", "normal", "needles", *NUMBERS)),
        "memory": _pick(rng, MEMORIES if claims.strides and rng.random() < 0.3 else ("plain",)),
        "layout": _pick(rng, claims.layouts),
    }
    words["Ev"] = int(rng.choice((0, 3))) if empty else _width(rng)
    if rng.random() < 0.2:  # attention of a sequence over itself
        words["S"] = words["L"]
    reached = {} if empty or rng.random() < 0.4 else reach(rng, claims, _pick(rng, REACHES))
    chosen = {name: word(rng, claims) if callable(word) else word for name, word in focus.items()}
    words |= reached | chosen
    for name, most in (
        ("L", claims.max_length),
        ("S", claims.max_length),
        ("E", claims.max_width),
        ("Ev", claims.max_width),
    ):
        words[name] = words[name] if most is None else min(words[name], most)
    if not claims.value_width:
        words["Ev"] = words["E"]
    if words["batch"] is None:
        words |= {"heads": (1, 1), "layout": "HLE"}
    words = _affordable(words, {*reached, *chosen})
    return words if claims.value_width else words | dict.fromkeys(("E", "Ev"), min(words["E"], words["Ev"]))


def reach(rng: np.random.Generator, claims: Capabilities, what: str) -> Words:
    """Return the words of large sizes of one kind, one of `REACHES`."""
    few = int(rng.integers(1, 5))
    most = claims.max_length or 4097
    if what == "wide":
        return {"E": any_width(rng, claims), "L": few}
    if what == "wide values":
        return {"Ev": any_width(rng, claims), "L": few}
    if what == "both wide":
        E, how = any_width(rng, claims), rng.random()
        return {
            "L": few,
            **({"E": 192, "Ev": 128} if how < 0.15 else {"E": E, "Ev": E if how < 0.7 else any_width(rng, claims)}),
        }
    if what == "keys":
        return {"S": tile_edge(rng, most), "L": few if rng.random() < 0.7 else 1}
    if what == "queries":
        return {"L": tile_edge(rng, most), "S": int(rng.integers(1, 20))}
    if what == "both":
        n = tile_edge(rng, min(most, 400))
        return {"L": n, "S": n if rng.random() < 0.5 else tile_edge(rng, min(most, 400))}
    if what == "heads":
        return {"heads": many_heads(rng, claims)}
    if what == "entries":
        return {"batch": _batch(rng, claims, False, _BATCHES)}
    if what == "wide heads":
        return {"heads": many_heads(rng, claims), "E": any_width(rng, claims), "L": few, "S": int(rng.integers(1, 40))}
    return {"S": tile_edge(rng, most), "heads": many_heads(rng, claims), "L": few}


def tile_edge(rng: np.random.Generator, most: int) -> int:
    """Return a length on or beside a multiple of a tile, small ones as often as large ones."""
    if rng.random() < 0.4:  # the powers of two are where most kernels change
        powers = [1 << n for n in range(5, 13) if 1 << n <= most]
        return max(1, min(most, int(rng.choice(powers or [1])) + int(rng.integers(-1, 2))))
    tile = int(rng.choice(_TILES))
    times = int(np.exp(rng.uniform(0, np.log(max(1, most // tile) + 1))))
    return max(1, min(most, tile * times + int(rng.integers(-1, 2))))


def many_heads(rng: np.random.Generator, claims: Capabilities) -> tuple[int, int]:
    """Return more heads than are usual, and groups of any size."""
    if not claims.grouped_heads or rng.random() < 0.3:
        n = int(rng.choice((4, 5, 7, 8, 9, 10, 12, 16, 17, 33)))
        return n, n
    group, Hkv = int(rng.choice(_GROUPS)), int(rng.choice((1, 2, 3, 4)))
    return group * Hkv, Hkv


def a_width(rng: np.random.Generator, claims: Capabilities) -> int:
    """Return a width at which kernels change their path, up to the largest that is claimed."""
    widths = [n for n in _WIDE if claims.max_width is None or n <= claims.max_width]
    return int(rng.choice(widths or [claims.max_width or 1]))


def any_width(rng: np.random.Generator, claims: Capabilities) -> int:
    """Return what `a_width` does, or now and then a width above 64 of any remainder by the length of a vector."""
    most = min(claims.max_width or _WIDE[-1], _WIDE[-1])
    return int(rng.integers(65, most)) if most > 65 and rng.random() < 0.15 else a_width(rng, claims)


def length(rng: np.random.Generator, minimum: int = 1) -> int:
    """Return a length: a small one, one around the edge of a tile, or any up to 64."""
    which = rng.random()
    if which < 0.5:
        return int(rng.choice(EDGES) if which < 0.4 else rng.integers(10, 65))
    return int(rng.integers(minimum, 10))


def plain_batch(claims: Capabilities) -> tuple[int, ...] | None:
    """Return the word for a batch of one entry with as few axes as are claimed."""
    rank = min((rank for rank in claims.ranks if rank > 2), default=2)
    return (1,) * (rank - 3) if rank > 2 else None


def any_mask(rng: np.random.Generator, claims: Capabilities) -> tuple[str, ...]:
    """Return a mask that the target takes, as an object or as an array, perhaps of several parts."""
    words = MASKS if claims.mask else claims.masks
    usual = [word for word in ("causal", "causal", "window", "key lengths") if word in words]
    if usual and rng.random() < 0.3:  # the masks that most kernels are written for
        return (str(rng.choice(usual)),)
    if len(words) < 2 or not (claims.mask or claims.mask_algebra) or rng.random() < 0.4:
        return (str(rng.choice(words)),)
    chosen = [str(word) for word in rng.choice(words, int(rng.integers(2, 4)), replace=False)]
    joints = ["&"] if "packed" in chosen else ["&", "|", "&~", "|~"]
    first, *others = chosen
    return (first, *(f"{rng.choice(joints)}{word}" for word in others))


def any_bias(rng: np.random.Generator, claims: Capabilities) -> tuple[str, ...]:
    """Return a bias that the target takes."""
    slopes = {"alibi": claims.alibi, "alibi entries": claims.alibi and claims.alibi_entries}
    words = [word for word in (*BIASES, LOUD) if slopes.get(word, claims.bias != "none")]
    if claims.bias == "any" and rng.random() < 0.3:
        return LOUD, str(rng.choice((LOUD, *(word for word in words if word not in slopes))))
    many = 2 if claims.bias == "any" and claims.alibi else 1
    return tuple(str(word) for word in rng.choice(words, int(rng.integers(1, many + 1)), replace=False))


def slopes(rng: np.random.Generator, claims: Capabilities) -> str:
    """Return ALiBi with slopes of heads, or of entries and heads."""
    return "alibi entries" if claims.alibi_entries and rng.random() < 0.5 else "alibi"


def an_offset(rng: np.random.Generator, claims: Capabilities) -> str:
    """Return an alignment: any where masks may become arrays, else one that is claimed."""
    words = ("start", "end", "number", "batch") if claims.mask else claims.offsets or ("start",)
    return str(rng.choice((*words, *(("far",) if "number" in words else ()))))


def everything(rng: np.random.Generator, claims: Capabilities, *, sink: bool = True) -> Words:
    """Return a word for each option, many of them set."""
    focus: Words = {}
    masked = bool(claims.mask or claims.masks) and rng.random() < 0.6
    biased = (claims.bias != "none" or claims.alibi) and rng.random() < 0.5
    if masked and biased and not claims.mask_and_bias:
        biased = False
    if masked:
        focus["mask"] = any_mask(rng, claims)
    if biased:
        focus["bias"] = any_bias(rng, claims)
    focus["offset"] = an_offset(rng, claims)
    if claims.scale != "none" and rng.random() < 0.5:
        focus["scale"] = a_scale(rng, claims)
    if claims.softcap and rng.random() < 0.3:
        focus["softcap"] = a_softcap(rng, claims)
    if sink and claims.sink and rng.random() < 0.3:
        focus["sink"] = a_sink(rng, claims)
    if claims.dropout and rng.random() < 0.15:
        focus["dropout"] = a_dropout(rng, claims)
    if claims.score_mod and rng.random() < 0.15:
        focus["score_mod"] = True
    if claims.poison and rng.random() < 0.3:
        focus["poison"] = True
    return focus


def a_scale(rng: np.random.Generator, claims: Capabilities) -> float:
    """Return a scale, among them 0 and a negative one where any is claimed."""
    return float(rng.choice((1.0, 0.125, 2.5, *((0.0, -0.3) if claims.scale == "any" else ()))))


def a_softcap(rng: np.random.Generator, claims: Capabilities) -> float:
    """Return a soft cap that bends most scores, or few."""
    return float(rng.choice((0.5, 2.0, 30.0, 50.0)))


def a_dropout(rng: np.random.Generator, claims: Capabilities) -> float:
    """Return a probability: a usual one, or one that leaves few weights."""
    return float(rng.choice((0.1, 0.3, 0.5, 0.9)))


def a_sink(rng: np.random.Generator, claims: Capabilities) -> str:
    """Return a word for sinks."""
    return str(rng.choice(("number", "heads", LOUD)))


def _width(rng: np.random.Generator) -> int:
    """Return a width up to 64: a usual one, or any, as kernels do what is beyond the last whole vector by itself."""
    return int(rng.choice(_WIDTHS) if rng.random() < 0.7 else rng.integers(1, 65))


def _batch(
    rng: np.random.Generator, claims: Capabilities, empty: bool, most: tuple[int, ...] = (1, 2, 3)
) -> tuple[int, ...] | None:
    rank = int(rng.choice(claims.ranks))
    if rank == 2:
        return None
    sizes = (0, 1, 2) if empty else (1, 2, 3)
    batch = [int(n) for n in rng.choice(sizes, rank - 3)]
    if batch:
        batch[int(rng.integers(len(batch)))] = int(rng.choice((0, 1) if empty else most))
    return tuple(batch)


def _heads(rng: np.random.Generator, claims: Capabilities, empty: bool) -> tuple[int, int]:
    choices = [(1, 1), (2, 2), (3, 3), *([(2, 1), (4, 2), (6, 2), (6, 3)] if claims.grouped_heads else [])]
    choices = [*choices, (0, 0)] if empty else choices
    return choices[rng.integers(len(choices))]


def _affordable(words: Words, wanted: AbstractSet[str] = frozenset()) -> Words:
    """Return the words with smaller sizes where they would take long, those that are wanted last."""
    Hq, Hkv = words["heads"]
    steps: list[Words] = [
        {"batch": words["batch"] and tuple(min(n, 1) for n in words["batch"])},
        {"heads": (Hq // Hkv, 1) if Hq > Hkv else (1, 1)},
        {"L": min(words["L"], 17)},
        {"E": min(words["E"], 16)},
        {"Ev": min(words["Ev"], 16)},
        {"L": min(words["L"], 2)},
        {"E": min(words["E"], 2)},
        {"Ev": min(words["Ev"], 2)},
    ]
    steps.sort(key=lambda step: bool(step.keys() & wanted))
    for step in [*steps, {"S": min(words["S"], 1025)}]:
        pairs = np.prod(words["batch"] or (1,)) * words["heads"][0] * words["L"] * words["S"]
        if pairs * (words["E"] + words["Ev"]) > _WORK:
            words = words | step
    return words


def _pick(rng: np.random.Generator, choices: tuple[str, ...]) -> str:
    return str(choices[rng.integers(len(choices))])
