"""Rule 12 of the semantics: where the queries stand, in a row and within packed documents."""

import numpy as np
import pytest
from naive import agree, attention, qkv, visible

from sdpa_ref import (
    ALiBi,
    Causal,
    Chunked,
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
    alibi_slopes,
    sdpa,
    sdpa_stages,
    sdpa_weights,
)

POSITIONAL = [Causal(), Window(1, 0), Prefix(2), Chunked(2)]
# What a causal query sees of three keys when there are two queries, and the other way round.
LITERAL = {
    (2, 3, "start"): "#.. ##.",
    (2, 3, "end"): "##. ###",
    (2, 3, -1): "... #..",
    (2, 3, 5): "### ###",
    (3, 2, "start"): "#. ## ##",
    (3, 2, "end"): ".. #. ##",
    (1, 4, "start"): "#...",
    (1, 4, "end"): "####",
    (2, 2, None): "#. ##",
    (2, 2, "end"): "#. ##",
}


@pytest.mark.parametrize(("L", "S", "offset"), LITERAL)
def test_rule_12_literal_pictures(backend, L, S, offset):
    q, k, _ = qkv(L=L, S=S)
    expected = [[mark == "#" for mark in row] for row in LITERAL[L, S, offset].split()]
    seen = sdpa_weights(q, k, mask=Causal(), query_offset=offset, backend=backend) > 0
    np.testing.assert_array_equal(seen, np.broadcast_to(expected, (2, 6, L, S)))


@pytest.mark.parametrize(
    "mask", [*POSITIONAL, ~Causal(), Causal() | FirstTokens(2), Causal() & KeyLengths(3)], ids=repr
)
def test_rule_12_unset_offset_names_both_spellings_where_lengths_differ(backend, mask):
    with pytest.raises(ValueError, match=r'query_offset.*L = 5 and S = 7.*"start".*"end"'):
        sdpa(*qkv(), mask=mask, backend=backend)
    with pytest.raises(ValueError, match="query_offset"):
        sdpa(*qkv(), bias=ALiBi(0.5), backend=backend)
    sdpa(*qkv(L=7), mask=mask, backend=backend)


@pytest.mark.parametrize(
    "mask", [None, np.ones((5, 7), bool), KeyLengths(3), KeyStarts(3), QueryLengths(3), Segments([0] * 5, [0] * 7),
             Packed([5], [7]), FirstTokens(2), Tree([-1] * 5), MaskFunction(lambda b, h, i, j: j <= i)],
)  # fmt: skip
def test_rule_12_nothing_else_needs_an_offset(backend, mask):
    sdpa(*qkv(), mask=mask, backend=backend)


def test_rule_12_offset_is_an_array_over_the_batch(backend):
    q, k, v = qkv(B=3)
    offsets = np.array([2, -2, 0], np.int8)
    output = sdpa(q, k, v, mask=Causal(), query_offset=offsets, backend=backend)
    keep = visible(lambda b, h, i, j: j <= i + int(offsets[b]), 3, 6, 5, 7)
    agree(output, attention(q, k, v, keep=keep)[0])
    assert not output[1, :, :2].any()  # negative positions see no key
    twice = [np.stack([x, x]) for x in (q, k, v)]  # batch (2, 3): arrays broadcast from the right
    np.testing.assert_array_equal(
        sdpa(*twice, mask=Causal(), query_offset=offsets, backend=backend), np.stack([output] * 2)
    )
    np.testing.assert_array_equal(
        sdpa(*twice, mask=Causal(), query_offset=offsets[:1], backend=backend)[0],
        sdpa(q, k, v, mask=Causal(), query_offset=2, backend=backend),
    )


def test_rule_12_end_counts_valid_keys_and_queries(backend):
    q, k, v = qkv(B=3)
    keys, queries = [4, 7, 1], [5, 2, 3]
    for mask, offset in (
        (Causal() & KeyLengths(keys), lambda b: keys[b] - 5),
        (KeyLengths(keys) & Causal() & QueryLengths(queries), lambda b: keys[b] - queries[b]),
        (Window(2, 0) & QueryLengths(queries), lambda b: 7 - queries[b]),
        (Causal() & KeyStarts(2), lambda b: 2),  # left padding moves no position
        (Causal() & KeyLengths(6) & np.ones((5, 7), bool), lambda b: 1),
    ):
        numbers = np.array([offset(b) for b in range(3)])
        expected = sdpa(q, k, v, mask=mask, query_offset=numbers, backend=backend)
        np.testing.assert_array_equal(sdpa(q, k, v, mask=mask, query_offset="end", backend=backend), expected)
    keep = visible(lambda b, h, i, j: j < keys[b] and j <= i + keys[b] - 5, 3, 6, 5, 7)
    agree(
        sdpa(q, k, v, mask=Causal() & KeyLengths(keys), query_offset="end", backend=backend),
        attention(q, k, v, keep=keep)[0],
    )


@pytest.mark.parametrize(
    "mask", [Causal() | KeyLengths(3), Causal() & ~KeyLengths(3), Causal() & (QueryLengths(2) | FirstTokens(1)),
             Causal() & KeyLengths(3) & KeyLengths(4), Causal() & KeyLengths(3) & ~KeyLengths(1)], ids=repr,
)  # fmt: skip
def test_rule_12_end_reads_only_lengths_joined_at_the_top(backend, mask):
    with pytest.raises(ValueError, match=r'query_offset="end"'):
        sdpa(*qkv(), mask=mask, query_offset="end", backend=backend)
    sdpa(*qkv(), mask=mask, query_offset="start", backend=backend)


def test_rule_12_alibi_counts_from_the_offset(backend):
    q, k, v = qkv()
    slopes = np.array([0.1, 0.2, 0.3, 0.4, 0.5, -0.6])
    for offset in (0, 2, [2, -1]):
        position = np.arange(5) + np.reshape(offset, (-1, 1, 1))
        bias = np.broadcast_to(-slopes[:, None, None] * abs(position[..., None] - np.arange(7)), (2, 6, 5, 7))
        expected = attention(q, k, v, bias=bias)[0]
        agree(sdpa(q, k, v, bias=ALiBi(slopes), query_offset=offset, backend=backend), expected)
        agree(
            sdpa(q, k, v, bias=(ALiBi(slopes / 2), ALiBi(slopes / 2)), query_offset=offset, backend=backend), expected
        )
        agree(
            sdpa(q, k, v, bias=(ALiBi(slopes), -bias), query_offset=offset, backend=backend),
            sdpa(q, k, v, backend=backend),
        )


def test_rule_12_alibi_slopes_of_the_paper():
    np.testing.assert_array_equal(alibi_slopes(8), 0.5 ** np.arange(1, 9))  # 1/2, 1/4, ..., 1/256
    np.testing.assert_allclose(alibi_slopes(16), 0.5 ** (np.arange(1, 17) / 2), rtol=1e-15)
    np.testing.assert_allclose(alibi_slopes(12), [*0.5 ** np.arange(1.0, 9), *0.5 ** np.arange(0.5, 4)], rtol=1e-15)
    assert alibi_slopes(1).tolist() == [1 / 256]
    assert alibi_slopes(0).shape == (0,)


# Two rows of three documents each; document lengths of queries and keys differ, and both leave a tail.
Q_LENGTHS, K_LENGTHS = np.array([[2, 3, 1], [1, 0, 4]]), np.array([[4, 2, 1], [2, 3, 5]])
SIZES = {"L": 8, "S": 11}


def documents(b):
    """Return for each document of row b its slices of queries and of keys."""
    q, k = np.cumsum([0, *Q_LENGTHS[b]]), np.cumsum([0, *K_LENGTHS[b]])
    return [(slice(*q[d : d + 2]), slice(*k[d : d + 2])) for d in range(3)]


@pytest.mark.parametrize("offset", ["start", "end", 1, -1, [3, 0]], ids=str)
@pytest.mark.parametrize(
    "options", [{}, *({"mask": m} for m in (*POSITIONAL, FirstTokens(2), Window(0, 1) | FirstTokens(1) & Causal())),
                {"bias": ALiBi([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])}, {"mask": Causal(), "bias": ALiBi(0.25)}], ids=repr,
)  # fmt: skip
def test_rule_12_packed_equals_a_loop_over_documents(backend, options, offset):
    q, k, v = qkv(**SIZES)
    mask = Packed(Q_LENGTHS, K_LENGTHS)
    packed = options | {"mask": mask & options["mask"] if "mask" in options else mask}
    output = sdpa(q, k, v, query_offset=offset, backend=backend, **packed)
    for b in range(2):
        own = offset[b] if isinstance(offset, list) else offset
        for queries, keys in documents(b):
            prefix = {"mask": Prefix(min(2, keys.stop - keys.start))} if isinstance(options.get("mask"), Prefix) else {}
            arrays = q[b, :, queries], k[b, :, keys], v[b, :, keys]
            agree(output[b, :, queries], sdpa(*arrays, query_offset=own, backend="reference", **options | prefix))
        assert not output[b, :, Q_LENGTHS[b].sum() :].any()  # the tail belongs to no document


def test_rule_12_packed_lengths_may_be_shared_by_the_batch(backend):
    q, k, v = qkv(**SIZES)
    mask = Packed(Q_LENGTHS[0], K_LENGTHS[0]) & Causal()
    both = Packed([Q_LENGTHS[0]] * 2, [K_LENGTHS[0]] * 2) & Causal()
    for offset in ("start", "end"):
        options = {"query_offset": offset, "backend": backend}
        np.testing.assert_array_equal(sdpa(q, k, v, mask=mask, **options), sdpa(q, k, v, mask=both, **options))


def test_rule_12_packed_asks_for_an_offset_only_where_a_document_differs(backend):
    q, k, v = qkv(L=5, S=5)
    expected = sdpa(q, k, v, mask=Packed([2, 3]) & Causal(), query_offset="start", backend=backend)
    np.testing.assert_array_equal(sdpa(q, k, v, mask=Packed([2, 3]) & Causal(), backend=backend), expected)
    q, k, v = qkv(L=5, S=7)  # unequal tails ask for nothing: no document is unequal
    sdpa(q, k, v, mask=Packed([2, 3]) & Causal(), backend=backend)
    with pytest.raises(ValueError, match=r'document.*"start".*"end"'):
        sdpa(q, k, v, mask=Packed([2, 3], [3, 2]) & Causal(), backend=backend)


def test_rule_12_functions_get_plain_indices_in_packed_rows(backend):
    q, k, v = qkv(**SIZES)
    packed = Packed(Q_LENGTHS, K_LENGTHS)
    inside = packed.dense(8, 11, batch=(2,), heads=6)
    keep = inside & visible(lambda b, h, i, j: (i + j) % 2 == 0, 2, 6, 8, 11)
    mask = packed & MaskFunction(lambda b, h, i, j: (i + j) % 2 == 0)
    agree(sdpa(q, k, v, mask=mask, backend=backend), attention(q, k, v, keep=keep)[0])

    def score_mod(s, b, h, i, j):
        return s - 0.1 * i + 0.3 * j

    options = {"mask": packed, "score_mod": score_mod, "backend": backend}
    agree(sdpa(q, k, v, **options), attention(q, k, v, keep=inside, score_mod=score_mod)[0])


@pytest.mark.parametrize(
    "mask", [Packed([2, 3]) | Causal(), Causal() & ~Packed([2, 3]), Packed([2, 3]) & Packed([1]) & Causal()]
)
def test_rule_12_packed_counts_only_at_the_top(backend, mask):
    with pytest.raises(ValueError, match="Packed"):
        sdpa(*qkv(S=5), mask=mask, backend=backend)


def test_rule_12_tree_nodes_are_the_last_keys(backend):
    q, k, v = qkv()
    parents = [[-1, 0, 0, 1, -1], [-1, -1, 1, 1, 3]]
    ancestors = [[{0}, {0, 1}, {0, 2}, {0, 1, 3}, {4}], [{0}, {1}, {1, 2}, {1, 3}, {1, 3, 4}]]
    keep = visible(lambda b, h, i, j: j < 2 or j - 2 in ancestors[b][i], 2, 6, 5, 7)
    agree(sdpa(q, k, v, mask=Tree(parents), backend=backend), attention(q, k, v, keep=keep)[0])


def test_rule_12_segments_serve_both_sides_when_lengths_agree(backend):
    q, k, v = qkv(L=7)
    ids = [[0, 0, 1, 1, 1, 0, 2], [5, 5, 5, 6, 6, 6, 6]]
    keep = visible(lambda b, h, i, j: ids[b][i] == ids[b][j], 2, 6, 7, 7)
    agree(sdpa(q, k, v, mask=Segments(ids), backend=backend), attention(q, k, v, keep=keep)[0])
    assert not sdpa_stages(q, k, v, mask=Segments([-1] * 7, [1] * 7)).keep.any()
