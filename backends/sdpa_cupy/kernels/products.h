// products.h: the two products of a warp by matrix units. A step takes 32 bytes of a row: 16 numbers, or 8 of float.
// plain_products.h has the same without matrix units.
//
// Fragments: lane l, with g = l / 4 and t = l % 4, holds of a 16x8 tile of scores or outputs the elements
// 0: (g, 2 t), 1: (g, 2 t + 1), 2: (g + 8, 2 t), 3: (g + 8, 2 t + 1).
#pragma once
#include "tiles.h"

#if ELEMENT == 2

struct Split {  // x = big + small, as far as two TF32 numbers can hold it
    u32 whole, big, small;
};

DEVICE Split split(u32 bits) {
    u32 whole = to_tf32(float_of(bits)), rest = to_tf32(float_of(bits) - float_of(whole));
    // Infinity counts once, in `whole`: times the other's small part, often 0, it would be NaN.
    u32 finite = ~(u32)((int)((bits & 0x7f800000u) + 0x00800000u) >> 31);  // all bits, or none
    return {whole, whole & finite, rest & finite};
}

// d += a b to about 22 bits: what is left out, small times small, is below their last. `turned` has the bits that b a has.
template <bool turned> DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Split x[4] = {split(a[0]), split(a[1]), split(a[2]), split(a[3])}, y[2] = {split(b0), split(b1)};
    if (turned) mma_1688_tf32(d, {x[0].big, x[1].big, x[2].big, x[3].big}, {y[0].small, y[1].small});
    mma_1688_tf32(d, {x[0].small, x[1].small, x[2].small, x[3].small}, {y[0].big, y[1].big});
    if (!turned) mma_1688_tf32(d, {x[0].big, x[1].big, x[2].big, x[3].big}, {y[0].small, y[1].small});
    mma_1688_tf32(d, {x[0].whole, x[1].whole, x[2].whole, x[3].whole}, {y[0].whole, y[1].whole});
}

#elif TURING

template <bool turned> DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_1688(d, a[0], a[1], b0, Element());
    mma_1688(d, a[2], a[3], b1, Element());
}

#else

template <bool turned> DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_16816(d, a, {b0, b1}, Element());
}

#endif

// d += a b, for float by a sum of its own. Matrix units cut sums off where float32 rounds them, always towards zero; over
// many terms that would add up. A sum of one step is added to d by float32's own addition.
template <bool apart, bool turned = false>
DEVICE void add_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (ELEMENT != 2 || !apart) return multiply<turned>(d, a, b0, b1);
    float sum[4] = {};
    multiply<turned>(sum, a, b0, b1);
    UNROLL for (int x = 0; x < 4; x++) d[x] += sum[x];
}

template <int M, int N> DEVICE void fill(float (&tile)[M][N][4], float number) {
    UNROLL for (int x = 0; x < M * N * 4; x++) tile[x / 4 / N][x / 4 % N][x % 4] = number;
}

// s = Q K^T for the warp's rows of a tile of queries and all rows of a tile of keys. Sums of few terms stay in d. `turned`
// has the bits of K Q^T.
template <int COLUMNS, bool turned = false>
DEVICE void score(float (&s)[ROW_TILES][KEYS / 8][4], const char* queries, const char* keys) {
    int lane = thread_x() % 32;
    fill(s, 0);
    queries += lane % 16 * pitch(COLUMNS) + lane / 16 * 16;
    keys += (lane % 8 + lane / 16 * 8) * pitch(COLUMNS) + lane / 8 % 2 * 16;
    ROLLED for (int step = 0; step < COLUMNS * (int)sizeof(Element); step += 32) {
        u32 a[ROW_TILES][4];
        UNROLL for (int rt = 0; rt < ROW_TILES; rt++) ldmatrix_x4(a[rt], queries + rt * 16 * pitch(COLUMNS) + step);
        UNROLL for (int n = 0; n < KEYS / 8; n += 2) {
            u32 b[4];  // 16 keys
            ldmatrix_x4(b, keys + n * 8 * pitch(COLUMNS) + step);
            UNROLL for (int rt = 0; rt < ROW_TILES; rt++) {
                add_product<(COLUMNS > 64), turned>(s[rt][n], a[rt], b[0], b[1]);
                add_product<(COLUMNS > 64), turned>(s[rt][n + 1], a[rt], b[2], b[3]);
            }
        }
    }
}

// o += P V, the weights P where `score` left scores, rounded to the type of V; P is used up.
template <int N>
DEVICE void mix(float (&o)[ROW_TILES][N][4], float (&p)[ROW_TILES][KEYS / 8][4], const char* values) {
    constexpr int PITCH = pitch(8 * N);
    int lane = thread_x() % 32;
#if ELEMENT == 2
    // Of the 8 keys of a step this lane's P has 2 t and 2 t + 1, where the fragment has t and t + 4. The rows of V
    // are taken in the same order. P moves up for each step: in a loop that is not unrolled, few sums are under way.
    values += lane % 4 * 2 * PITCH + lane / 4 * 4;
    ROLLED for (int k = 0; k < KEYS / 8; k++, values += 8 * PITCH) {
        u32 a[ROW_TILES][4];
        UNROLL for (int rt = 0; rt < ROW_TILES; rt++) {
            UNROLL for (int x = 0; x < 4; x++) a[rt][x] = bits_of(p[rt][0][x % 2 * 2 + x / 2]);
            UNROLL for (int x = 4; x < KEYS / 2; x++) p[rt][x / 4 - 1][x % 4] = p[rt][x / 4][x % 4];
        }
        UNROLL for (int n = 0; n < N; n++) {
            u32 b0 = *(const u32*)(values + n * 32), b1 = *(const u32*)(values + n * 32 + PITCH);
            UNROLL for (int rt = 0; rt < ROW_TILES; rt++) {
                add_product<true>(o[rt][n], a[rt], b0, b1);
            }
        }
    }
#else
    values += lane % 16 * PITCH + lane / 16 * 16;
    UNROLL for (int k = 0; k < KEYS / 8; k += 2) {
        u32 a[ROW_TILES][4];
        UNROLL for (int rt = 0; rt < ROW_TILES; rt++) {
            UNROLL for (int x = 0; x < 4; x++) {
                const float(&pair)[4] = p[rt][k + x / 2];
                a[rt][x] = pack2(pair[x % 2 * 2], pair[x % 2 * 2 + 1], Element());
            }
        }
        UNROLL for (int n = 0; n < N; n += 2) {
            u32 b[4];
            ldmatrix_x4_trans(b, values + k * 8 * PITCH + n * 16);
            UNROLL for (int rt = 0; rt < ROW_TILES; rt++) {
                multiply<false>(o[rt][n], a[rt], b[0], b[1]);
                multiply<false>(o[rt][n + 1], a[rt], b[2], b[3]);
            }
        }
    }
#endif
}
