"""Words that are simpler than those of a failing case, one step each."""

from collections.abc import Iterator

from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.draws import plain_batch
from sdpa_ref.testing.recipes import Words


def simpler(words: Words, claims: Capabilities) -> Iterator[Words]:
    """Yield words that are simpler in one thing and still claimed, the boldest first."""
    for name, simplest in _simplest(claims).items():
        if name in words and words[name] != simplest:
            yield words | {name: simplest}
            if name == "heads":
                yield from (words | {name: fewer} for fewer in _fewer_heads(*words[name]))
            if name == "batch":
                yield from (words | {name: fewer} for fewer in _fewer_entries(words[name]))
    for name in ("mask", "bias"):
        for n in range(len(words.get(name, ()))):
            fewer = [*words[name][:n], *words[name][n + 1 :]]
            if fewer:
                fewer[0] = fewer[0].lstrip("&|")
                yield words | {name: tuple(fewer)}
    alike = ((names,) for names in (("L", "S"), ("E", "Ev")) if words[names[0]] == words[names[1]])
    for names in (
        *(pair for one in alike for pair in one),
        ("L",),
        ("S",),
        *((("E",), ("Ev",)) if claims.value_width else ()),
    ):
        n = words[names[0]]
        for fewer_n in dict.fromkeys((1, 2, 3, n // 2, n * 3 // 4, n * 7 // 8, n - 16, n - 1)):
            if 0 < fewer_n < n:
                yield words | dict.fromkeys(names, fewer_n)


def _fewer_heads(Hq: int, Hkv: int) -> Iterator[tuple[int, int]]:
    """Yield fewer heads: one group, half of the groups or one less, a smaller group."""
    group = Hq // max(Hkv, 1)
    for n in dict.fromkeys((1, Hkv // 2, Hkv - 1)):
        if 0 < n < Hkv:
            yield n * group, n
    for n in dict.fromkeys((1, group // 2, group - 1)):
        if 0 < n < group:
            yield n * Hkv, Hkv


def _fewer_entries(batch: tuple[int, ...] | None) -> Iterator[tuple[int, ...]]:
    """Yield batches that are shorter in one axis."""
    for axis, n in enumerate(batch or ()):
        for fewer in dict.fromkeys((1, n // 2, n - 1)):
            if 0 < fewer < n:
                yield (*(batch or ())[:axis], fewer, *(batch or ())[axis + 1 :])


def _simplest(claims: Capabilities) -> Words:
    """Return the simplest claimed word for everything but the lengths."""
    return {
        "batch": plain_batch(claims),
        "heads": (1, 1),
        "dtype": "float32" if "float32" in claims.dtypes else claims.dtypes[0],
        "layout": claims.layouts[0],
        **{
            "numbers": "normal",
            "memory": "plain",
            "mask": (),
            "bias": (),
            "scale": None,
            "softcap": None,
            "sink": None,
        },
        **{"dropout": 0.0, "score_mod": False, "poison": False},
    }
