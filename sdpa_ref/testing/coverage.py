"""What a run has drawn: a table by dimension, what it never reached, and which claims no case exercised."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import SHAPES
from sdpa_ref.testing.recipes import Words

SIZES = ("E", "Ev", "L", "S", "batch entries", "query heads", "key heads", "group")
_LATER = {  # from which size on kernels are often another piece of code
    "E": (65, 129, 257), "Ev": (65, 129, 257), "L": (65, 129, 257, 1025), "S": (65, 129, 257, 1025, 4097, 32769, 65537),
    "batch entries": (4, 9), "query heads": (9, 17), "group": (9,),
}  # fmt: skip


@dataclass
class Drawn:
    """What was drawn, counted.

    Attributes
    ----------
    sizes : dict of Counter
        By dimension, how many cases had which size.
    used : Counter
        How many cases used which claim, as pairs of its name and the word of it, "" where it has none.
    """

    sizes: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in SIZES})
    used: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, words: Words, law: str) -> None:
        """Count a case that a law judged."""
        for name, n in sizes_of(words).items():
            self.sizes[name][n] += 1
        self.used.update(set(_uses(words, law)))

    def table(self) -> list[tuple[str, str]]:
        """Return what was drawn, a pair of the dimension and what was drawn of it for each."""
        rows = []
        for name, counts in self.sizes.items():
            if counts:
                values = f"{len(counts)} values" if len(counts) > 1 else "1 value"
                rows.append((name, f"{min(counts)} to {max(counts)}, {values}"))
        for name, claim in (("masks", "masks"), ("shapes of masks", "mask"), ("biases", "bias"), ("memory", "memory")):
            words = sorted(word for used, word in self.used if used == claim and word)
            if words:
                rows.append((name, ", ".join(words)))
        return rows

    def never(self, claims: Capabilities) -> list[str]:
        """Return which sizes beyond the small ones were never drawn, and the claim that forbids them, if one does."""
        lines = []
        for name, marks in _LATER.items():
            most = max(self.sizes[name], default=0)
            missed = [mark for mark in marks if mark > most]
            if missed and self.sizes[name] and (name != "group" or claims.grouped_heads):
                why = _forbidden(name, missed[0], claims)
                lines.append(f"{name} of {missed[0]} or more" + (f" ({why})" if why else ""))
        if claims.grouped_heads:
            groups = [str(n) for n in (3, 5, 7) if not self.sizes["group"][n]]
            lines += [f"groups of {', '.join(groups)}"] if groups else []
        return lines

    def unexercised(self, claims: Capabilities) -> list[str]:
        """Return the claims that no case exercised."""
        return [f"{name}: {word}" if word else name for name, word in _claimed(claims) if not self.used[name, word]]


def sizes_of(words: Words) -> dict[str, int]:
    """Return the sizes of a case by the names of `SIZES`."""
    Hq, Hkv = words.get("heads", (1, 1))
    return {
        **{name: int(words.get(name, 1)) for name in ("E", "Ev", "L", "S")},
        "batch entries": int(np.prod(words.get("batch") or (1,))),
        "query heads": Hq,
        "key heads": Hkv,
        "group": Hq // max(1, Hkv),
    }


def _uses(words: Words, law: str) -> Iterator[tuple[str, str]]:
    """Yield which claims a case uses."""
    sizes = sizes_of(words)
    batch = words.get("batch", ())
    yield "dtypes", words.get("dtype", "float32")
    yield "layouts", words.get("layout", "HLE")
    yield "ranks", str(2 if batch is None else 3 + len(batch))
    yield "memory", words.get("memory", "plain")
    if words.get("memory", "plain") != "plain":
        yield "strides", ""
    for name in ("scale", "softcap", "sink", "score_mod", "dropout"):
        if words.get(name) not in (None, False, 0.0) or (name == "scale" and words.get(name) is not None):
            yield name, ""
    for word in words.get("bias", ()):
        yield (word.replace(" ", "_"), "") if word.startswith("alibi") else ("bias", word)
    if any(not word.startswith("alibi") for word in words.get("bias", ())):
        yield "bias", ""
    masks = [word.lstrip("&|~") for word in words.get("mask", ())]
    for word in masks:
        yield ("mask" if word in SHAPES else "masks"), word
    if masks:
        yield "mask", ""
        offset = str(words.get("offset", "start"))
        yield "offsets", "number" if offset == "far" else offset
    if len(masks) > 1:
        yield "mask_algebra", ""
    if masks and words.get("bias"):
        yield "mask_and_bias", ""
    if sizes["group"] > 1:
        yield "grouped_heads", ""
    if sizes["E"] != sizes["Ev"]:
        yield "value_width", ""
    if 0 in (sizes["E"], sizes["Ev"], sizes["L"], sizes["S"], sizes["batch entries"], sizes["query heads"]):
        yield "empty_axes", ""
    yield "law", law


def _claimed(claims: Capabilities) -> Iterator[tuple[str, str]]:
    """Yield the claims that cases can exercise."""
    for name in ("dtypes", "layouts", "masks", "offsets"):
        if name != "offsets" or claims.mask or claims.masks:
            yield from ((name, word) for word in getattr(claims, name))
    yield from (("ranks", str(rank)) for rank in claims.ranks)
    for name in ("softcap", "sink", "score_mod", "alibi", "alibi_entries", "dropout", "mask", "mask_algebra",
                 "mask_and_bias", "grouped_heads", "value_width", "empty_axes", "strides"):  # fmt: skip
        if getattr(claims, name):
            yield name, ""
    yield from ((name, "") for name in ("scale", "bias") if getattr(claims, name) != "none")


def _forbidden(name: str, size: int, claims: Capabilities) -> str:
    """Return the claim that keeps a size from being drawn, or ""."""
    most: dict[str, Any] = {"E": "max_width", "Ev": "max_width", "L": "max_length", "S": "max_length"}
    claim = most.get(name, "")
    limit = getattr(claims, claim) if claim else None
    return f"{claim} = {limit}" if limit is not None and limit < size else ""
