"""A block of a problem keeps what the whole keeps there, whatever the mask, and adds what the whole adds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpa_ref import (
    ALiBi,
    Causal,
    Chunked,
    Dropout,
    FirstTokens,
    KeyLengths,
    KeyStarts,
    MaskFunction,
    Packed,
    Prefix,
    QueryLengths,
    Segments,
    Tree,
    Window,
)
from sdpa_ref._problem import problem_of
from sdpa_ref.blocks import filled, outlined, part, seen
from sdpa_ref.masks import Block

B, H, L, S = (2, 3), 4, 23, 31
RNG = np.random.default_rng(0)
BIAS = RNG.standard_normal((3, 1, L, S))
MASKS = {
    "none": None,
    "causal": Causal(),
    "window": Window(5, 2),
    "lengths": KeyLengths(RNG.integers(0, S, B)) & KeyStarts(RNG.integers(0, 9, (3,))) & Causal(),
    "queries": QueryLengths(RNG.integers(0, L, B)) & Window(9, None),
    "prefix": Prefix(RNG.integers(0, S, (2, 1))),
    "chunks": Chunked(7),
    "first tokens": Window(5, 0) | FirstTokens(3) & Causal(),
    "segments in pieces": Segments(RNG.integers(0, 3, (3, L)), RNG.integers(0, 3, S)),
    "segments": Segments(np.arange(L) // 5, np.arange(S) // 7),
    "documents": Packed([5, 9, 4], [8, 8, 10]) & Causal(),
    "tree": Tree([-1, *(RNG.integers(0, np.arange(1, L)))]),
    "tree of some": KeyLengths(RNG.integers(L, S, (3,))) & Tree([-1, *range(L - 1)]),
    "function": MaskFunction(lambda b, h, i, j: (b + 2 * h + 3 * i + j) % 4 > 0),
    "array": RNG.random((3, 1, L, S)) < 0.5,
    "keys of heads": RNG.random((H, 1, S)) < 0.5,
    "not": ~(Window(3, 3) | (RNG.random((L, 1)) < 0.2)) & KeyLengths(S - 2),
    "all of it": (Causal() | (RNG.random((L, S)) < 0.1))
    & ~Chunked(4)
    & MaskFunction(lambda b, h, i, j: (i + j) % 5 > 0),
}


def spans(n):
    return st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).map(tuple)


def whole(mask, entries=False):
    q, k = np.zeros((*B, H, L, 8)), np.zeros((*B, 2, S, 8))
    bias = (BIAS, ALiBi(np.arange(24.0).reshape(2, 3, 4) if entries else np.arange(4.0)))
    return problem_of(q, k, k, mask=mask, query_offset=5, bias=bias, dropout=Dropout(0.5, 3))


@pytest.mark.parametrize("name", MASKS)
@given(data=st.data())
def test_a_block_keeps_and_adds_what_the_whole_does(name, data):
    problem = whole(MASKS[name], data.draw(st.booleans()))
    first = data.draw(spans(B[0]))
    groups, rows, keys = data.draw(spans(2)), data.draw(spans(L)), data.draw(spans(S))
    keys = (keys[0] - keys[0] % 4, keys[1])
    block = Block((first, (0, B[1])), B, (2 * groups[0], 2 * groups[1]), rows, keys)
    outline = outlined(problem)
    inside = (slice(*first), slice(None), slice(*block.heads), slice(*rows), slice(*keys))
    key = problem.key[(*inside[:2], slice(*groups), slice(*keys))]
    keep = None if problem.keep is None else block.scores(problem.keep)
    biases = tuple(block.scores(bias) for bias in problem.biases)
    here = filled(part(outline, block), problem.query[inside[:4]], key, key, keep, biases)
    everything = problem.rows(0, L)
    expected = everything.kept()[inside]
    np.testing.assert_array_equal(here.kept(), expected)
    np.testing.assert_allclose(
        here.added() + np.zeros(expected.shape), (everything.added() + np.zeros((*B, H, L, S)))[inside]
    )
    np.testing.assert_array_equal(here.kept_by_dropout(), everything.kept_by_dropout()[inside])
    for got, of_all in zip(here.indices(), everything.indices(), strict=True):
        shape = np.broadcast_shapes(got.shape, expected.shape)
        np.testing.assert_array_equal(np.broadcast_to(got, shape), np.broadcast_to(of_all, (*B, H, L, S))[inside])
    if expected.any():
        assert seen(outline.visible, block, S, [keys]) == [0]


@pytest.mark.parametrize("name", ["none", "causal", "window", "lengths", "first tokens", "documents", "chunks"])
def test_pieces_that_no_row_sees_are_known(name):
    problem = whole(MASKS[name])
    kept, cuts = problem.rows(0, L).kept(), [(0, 4), (4, 5), (5, 20), (20, 24), (24, 31)]
    for rows in ((0, 4), (4, 5), (5, 20), (0, L)):
        block = Block(((0, 2), (0, 3)), B, (0, H), rows, (0, S))
        needed = [n for n, (a, b) in enumerate(cuts) if kept[..., slice(*rows), a:b].any()]
        assert seen(outlined(problem).visible, block, S, cuts) == needed
