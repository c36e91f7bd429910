"""Attention over pages and codes, held to attention over the dense array that they mean."""

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

import sdpa_ref as sr
from sdpa_ref.testing import error_budget

B, Hq, Hkv, E, Ev = 2, 6, 2, 40, 24
CODES = ("int8", "uint8", "nibble", "float8_e4m3fn", "float8_e5m2")
SCALES = {
    "a token": lambda S, E: (S, 1),
    "groups": lambda S, E: (S, E // 8),
    "channels of runs of tokens": lambda S, E: (S // 3, E),
    "channels": lambda S, E: (1, E),
    "an entry, head and token": lambda S, E: (B, Hkv, S, 1),
    "a head": lambda S, E: (Hkv, 1, 1),
    "one": lambda S, E: (1,),
}
OPTIONS = {
    "none": {},
    "causal": {"mask": sr.Causal(), "query_offset": "end"},
    "window and first tokens": {"mask": sr.Causal() & (sr.Window(20, 0) | sr.FirstTokens(3)), "query_offset": "end"},
    "boolean with holes": {"mask": lambda r, L, S: r.random((B, 1, L, S)) < 0.7},
    "rules": {"mask": lambda r, L, S: sr.MaskFunction(lambda b, h, i, j: (i + j + h) % 3 > 0)},
    "bias": {"bias": lambda r, L, S: r.standard_normal((Hq, L, S)).astype(np.float32)},
    "ALiBi": {"bias": sr.ALiBi(sr.alibi_slopes(Hq)), "query_offset": "end"},
    "softcap": {"softcap": 3.0},
    "sink": {"sink": np.linspace(-1, 1, Hq)},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s - 0.1 * abs(i - j)},
    "dropout": {"dropout": sr.Dropout(0.3, 5)},
}


def options_for(name, rng, L, S):
    """Return keywords, those that depend on the sizes made for them."""
    return {
        keyword: value(rng, L, S) if keyword in ("mask", "bias") and callable(value) else value
        for keyword, value in OPTIONS[name].items()
    }


def coded(rng, shape, code="int8", scale=(1,), offset=None, dtype=np.float32):
    """Return a `Quantized` of random codes whose numbers are of size 1."""
    if code == "nibble":
        codes, zero, bits, most = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8), 8, 4, 8
    elif code.startswith("float8"):
        codes, zero, bits, most = rng.standard_normal(shape).astype(getattr(ml_dtypes, code)), 0, 8, 1
    else:
        low = -128 if code == "int8" else 0
        codes, zero, bits, most = rng.integers(low, low + 256, shape).astype(code), 3 if code == "uint8" else 0, 8, 128
    part = (rng.random(scale) * 2 / most).astype(dtype)
    shift = None if offset is None else (rng.standard_normal(offset) / 8).astype(dtype)
    return sr.Quantized(codes, part, shift, zero=zero, bits=bits)


def rounded(quantized, acc=np.float32):
    """Return the dense array with each operation rounded once: what kernels make of codes."""
    codes = quantized.codes
    if quantized.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(quantized.shape)

    def spread(part):
        for axis in range(-part.ndim, 0):
            part = part.repeat(quantized.shape[axis] // part.shape[axis], axis)
        return part.astype(acc)

    numbers = (codes.astype(np.float64) - quantized.zero).astype(acc) * spread(quantized.scale)
    return numbers if quantized.offset is None else numbers + spread(quantized.offset)


def in_pages(rng, dense, P, lengths, spare=2):
    """Return a `Paged` of these keys in shuffled pages: NaN in free slots and pages, and entries that name none."""
    S = dense.shape[-2]
    M = -(-S // P)
    table = rng.permutation(B * M + spare)[: B * M].reshape(B, M).astype(np.int32)
    pages = np.full((B * M + spare, dense.shape[1], P, dense.shape[-1]), np.nan, dense.dtype)
    for b, n in enumerate(lengths):
        for j in range(n):
            pages[table[b, j // P], :, j % P] = dense[b, :, j]
        table[b, -(-n // P) :] = (-1, 2**30)[b % 2]
    return sr.Paged(pages, table, lengths)


def agree(got, query, key, value, **options):
    """Hold a result to the budget, which knows that codes are decoded with two roundings."""
    budget = error_budget(query, key, value, **options)
    assert np.all(abs(got.astype(np.float64) - budget.expected) <= budget.bound)


@pytest.mark.parametrize("L", [1, 2, 19])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("code", CODES)
def test_codes_are_the_numbers_that_they_mean(fast_backend, code, scale, L):
    rng, S = np.random.default_rng(len(code) + L), 150
    query = rng.standard_normal((B, Hq, L, E)).astype(np.float32)
    key = coded(rng, (B, Hkv, S, E), code, SCALES[scale](S, E), (S, 1) if L == 2 else None)
    value = coded(rng, (B, Hkv, S, Ev), code, SCALES[scale](S, Ev), (1, Ev) if L == 2 else None, np.float16)
    got = sr.sdpa(query, key, value, backend=fast_backend)
    agree(got, query, key, value)
    if fast_backend == "numba":
        np.testing.assert_array_equal(got, sr.sdpa(query, rounded(key), rounded(value), backend="numba"))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_codes_do_not_count_in_the_type_of_the_result(backend, dtype):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((B, Hq, 1, E)).astype(dtype)
    key, value = (coded(rng, (B, Hkv, 50, w), "int8", (50, 1), dtype=np.float64) for w in (E, Ev))
    got = sr.sdpa(query, key, value, backend=backend)
    assert got.dtype == dtype
    agree(got, query, key, value)


@pytest.mark.parametrize("L", [1, 17])
@pytest.mark.parametrize("P", [1, 3, 8, 16, 128, 256])
@pytest.mark.parametrize("option", OPTIONS)
def test_pages_have_the_bits_of_the_gathered_array(fast_backend, option, P, L):
    rng, lengths = np.random.default_rng(P), np.array([300, 210])
    dense = [rng.standard_normal((B, Hkv, 300, width)).astype(np.float32) for width in (E, Ev)]
    query = rng.standard_normal((B, Hq, L, E)).astype(np.float32)
    key, value = (in_pages(np.random.default_rng(1), x, P, lengths) for x in dense)
    S = key.shape[-2]
    options = options_for(option, rng, L, S)
    got = sr.sdpa(query, key, value, backend=fast_backend, **options)
    gathered = [np.concatenate([x, np.zeros((B, Hkv, S - 300, x.shape[-1]), x.dtype)], -2) for x in dense]
    mask = sr.KeyLengths(lengths)
    options["mask"] = options["mask"] & mask if "mask" in options else mask
    np.testing.assert_array_equal(got, sr.sdpa(query, *gathered, backend=fast_backend, **options))


@pytest.mark.parametrize("layout", ["HLE", "LHE"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_both_layouts_and_types(fast_backend, dtype, layout):
    rng, lengths = np.random.default_rng(0), np.array([70, 33])
    dense = [rng.standard_normal((B, Hkv, 70, width)).astype(dtype) for width in (E, Ev)]
    query = rng.standard_normal((B, Hq, 2, E)).astype(dtype)
    parts = [in_pages(np.random.default_rng(1), x, 8, lengths) for x in dense]
    if layout == "LHE":
        query = query.swapaxes(1, 2)
        parts = [sr.Paged(np.ascontiguousarray(x.pages.swapaxes(1, 2)), x.table, lengths, "LHE") for x in parts]
    got = sr.sdpa(query, *parts, layout=layout, backend=fast_backend)
    dense = [x.dense() for x in parts]
    expected = sr.sdpa(query, *dense, layout=layout, mask=sr.KeyLengths(lengths), backend=fast_backend)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("scale", [(20, Hkv, 8, 1), (20, 1, 1, 1), (10, Hkv, 4, 2), (8, 1), (1,)])
def test_pages_of_codes(fast_backend, scale, code):
    rng, lengths = np.random.default_rng(3), np.array([61, 17])
    pages = [coded(rng, (20, Hkv, 8, width), code, scale, (8, 1)) for width in (E, Ev)]
    table = rng.permutation(20)[:16].reshape(2, 8)
    key, value = (sr.Paged(x, table, lengths) for x in pages)
    for L in (1, 9):
        query = rng.standard_normal((B, Hq, L, E)).astype(np.float32)
        got = sr.sdpa(query, key, value, backend=fast_backend)
        agree(got, query, key, value)


def test_a_prefix_that_entries_share_is_read_where_it_lies(fast_backend):
    rng, lengths = np.random.default_rng(0), np.array([30, 25])
    pages = rng.standard_normal((5, Hkv, 8, E)).astype(np.float32)
    keys = sr.Paged(pages, [[0, 1, 2, 3], [0, 1, 2, 4]], lengths)
    query = rng.standard_normal((B, Hq, 1, E)).astype(np.float32)
    expected = sr.sdpa(query, keys.dense(), keys.dense(), mask=sr.KeyLengths(lengths), backend=fast_backend)
    np.testing.assert_array_equal(sr.sdpa(query, keys, keys, backend=fast_backend), expected)


@pytest.mark.parametrize("store", ["pages", "codes", "pages of codes"])
def test_one_query_has_the_bits_of_many(fast_backend, store):
    rng, S = np.random.default_rng(7), 1100  # more than a chunk
    query = rng.standard_normal((B, Hq, 40, E)).astype(np.float32)
    lengths, table = np.array([S, S]), rng.permutation(2 * 138).reshape(2, 138)
    parts = []
    for width in (E, Ev):
        if store == "codes":
            parts.append(coded(rng, (B, Hkv, S, width), "int8", (S, 1)))
            continue
        shape = (2 * 138, Hkv, 8, width)
        pages = rng.standard_normal(shape).astype(np.float32)
        parts.append(sr.Paged(pages if store == "pages" else coded(rng, shape, "nibble", (8, 1)), table, lengths))
    many = sr.sdpa(query, *parts, mask=sr.Causal(), query_offset=1000, backend=fast_backend)
    for i in (0, 13, 39):
        one = sr.sdpa(query[:, :, i : i + 1], *parts, mask=sr.Causal(), query_offset=1000 + i, backend=fast_backend)
        np.testing.assert_array_equal(one, many[:, :, i : i + 1])


class TestTables:
    """Entries of a table that are needed, and those that are not."""

    pages = np.random.default_rng(0).standard_normal((4, Hkv, 8, E)).astype(np.float32)
    query = np.random.default_rng(1).standard_normal((B, Hq, 2, E)).astype(np.float32)

    def call(self, table, lengths, backend, **options):
        keys = sr.Paged(self.pages, np.array(table), lengths)
        return sr.sdpa(self.query, keys, keys, backend=backend, **options)

    @pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
    def test_one_that_is_needed_is_named(self, backend, wrong):
        with pytest.raises(ValueError, match=rf"key: table\[1, 1\] is {wrong}, not one of the 4 pages"):
            self.call([[0, 1, 2], [3, wrong, 1]], [20, 12], backend)

    def test_one_beyond_the_lengths_is_not_looked_at(self, backend):
        good = self.call([[0, 1, 2], [3, 0, 0]], [20, 8], backend)
        np.testing.assert_array_equal(self.call([[0, 1, 2], [3, -7, 99]], [20, 8], backend), good)

    def test_one_that_a_window_has_left_is_not_looked_at(self, backend):
        window = {"mask": sr.Window(4, 0), "query_offset": "end"}
        good = self.call([[0, 1, 2], [0, 1, 3]], [24, 24], backend, **window)
        np.testing.assert_array_equal(self.call([[-1, 1, 2], [99, 1, 3]], [24, 24], backend, **window), good)
        with pytest.raises(ValueError, match=r"table\[0, 2\] is -1"):
            self.call([[0, 1, -1], [0, 1, 3]], [24, 24], backend, **window)

    def test_no_pages_for_nobody(self, backend):
        keys = sr.Paged(self.pages[:0], np.full((2, 3), -1), [0, 0])
        np.testing.assert_array_equal(sr.sdpa(self.query, keys, keys, backend=backend), 0)

    @pytest.mark.parametrize("integers", ["int8", "int16", "int32", "int64", "uint16", "uint64"])
    def test_any_integers_and_strides(self, backend, integers):
        table = np.zeros((6, 4), integers)[::-2, ::2]
        table[...] = np.array([[0, 1], [2, 3], [3, 1]])
        query = np.repeat(self.query[:1], 3, 0)
        keys = sr.Paged(self.pages, table, np.array([16, 9, 1], integers))
        dense = sr.sdpa(query, keys.dense(), keys.dense(), mask=sr.KeyLengths([16, 9, 1]), backend=backend)
        np.testing.assert_array_equal(sr.sdpa(query, keys, keys, backend=backend), dense)

    def test_lengths_join_those_of_the_mask(self, backend):
        got = self.call([[0, 1, 2]] * 2, [20, 12], backend, mask=sr.KeyLengths([7, 30 - 6]) & sr.Causal(),
                        query_offset="end")  # fmt: skip
        keys = sr.Paged(self.pages, [[0, 1, 2]] * 2, [7, 12]).dense()
        mask = sr.KeyLengths([7, 12]) & sr.Causal()
        expected = sr.sdpa(self.query, keys, keys, mask=mask, query_offset="end", backend=backend)
        np.testing.assert_array_equal(got, expected)

    def test_two_lengths_or_layouts_are_an_error(self, backend):
        pages = [sr.Paged(self.pages, [[0, 1]] * 2, n) for n in (9, 10)]
        with pytest.raises(ValueError, match="key and value must be Paged with the same lengths"):
            sr.sdpa(self.query, *pages, backend=backend)
        with pytest.raises(ValueError, match='key is Paged in layout "HLE", but the call has layout="LHE"'):
            sr.sdpa(self.query.swapaxes(1, 2), pages[0], pages[0], layout="LHE", backend=backend)


def test_gradients_are_refused(gradient_backend):
    x = np.zeros((Hkv, 8, 8), np.float32)
    keys = coded(np.random.default_rng(0), (Hkv, 8, 8))
    with pytest.raises(NotImplementedError, match=r"gradients need dense arrays.*pass value.dense\(\)"):
        sr.sdpa_vjp(x, x, keys, x, backend=gradient_backend)
    with pytest.raises(NotImplementedError, match=r"pass key.dense\(\)"):
        sr.sdpa_with_vjp(x, keys, x, backend=gradient_backend)


def test_out_shares_no_memory_with_any_part(backend):
    query, pages = np.zeros((1, 1, 1, 4), np.float32), np.zeros((2, 1, 4, 4), np.float32)
    keys = sr.Paged(pages, [[0, 1]], 8)
    with pytest.raises(ValueError, match="out must not share memory"):
        sr.sdpa(query, keys, keys, out=pages[1:, :, 2:3], backend=backend)


@pytest.mark.parametrize("scale", [(1,), (Hkv, 0, 1), (Hkv, 1, 1), (1, E)])
def test_no_keys_are_an_empty_row(backend, scale):
    keys = sr.Quantized(np.zeros((Hkv, 0, E), np.int8), np.ones(scale, np.float32))
    query = np.ones((Hq, 2, E), np.float32)
    state = sr.sdpa_state(query, keys, keys, backend=backend)
    np.testing.assert_array_equal(state.output, 0)
    np.testing.assert_array_equal(state.lse, -np.inf)
    pages = sr.Paged(np.zeros((3, Hkv, 4, E), np.float32), np.zeros((0,), int), 0)
    np.testing.assert_array_equal(sr.sdpa(query, pages, pages, backend=backend), 0)


def test_any_byte_order(backend):
    rng = np.random.default_rng(4)
    pages, query = rng.standard_normal((4, Hkv, 8, E)).astype(np.float32), np.ones((2, Hq, 1, E), np.float32)
    codes, scale = rng.integers(-9, 9, (Hkv, 16, E)).astype(np.int8), rng.random((16, 1)).astype(np.float16)
    table = np.array([[0, 1], [3, 2]], np.int32)
    there, here = (
        (
            sr.Paged(pages.astype(f"{order}f4"), table.astype(f"{order}i4"), 15),
            sr.Quantized(codes, scale.astype(f"{order}f2")),
        )
        for order in "><"
    )
    for foreign, native in zip(there, here, strict=True):
        got, expected = (sr.sdpa(query, x, x, backend=backend) for x in (foreign, native))
        np.testing.assert_array_equal(got, expected)


def test_states_and_weights_take_them(backend):
    rng = np.random.default_rng(2)
    query, key = rng.standard_normal((Hq, 3, E)).astype(np.float32), coded(rng, (Hkv, 30, E), "uint8", (30, 1))
    dense = rounded(key)
    state, expected = (sr.sdpa_state(query, x, x, backend=backend) for x in (key, dense))
    np.testing.assert_allclose(state.lse, expected.lse, rtol=1e-6)
    weights, expected = (sr.sdpa_weights(query, x, backend=backend) for x in (key, dense))
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-7)


def test_no_dense_copy_is_made():
    rng, S = np.random.default_rng(0), 20000
    key = coded(rng, (Hkv, S, 64), "int8", (S, 1), dtype=np.float16)
    for L in (1, 64):
        query = rng.standard_normal((Hq, L, 64)).astype(np.float32)
        sr.sdpa(query, key, key, backend="numba")  # which compiles, and remembers what it needs again
        tracemalloc.start()
        sr.sdpa(query, key, key, backend="numba")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < key.nbytes / 10 + 2 * query.nbytes


TOUCH = """
import numpy as np, sdpa_ref as sr, ml_dtypes
from guard_pages import guarded
rng = np.random.default_rng(0)
for E in (8, 16, 20, 40, 64, 72):
    for P in (1, 3, 8, 24):
        for at_end in (False, True):
            for code in ("float32", "int8", "float8_e4m3fn", "nibble"):
                shape = (5, 2, P, E // 2 if code == "nibble" else E)
                if code == "float32":
                    pages = guarded(rng.standard_normal(shape).astype(code), at_end)
                else:
                    codes = rng.integers(0, 120, shape).astype(np.uint8)
                    codes = codes if code == "nibble" else codes.view(getattr(ml_dtypes, code, np.int8))
                    scale = guarded(rng.random((5, 2, P, 1)).astype(np.float16), at_end)
                    bits = 4 if code == "nibble" else 8
                    pages = sr.Quantized(guarded(codes, at_end), scale, bits=bits)
                table = guarded(np.array([[4, 1], [3, 0]], np.int32), at_end)
                keys = sr.Paged(pages, table, guarded(np.array([2 * P, P]), at_end))
                for L in (1, 10):
                    query = rng.standard_normal((2, 4, L, E)).astype(np.float32)
                    sr.sdpa(query, keys, keys, backend="numba")
print("untouched")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="guard pages are made with mprotect")
def test_nothing_beside_tables_pages_and_codes_is_touched():
    support = str(Path(__file__).parents[1] / "support")
    program = f"import sys; sys.path.insert(0, {support!r})\n{TOUCH}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "untouched\n"), done.stderr


class TestKeyPositions:
    """Rule 39: what is positional goes by `key_positions`, all else by slots."""

    positions = np.array([0, 1, 2, 10, 11, 14, 15, 16, 20])
    S, L, offset = 9, 4, 17

    def visible(self, name):
        """Return by hand which keys (L, S) rows at 17, 18, 19 and 20 see."""
        p, k = self.offset + np.arange(self.L)[:, None], self.positions
        return {
            "Causal": k <= p,
            "Window": (p - 5 <= k) & (k <= p + 1),
            "Prefix": (k < 12) | (k <= p),
            "Chunked": (k <= p) & (k // 5 == p // 5),
            "FirstTokens": np.broadcast_to(k < 11, (self.L, self.S)),
            "streaming": ((p - 4 <= k) & (k <= p)) | ((k < 2) & (k <= p)),
            "KeyLengths": (np.arange(self.S) < 7) & (k <= p),
        }[name]

    masks: ClassVar = {
        "Causal": sr.Causal(),
        "Window": sr.Window(5, 1),
        "Prefix": sr.Prefix(12),
        "Chunked": sr.Chunked(5),
        "FirstTokens": sr.FirstTokens(11),
        "streaming": sr.Causal() & (sr.Window(4, 0) | sr.FirstTokens(2)),
        "KeyLengths": sr.Causal() & sr.KeyLengths(7),
    }

    @pytest.mark.parametrize("name", masks)
    def test_masks(self, backend, name):
        rng = np.random.default_rng(0)
        query, (key, value) = rng.standard_normal((2, self.L, 8)), rng.standard_normal((2, 2, self.S, 8))
        options = {"query_offset": self.offset, "backend": backend}
        got = sr.sdpa(query, key, value, mask=self.masks[name], key_positions=self.positions, **options)
        np.testing.assert_allclose(
            got, sr.sdpa(query, key, value, mask=self.visible(name), backend=backend), atol=1e-14
        )

    @pytest.mark.parametrize("L", [1, 4, 30])
    def test_alibi(self, backend, L):
        rng, slopes = np.random.default_rng(0), np.array([0.5, 0.25])
        query, (key, value) = rng.standard_normal((2, L, 8)), rng.standard_normal((2, 2, self.S, 8))
        stands = self.offset + np.arange(L)[:, None]
        bias = -slopes[:, None, None] * abs(stands - self.positions)
        options = {"query_offset": self.offset, "key_positions": self.positions, "backend": backend}
        got = sr.sdpa(query, key, value, bias=sr.ALiBi(slopes), **options)
        np.testing.assert_allclose(got, sr.sdpa(query, key, value, bias=bias, backend=backend), atol=1e-13)

    def test_alibi_has_a_gradient(self, gradient_backend):
        rng, slopes = np.random.default_rng(0), np.array([0.5, 0.25])
        query, (key, value) = rng.standard_normal((2, 5, 8)), rng.standard_normal((2, 2, self.S, 8))
        bias = -slopes[:, None, None] * abs(self.offset + np.arange(5)[:, None] - self.positions)
        options = {"query_offset": self.offset, "key_positions": self.positions}
        got = sr.sdpa_vjp(query, key, value, query, bias=sr.ALiBi(slopes), backend=gradient_backend, **options)
        expected = sr.sdpa_vjp(query, key, value, query, bias=bias, backend=gradient_backend)
        for name in ("query", "key", "value"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=1e-12)

    def test_end_is_the_position_of_the_last_valid_key(self, backend):
        x = np.random.default_rng(0).standard_normal((2, 1, self.S, 8))
        query, lengths = x[:, :, :2], np.array([9, 6])
        options = {"mask": sr.Window(3, 0) & sr.KeyLengths(lengths), "key_positions": self.positions}
        got = sr.sdpa(query, x, x, query_offset="end", backend=backend, **options)
        np.testing.assert_array_equal(
            got, sr.sdpa(query, x, x, query_offset=np.array([20 - 1, 14 - 1]), backend=backend, **options)
        )

    def test_entries_have_positions_of_their_own_and_free_slots_any(self, backend):
        x = np.random.default_rng(0).standard_normal((2, 1, 5, 8))
        positions = np.array([[3, 4, 9, 9, 0], [1, 5, 6, 7, 8]])
        options = {"mask": sr.Causal() & sr.KeyLengths([3, 5]), "query_offset": 6, "backend": backend}
        got = sr.sdpa(x[:, :, :1], x, x, key_positions=positions, **options)
        keep = np.array([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]], bool)[:, None, None]
        np.testing.assert_allclose(got, sr.sdpa(x[:, :, :1], x, x, mask=keep, backend=backend), atol=1e-15)

    @pytest.mark.parametrize(
        ("positions", "error", "says"),
        {
            "floats": ([0.0, 1.0, 2.0], TypeError, "must be integers, got float64"),
            "few": ([0, 1], ValueError, r"must have shape \(S,\).*S = 3.*got \(2,\)"),
            "equal": ([0, 4, 4], ValueError, "must increase strictly.*got 4 for key 1 and 4 for key 2"),
            "falling": ([5, 4, 6], ValueError, "must increase strictly"),
            "negative": ([-1, 4, 6], ValueError, r"must be in \[0, 2\*\*40\]"),
            "far": ([1, 2, 2**41], ValueError, r"must be in \[0, 2\*\*40\]"),
        }.values(),
    )
    def test_errors(self, positions, error, says):
        x = np.zeros((1, 3, 4))
        with pytest.raises(error, match=says):
            sr.sdpa(x, x, x, mask=sr.Causal(), query_offset=0, key_positions=positions)

    def test_a_positional_mask_needs_an_offset_also_of_equal_lengths(self):
        x = np.zeros((1, 3, 4))
        with pytest.raises(ValueError, match=r"query_offset must say where .* key_positions are given"):
            sr.sdpa(x, x, x, mask=sr.Causal(), key_positions=[0, 1, 2])
        sr.sdpa(x, x, x, mask=sr.KeyLengths(2), key_positions=[0, 1, 2])
        with pytest.raises(ValueError, match="not with Packed"):
            sr.sdpa(x, x, x, mask=sr.Packed([3]) & sr.Causal(), query_offset=0, key_positions=[0, 1, 2])


def test_a_tree_is_the_last_keys_that_exist(backend):
    rng, S = np.random.default_rng(0), 8
    query, x = rng.standard_normal((2, 1, 3, 4)), rng.standard_normal((2, 1, S, 4))
    tree = sr.Tree([-1, 0, 0]) & sr.KeyLengths([8, 5])
    keep = np.zeros((2, 1, 3, S), bool)
    for b, n in enumerate((8, 5)):
        keep[b, :, :, : n - 3] = True
        for i, j in ((0, 0), (1, 0), (1, 1), (2, 0), (2, 2)):
            keep[b, 0, i, n - 3 + j] = True
    got = sr.sdpa(query, x, x, mask=tree, backend=backend)
    np.testing.assert_allclose(got, sr.sdpa(query, x, x, mask=keep, backend=backend), atol=1e-15)
    with pytest.raises(ValueError, match="Tree needs its L = 3 nodes among the valid keys, but KeyLengths leaves 2"):
        sr.sdpa(query, x, x, mask=sr.Tree([-1, 0, 0]) & sr.KeyLengths([8, 2]), backend=backend)
