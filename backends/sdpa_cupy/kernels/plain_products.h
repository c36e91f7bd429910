// plain_products.h: the products of products.h by fused multiply-adds, for what matrix units do not take. Fragments are
// the same. The sum of a score has the bits of plain.cu: number by number of a row, from the first.
#pragma once
#include "tiles.h"

template <int M, int N> DEVICE void fill(Number (&tile)[M][N][4], Number number) {
    UNROLL for (int x = 0; x < M * N * 4; x++) tile[x / 4 / N][x / 4 % N][x % 4] = number;
}

DEVICE Number number_of(const char* row, int column) { return widen(((const Element*)row)[column]); }

// s = Q K^T for the warp's rows of a tile of queries and all rows of a tile of keys; `turned` changes no bit.
template <int COLUMNS, bool turned = false>
DEVICE void score(Number (&s)[ROW_TILES][KEYS / 8][4], const char* queries, const char* keys) {
    int lane = thread_x() % 32;
    fill(s, 0);
    queries += lane / 4 * pitch(COLUMNS);
    keys += lane % 4 * 2 * pitch(COLUMNS);
    ROLLED for (int e = 0; e < COLUMNS; e++) {
        Number upper = number_of(queries, e), lower = number_of(queries + 8 * pitch(COLUMNS), e);
        UNROLL for (int x = 0; x < KEYS / 4; x++) {
            Number key = number_of(keys + (x / 2 * 8 + x % 2) * pitch(COLUMNS), e);
            Number(&pair)[4] = s[0][x / 2];
            pair[x % 2] = multiply_add(upper, key, pair[x % 2]);
            pair[x % 2 + 2] = multiply_add(lower, key, pair[x % 2 + 2]);
        }
    }
}

// o += P V, the weights P where `score` left scores. Four lanes share a row of P, and hand it round.
template <int N>
DEVICE void mix(Number (&o)[ROW_TILES][N][4], Number (&p)[ROW_TILES][KEYS / 8][4], const char* values) {
    int lane = thread_x() % 32;
    ROLLED for (int mask = 0; mask < 4; mask++) {
        UNROLL for (int k = 0; k < KEYS / 8; k++) {
            Number own[4];
            UNROLL for (int x = 0; x < 4; x++) own[x] = shuffle_xor(p[0][k][x], mask);
            const char* row = values + (k * 8 + (lane ^ mask) % 4 * 2) * pitch(8 * N);
            UNROLL for (int x = 0; x < 2 * N; x++) {
                int d = x / 2 * 8 + lane % 4 * 2 + x % 2;
                Number first = number_of(row, d), second = number_of(row + pitch(8 * N), d);
                Number &upper = o[0][x / 2][x % 2], &lower = o[0][x / 2][x % 2 + 2];
                upper = multiply_add(own[1], second, multiply_add(own[0], first, upper));
                lower = multiply_add(own[3], second, multiply_add(own[2], first, lower));
            }
        }
    }
}
