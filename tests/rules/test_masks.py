"""Rules 10, 11 and 13 of the semantics: boolean masks, mask objects against their definitions, checks and pictures."""

import itertools
import operator
import re
from pathlib import Path

import loopback_backend
import numpy as np
import pytest
from naive import agree, attention, qkv, visible

import sdpa_ref
from sdpa_ref import (
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
    sdpa,
    sdpa_weights,
)
from sdpa_ref.cli.errors import UsageError
from sdpa_ref.cli.mask_expression import parse_mask
from sdpa_ref.masks import RULES
from sdpa_ref.masks.looking import picture
from sdpa_ref.testing.case_options import BY_WORD, MASKS
from sdpa_ref.testing.cases import case

ROOT = Path(__file__).parents[2]

N = [2, 6]  # a length for each of the two batch entries
Q_IDS, K_IDS = [0, 0, 4, 4, 1], [4, 0, 0, 9, 9, 1, 1]
SPLIT_IDS = [4, 0, 4, 9, 0, 1, 1]  # segments in several pieces: no interval says this
PARENTS = [-1, 0, 0, 1, 3]


def is_ancestor(i, node):
    while i != node and i >= 0:
        i = PARENTS[i]
    return i == node


def document(index, lengths):
    """Return which document the index lies in, None in the tail."""
    return next((d for d, end in enumerate(np.cumsum(lengths)) if index < end), None)


def same_document(i, j):
    return document(i, [2, 0, 2]) is not None and document(i, [2, 0, 2]) == document(j, [1, 2, 3])


# The mask, and rule(b, h, i, j, p) with p = i + offset, as the table of the semantics states it.
TABLE = {
    "Causal": (Causal(), lambda b, h, i, j, p: j <= p),
    "Window": (Window(2, 1), lambda b, h, i, j, p: p - 2 <= j <= p + 1),
    "Window, itself": (Window(0, 0), lambda b, h, i, j, p: j == p),
    "Window, open left": (Window(None, 1), lambda b, h, i, j, p: j <= p + 1),
    "Window, open right": (Window(1, None), lambda b, h, i, j, p: p - 1 <= j),
    "Window, open": (Window(None, None), lambda b, h, i, j, p: True),
    "KeyLengths": (KeyLengths(N), lambda b, h, i, j, p: j < N[b]),
    "KeyLengths, one": (KeyLengths(4), lambda b, h, i, j, p: j < 4),
    "KeyStarts": (KeyStarts(N), lambda b, h, i, j, p: j >= N[b]),
    "QueryLengths": (QueryLengths([2, 5]), lambda b, h, i, j, p: i < [2, 5][b]),
    "Segments": (Segments(Q_IDS, K_IDS), lambda b, h, i, j, p: Q_IDS[i] == K_IDS[j]),
    "Segments, split": (Segments(Q_IDS, SPLIT_IDS), lambda b, h, i, j, p: Q_IDS[i] == SPLIT_IDS[j]),
    "Packed": (Packed([2, 0, 2], [1, 2, 3]), lambda b, h, i, j, p: same_document(i, j)),
    "Prefix": (Prefix(N), lambda b, h, i, j, p: j < N[b] or j <= p),
    "Chunked": (Chunked(3), lambda b, h, i, j, p: j <= p and j // 3 == p // 3),
    "FirstTokens": (FirstTokens(2), lambda b, h, i, j, p: j < 2),
    "FirstTokens, many": (FirstTokens(10**12), lambda b, h, i, j, p: True),
    "Tree": (Tree(PARENTS), lambda b, h, i, j, p: j < 2 or is_ancestor(i, j - 2)),
    "MaskFunction": (
        MaskFunction(lambda b, h, i, j: (b + h + i + j) % 3 > 0),
        lambda b, h, i, j, p: (b + h + i + j) % 3 > 0,
    ),
}
PIECES = {name: mask for name, (mask, _) in TABLE.items()}
OFFSETS = [0, 2, -3, 9, [1, -1]]


def of_batch(offset, b):
    return offset[b] if isinstance(offset, list) else offset


@pytest.mark.parametrize(
    "shape", [(7,), (5, 7), (5, 1), (1, 1, 7), (6, 5, 7), (2, 1, 5, 7), (2, 6, 5, 7), (1, 1, 1, 1), ()]
)
def test_rule_10_boolean_array_broadcasts(backend, shape):
    q, k, v = qkv()
    mask = np.random.default_rng(0).random(shape) < 0.6
    full = np.broadcast_to(mask, (2, 6, 5, 7))
    np.testing.assert_array_equal(
        sdpa(q, k, v, mask=mask, backend=backend), sdpa(q, k, v, mask=full.copy(), backend=backend)
    )
    agree(sdpa(q, k, v, mask=mask, backend=backend), attention(q, k, v, keep=full)[0])


def test_rule_10_true_means_may_attend_everywhere(backend):
    q, k, _ = qkv(np.float32)
    keep = np.eye(7, dtype=bool)[:5]
    identity = np.broadcast_to(np.eye(7, dtype=np.float32), (2, 3, 7, 7))
    for weights in (sdpa_weights(q, k, mask=keep, backend=backend), sdpa(q, k, identity, mask=keep, backend=backend)):
        np.testing.assert_array_equal(weights, np.broadcast_to(keep, (2, 6, 5, 7)))


@pytest.mark.parametrize("dtype", ["i1", "i8", "u1", "f2", "f4", "f8", "c8", "O", "U1"])
def test_rule_10_any_other_type_is_an_error(backend, dtype):
    q, k, v = qkv()
    hint = {"f": "bias=", "i": r"mask\.astype\(bool\)", "u": r"mask\.astype\(bool\)"}.get(dtype[0], "mask")
    with pytest.raises(TypeError, match=hint):
        sdpa(q, k, v, mask=np.ones((5, 7)).astype(dtype), backend=backend)


@pytest.mark.parametrize("name", RULES)
def test_rule_11_every_mask_is_exported_defined_documented_drawn_parsed_and_tried(name):
    assert getattr(sdpa_ref, name) is RULES[name]
    assert name in sdpa_ref.__all__
    assert name in {entry.partition(",")[0] for entry in TABLE}
    rows = (ROOT / "docs/semantics.md").read_text(encoding="utf-8").splitlines()
    assert any(re.match(rf"\| .*`{name}\(", row) for row in rows)
    assert re.search(rf">>> print\(.*{name}\(.*\.show\(", RULES[name].__doc__)
    (word,) = (word for word, rule in BY_WORD.items() if rule is RULES[name])
    assert word in MASKS
    assert name in repr(case(0, L=5, S=7, mask=(word,)).options["mask"])
    with pytest.raises(UsageError, match=f"{name} (must be called|takes a Python function)"):
        parse_mask(name)


@pytest.mark.parametrize("offset", OFFSETS, ids=str)
@pytest.mark.parametrize("name", TABLE)
def test_rule_11_mask_object_is_its_definition(backend, name, offset):
    q, k, v = qkv()
    mask, rule = TABLE[name]
    offset = 0 if name == "Packed" else offset  # it has its own tests, with positions inside documents
    expected = visible(lambda b, h, i, j: rule(b, h, i, j, i + of_batch(offset, b)), 2, 6, 5, 7)
    dense = mask.dense(5, 7, batch=(2,), heads=6, query_offset=offset)
    assert dense.dtype == bool
    np.testing.assert_array_equal(dense, expected)
    output, _, weights = attention(q, k, v, keep=expected)
    agree(sdpa(q, k, v, mask=mask, query_offset=offset, backend=backend), output)
    got = sdpa_weights(q, k, mask=mask, query_offset=offset, backend=backend)
    agree(got, weights)
    assert not got[~expected].any()


def test_rule_11_masks_combine_like_sets(backend):
    q, k, _ = qkv(np.float32)
    dense = {name: mask.dense(5, 7, batch=(2,), heads=6, query_offset=1) for name, mask in PIECES.items()}
    for (a, left), (b, right) in itertools.product(PIECES.items(), repeat=2):
        for combine in (operator.and_, operator.or_):
            for mask, expected in (
                (combine(left, right), combine(dense[a], dense[b])),
                (combine(left, ~right), combine(dense[a], ~dense[b])),
                (~combine(left, right), ~combine(dense[a], dense[b])),
            ):
                if "Packed" in (a, b) and (a, b) != ("Packed", "Packed"):
                    continue  # positions then count within documents
                if {name.partition(",")[0] for name in (a, b)} == {"Tree", "KeyLengths"}:
                    continue  # the tree's nodes are then the last keys that exist
                np.testing.assert_array_equal(mask.dense(5, 7, batch=(2,), heads=6, query_offset=1), expected)
                weights = sdpa_weights(q, k, mask=mask, query_offset=1, backend=backend)
                np.testing.assert_array_equal(weights > 0, expected, err_msg=repr(mask))


@pytest.mark.parametrize("name", TABLE)
def test_rule_11_masks_combine_with_boolean_arrays(name):
    mask, array = PIECES[name], np.random.default_rng(1).random((6, 5, 7)) < 0.5
    own, options = mask.dense(5, 7, batch=(2,), heads=6, query_offset=0), {"batch": (2,), "heads": 6, "query_offset": 0}
    for combine in (operator.and_, operator.or_):
        for both in (combine(mask, array), combine(array, mask)):
            np.testing.assert_array_equal(both.dense(5, 7, **options), combine(own, array))
    np.testing.assert_array_equal((~~mask).dense(5, 7, **options), own)


def test_rule_11_attention_sinks_of_streaming_models():
    mask = Window(1, 0) & Causal() | FirstTokens(2) & Causal()
    assert mask.show(6, 6).split()[1:] == "0 #..... 1 ##.... 2 ###... 3 ####.. 4 ##.##. 5 ##..##".split()


def test_rule_11_intervals_stay_intervals(monkeypatch):
    """What backends see of these masks is a few integers a row, never an array of pairs."""
    seen, forward = [], loopback_backend.forward
    monkeypatch.setattr(
        loopback_backend, "forward", lambda problem, want: seen.append(problem) or forward(problem, want)
    )
    intervals = [mask for name, mask in PIECES.items() if name not in ("Segments, split", "Tree", "MaskFunction")]
    sinks = Window(1, 0) & Causal() | FirstTokens(2) & Causal()
    padding = np.array([[1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0]], bool)[:, None, None]
    for left, right in itertools.product([*intervals, sinks, padding], [*intervals, sinks]):
        sdpa(*qkv(), mask=left & right, query_offset="start", backend="loopback")
        problem = seen.pop()
        assert problem.keep is None or isinstance(left, np.ndarray)
        assert not problem.blockwise
        for bound in problem.intervals or ():
            assert bound.shape == (2, 5)
            assert ((bound >= 0) & (bound <= 7)).all()


@pytest.mark.parametrize("name", TABLE)
def test_rule_13_pictures_show_the_mask(name):
    mask, offset = PIECES[name], 1
    dense = mask.dense(5, 7, batch=(2,), heads=6, query_offset=offset)
    picture = mask.show(5, 7, batch=(2,), heads=6, query_offset=offset)
    rows = [line.split()[-1] for line in picture.splitlines() if "#" in line or "." in line]
    assert rows == ["".join("#" if kept else "." for kept in row) for row in dense.reshape(-1, 7)]
    for i, j in np.ndindex(5, 7):
        words = mask.explain(i, j, 5, 7, b=1, h=2, batch=(2,), heads=6, query_offset=offset)
        assert ("may not attend" in words) != dense[1, 2, i, j]
        assert repr(mask) in words


def test_rule_13_long_pictures_say_what_they_leave_out():
    lines = Causal().show(1000, 1000).splitlines()
    assert len(lines) < 80
    assert "1000 x 1000 in all" in lines[0]


@pytest.mark.parametrize(("L", "S"), [(200, 200), (64, 97), (65, 1), (3, 1000)])
def test_rule_13_a_mark_of_a_long_picture_is_any_of_its_pairs(L, S):
    keep = np.random.default_rng(0).random((L, S)) < 0.02
    rows, keys = -(-L // 64), -(-S // 96)
    assert picture(keep).splitlines()[-len(range(0, L, rows)) :] == [
        f"{i:3} " + "".join("#" if keep[i : i + rows, j : j + keys].any() else "." for j in range(0, S, keys))
        for i in range(0, L, rows)
    ]


WRONG = {
    "keys beyond S": (KeyLengths(8), ValueError, r"KeyLengths must be in \[0, S\] = \[0, 7\], got 8"),
    "starts beyond S": (KeyStarts([0, 8]), ValueError, r"KeyStarts must be in \[0, S\] = \[0, 7\], got 8"),
    "prefix beyond S": (Prefix(8), ValueError, r"Prefix must be in \[0, S\] = \[0, 7\], got 8"),
    "queries beyond L": (QueryLengths(6), ValueError, r"QueryLengths must be in \[0, L\] = \[0, 5\], got 6"),
    "lengths of another batch": (KeyLengths([1, 2, 3]), ValueError, r"broadcast to \(2,\), got \(3,\)"),
    "ids of another length": (Segments([0] * 5, [0] * 6), ValueError, r"k_ids.* S = 7, got shape \(6,\)"),
    "ids without k_ids": (Segments([0] * 5), ValueError, r"k_ids.* S = 7, got shape \(5,\)"),
    "too many queries": (Packed([3, 3], [3, 3]), ValueError, r"q_lengths add up to 6, more than L = 5"),
    "too many keys": (Packed([3, 2], [4, 4]), ValueError, r"k_lengths add up to 8, more than S = 7"),
    "tree of another size": (Tree([-1, 0]), ValueError, r"parents.* L = 5, got shape \(2,\)"),
    "function without booleans": (MaskFunction(lambda b, h, i, j: i - j), TypeError, "must return booleans, got int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rule_13_masks_are_checked_against_the_call(backend, case):
    mask, error, message = WRONG[case]
    for given in (mask, mask & Causal(), Causal() | ~mask):
        with pytest.raises(error, match=message):
            sdpa(*qkv(), mask=given, query_offset=0, backend=backend)
        if hasattr(mask, "n") or isinstance(mask, Segments | Packed | Tree):
            with pytest.raises(error, match="mask"):
                given.dense(5, 7, batch=(2,), query_offset=0)
