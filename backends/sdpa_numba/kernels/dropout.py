"""Philox 4x32-10 for a vector of rows at a time (Salmon, Moraes, Dror and Shaw, SC 2011)."""

from functools import cache

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.simd import loader, splatter


@cache
def keeper(lanes):
    """Return ``keep_bits(p, b, h, i, quad)``: which of the rows listed at `h` and `i` keep each of four keys."""
    load, splat = loader("int64", "int64", lanes), splatter("int64", lanes)

    @part
    def keep_bits(p, b, h, i, quad):
        low, half = splat(0xFFFFFFFF), splat(32)
        first, second = splat(0xD2511F53), splat(0xCD9E8D57)
        c0, c1 = splat(quad + p.first_key // 4) & low, (load(i) + splat(p.first_row)) & low
        c2, c3 = (load(h) + splat(p.first_head)) & low, splat(b + p.first_entry) & low
        k0, k1 = p.seed_low, p.seed_high
        for _ in range(10):
            x, y = first * c0, second * c2
            c0, c1 = (y >> half) ^ c1 ^ splat(k0), y & low
            c2, c3 = (x >> half) ^ c3 ^ splat(k1), x & low
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        below = splat(p.dropout_threshold - 1)
        return below < c0, below < c1, below < c2, below < c3

    return keep_bits
