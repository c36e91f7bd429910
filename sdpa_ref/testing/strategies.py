"""Hypothesis strategies for attention: they draw words and a seed; `sdpa_ref.testing.cases` makes the arrays."""

from importlib.util import find_spec
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from sdpa_ref.testing.case_options import BIASES, EDGES, MASKS
from sdpa_ref.testing.cases import NUMBERS, Case, case
from sdpa_ref.testing.strides import MEMORIES

DTYPES = ("float32", "float64", "float16", *(("bfloat16",) if find_spec("ml_dtypes") else ()))


def lengths(*, minimum: int = 0) -> SearchStrategy[int]:
    """Return a strategy for lengths: small ones, and those around the edges of tiles."""
    return st.one_of(st.integers(max(minimum, 1), 9), st.sampled_from(EDGES), st.integers(minimum, 9))


def masks(words: tuple[str, ...] = MASKS) -> SearchStrategy[tuple[str, ...]]:
    """Return a strategy for masks in the words of `case`: none, one, or an expression of up to three."""
    single = st.sampled_from(words).map(lambda word: (word,))
    return st.one_of(st.just(()), single, st.lists(st.sampled_from(words), max_size=3, unique=True).flatmap(_joined))


def _joined(words: list[str]) -> SearchStrategy[tuple[str, ...]]:
    if "packed" in words:  # it must be joined by & at the top
        return st.just(tuple(f"&{word}" for word in words))
    joints = st.sampled_from(["&", "|", "&~", "|~"])
    return st.tuples(*(st.builds(str.__add__, joints, st.just(word)) for word in words))


def cases(**words: Any) -> SearchStrategy[Case]:
    """Return a strategy for cases.

    Parameters
    ----------
    **words
        What is not to be drawn freely: keywords of `case`, as values or as strategies.

    Notes
    -----
    The first call of a backend for a type compiles kernels, which takes seconds. Hypothesis would report such an
    example as too slow, so turn its deadline off where a test calls a backend.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> @settings(deadline=None)
    ... @given(cases(S=st.integers(1, 3), mask=(), layout="HLE"))
    ... def check(case):
    ...     assert 1 <= case.key.shape[-2] <= 3 and "mask" not in case.options
    >>> check()
    """
    drawn: dict[str, SearchStrategy[Any]] = {
        "batch": st.sampled_from([(), (2,), None, (1,), (2, 3), (0,)]),
        "heads": st.sampled_from([(1, 1), (2, 2), (2, 1), (6, 2), (0, 0)]),
        "L": lengths(),
        "S": lengths(),
        "E": st.sampled_from([1, 2, 4, 7, 16, 64, 0]),
        "Ev": st.sampled_from([1, 3, 8, 17, 64, 0]),
        "dtype": st.sampled_from(DTYPES),
        "numbers": st.sampled_from(NUMBERS),
        "memory": st.sampled_from(MEMORIES),
        "mask": masks(),
        "bias": st.lists(st.sampled_from(BIASES), max_size=2, unique=True).map(tuple),
        "offset": st.sampled_from(["start", "end", "number", "batch"]),
        "scale": st.one_of(st.none(), st.sampled_from([0.0, 1.0, -0.3, 0.125])),
        "softcap": st.one_of(st.none(), st.sampled_from([0.5, 30.0])),
        "sink": st.sampled_from([None, "number", "heads"]),
        "dropout": st.sampled_from([0.0, 0.0, 0.1, 0.5]),
        "score_mod": st.sampled_from([False, False, True]),
        "layout": st.sampled_from(["HLE", "LHE"]),
        "poison": st.booleans(),
    }
    drawn |= {name: word if isinstance(word, SearchStrategy) else st.just(word) for name, word in words.items()}
    return st.builds(case, st.integers(0, 2**32 - 1), **drawn)
