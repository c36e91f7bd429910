"""Pages and tables: what they mean, what is never looked at, and bad input."""

import copy
import pickle
import sys

import numpy as np
import pytest
import strict_cupy

from sdpa_ref import Paged, Quantized

RNG = np.random.default_rng(0)
PAGES = RNG.standard_normal((5, 2, 3, 4))
TABLE = np.array([[4, 0, 9], [2, 2, -1]])


def plain(pages, table, lengths, layout="HLE"):
    """Return the dense array by the definition, slot by slot."""
    pages = pages if layout == "HLE" else pages.swapaxes(1, 2)
    _, H, P, E = pages.shape
    dense = np.zeros((*table.shape[:-1], H, table.shape[-1] * P, E), pages.dtype)
    for b in np.ndindex(table.shape[:-1]):
        for j in range(np.broadcast_to(lengths, table.shape[:-1])[b]):
            dense[b][:, j] = pages[table[b][j // P], :, j % P]
    return dense if layout == "HLE" else dense.swapaxes(-2, -3)


@pytest.mark.parametrize("dtype", [np.float16, ">f4", np.float64])
@pytest.mark.parametrize("integers", [np.int8, np.int32, np.uint64])
@pytest.mark.parametrize("layout", ["HLE", "LHE"])
def test_pages_are_gathered_and_nothing_else(layout, integers, dtype):
    pages = PAGES.astype(dtype)
    pages[[1, 3]] = np.nan  # pages that nobody needs
    pages[0, :, 2:] = np.nan  # slots beyond the length
    pages = pages if layout == "HLE" else pages.swapaxes(1, 2)
    table = np.array([[4, 0, 9], [2, 2, 77]], integers)
    paged = Paged(pages, table, np.array([5, 6], integers), layout)
    assert paged.shape == paged.dense().shape == ((2, 2, 9, 4) if layout == "HLE" else (2, 9, 2, 4))
    assert paged.ndim == 4
    assert paged.dtype == pages.dtype
    assert paged.dense().dtype == pages.dtype.newbyteorder("=")
    assert (paged.dense() == plain(pages, table, [5, 6], layout)).all()
    assert paged.pages is pages
    assert paged.table is table
    assert paged.page == 3
    assert paged.nbytes == pages.nbytes + table.nbytes + 16


@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,)])
def test_batch_axes_and_lengths_that_broadcast(batch):
    table = RNG.integers(0, 5, (*batch, 2))
    paged = Paged(PAGES, table, 4)
    assert paged.shape == (*batch, 2, 6, 4)
    assert paged.lengths.shape == batch
    assert (paged.dense() == plain(PAGES, table, 4)).all()


def test_no_pages_and_no_table():
    assert Paged(PAGES, np.zeros((2, 0), int), 0).dense().shape == (2, 2, 0, 4)
    empty = Paged(PAGES[:0], [[-1, 5]], 0)
    assert empty.dense().shape == (1, 2, 6, 4)
    assert not empty.dense().any()
    assert "no batch entry" in repr(Paged(PAGES, np.zeros((0, 1), int), 0))


@pytest.mark.parametrize(("table", "lengths", "where"), [
    ([[4, 0, 9], [2, -1, 0]], [6, 4], "got -1 at m = 1 of b = 1"),
    ([[4, 0, 5], [2, -1, 0]], [7, 3], "got 5 at m = 2 of b = 0"),
    ([[[4, 0], [2**40, 1]]], [[0, 1]], r"at m = 0 of b = \(0, 1\)"),
    ([-7], 1, "got -7 at m = 0$"),
])  # fmt: skip
def test_a_needed_entry_that_names_no_page_is_an_error(table, lengths, where):
    with pytest.raises(ValueError, match=rf"table must name pages in \[0, 5\) .*{where}"):
        Paged(PAGES, table, lengths).dense()


WRONG = {
    "integer pages": (
        {"pages": PAGES.astype(np.int8)},
        TypeError,
        ["pages must be float16", r"int8.*=Quantized\("],
    ),
    "complex pages": ({"pages": PAGES.astype(complex)}, TypeError, ["pages must be float16", "got complex128$"]),
    "axes of pages": ({"pages": PAGES[0]}, ValueError, [r"\(N, Hkv, P, E\)", r"got \(2, 3, 4\)"]),
    "pages without slots": ({"pages": PAGES[:, :, :0]}, ValueError, ["P of at least 1"]),
    "layout": ({"layout": "NHD"}, ValueError, ["layout must be", '"HLE"', '"LHE"', "got 'NHD'"]),
    "float table": ({"table": TABLE * 1.0}, TypeError, ["table must be integers, got float64"]),
    "table without axes": ({"table": 3}, ValueError, ["table must have at least one axis"]),
    "ragged table": ({"table": [[1], [1, 2]]}, ValueError, ["table must have one shape"]),
    "float lengths": ({"lengths": [1.0, 2.0]}, TypeError, ["lengths must be integers, got float64"]),
    "shape of lengths": ({"lengths": [1, 2, 3]}, ValueError, [r"batch axes \(2,\)", r"got shape \(3,\)"]),
    "long": ({"lengths": [1, 10]}, ValueError, [r"lengths must be in \[0, M \* P\] = \[0, 9\], got 10"]),
    "negative": ({"lengths": -1}, ValueError, [r"lengths must be in \[0, .* got -1"]),
    "huge": (
        {"lengths": np.array([2**63, 1], np.uint64)},
        ValueError,
        ["lengths must be in .*got 9223372036854775808"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors(what):
    changed, error, words = WRONG[what]
    with pytest.raises(error) as raised:
        Paged(**{"pages": PAGES, "table": TABLE, "lengths": [1, 2]} | changed)
    for word in words:
        raised.match(word)


def test_many_lengths_are_checked_as_few_are():
    table = np.zeros((100, 3), int)
    assert Paged(PAGES, table, np.full(100, 9)).lengths.sum() == 900
    for wrong in (-1, 10):
        with pytest.raises(ValueError, match=f"lengths must be in .* got {wrong}"):
            Paged(PAGES, table, np.where(np.arange(100) == 50, wrong, 9))


def test_it_is_frozen_and_copies_lengths_alone():
    lengths = np.array([5, 6])
    paged = Paged(PAGES, TABLE, lengths)
    lengths[:] = 99
    assert paged.lengths.tolist() == [5, 6]
    assert not paged.lengths.flags.writeable
    with pytest.raises(AttributeError):
        paged.table = TABLE
    for twin in (copy.copy(paged), copy.deepcopy(paged), pickle.loads(pickle.dumps(paged))):
        assert (twin.dense() == paged.dense()).all()
        assert not twin.lengths.flags.writeable
        assert twin != paged
        assert hash(paged) is not None


def test_pages_of_codes_are_gathered_with_their_scales():
    codes, ids = RNG.integers(-128, 128, (6, 2, 4, 8), np.int8), [[5, 0, -1], [3, 3, 9]]
    for shape in [(), (8,), (4, 1), (6, 2, 4, 4), (1, 2, 1, 8), (6, 1, 2, 1), (3, 2, 1, 8), (2, 1, 1)]:
        scale = RNG.standard_normal(shape)
        for offset in (None, RNG.standard_normal((6, 1, 1, 1))):
            whole = Quantized(codes, scale, offset)
            paged = Paged(whole, ids, [6, 8])
            assert paged.dtype == np.float64
            assert paged.shape == (2, 2, 12, 8)
            np.testing.assert_array_equal(paged.dense(), plain(whole.dense(), np.array(ids), [6, 8]))


def test_pages_on_a_device(monkeypatch):
    cupy = strict_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    paged = Paged(cupy.asarray(PAGES), TABLE, [5, 3])
    assert (paged.dense().get() == plain(PAGES, TABLE, [5, 3])).all()
    codes = RNG.integers(0, 256, (5, 2, 3, 4), np.uint8)
    scale = RNG.random((5, 2, 1, 2))
    stored = Quantized(cupy.asarray(codes), cupy.asarray(scale), zero=8, bits=4)
    np.testing.assert_array_equal(stored.dense().get(), Quantized(codes, scale, zero=8, bits=4).dense())
    expected = plain(Quantized(codes, scale, zero=8, bits=4).dense(), TABLE, [5, 3])
    assert (Paged(stored, TABLE, [5, 3]).dense().get() == expected).all()
    for wrong in ({"table": cupy.asarray(TABLE)}, {"lengths": cupy.asarray(np.array([1, 2]))}):
        with pytest.raises(TypeError, match=rf"{next(iter(wrong))} must be readable by the host"):
            Paged(**{"pages": PAGES, "table": TABLE, "lengths": 1} | wrong)
    with pytest.raises(TypeError, match="codes and scale must be of one kind, got numpy and cupy"):
        Quantized(codes, cupy.asarray(scale), bits=4)


def test_what_it_shows():
    assert repr(Paged(PAGES, TABLE, [5, 6])) == "Paged((2, 2, 9, 4), float64, 5 pages of 3, lengths 5..6)"
    stored = Paged(Quantized(np.zeros((5, 3, 2, 4), np.int8), 1.0), TABLE, 0, "LHE")
    assert repr(stored) == 'Paged((2, 9, 2, 4), codes int8, 5 pages of 3, lengths 0..0, layout="LHE")'
