// gradients.h: what flows into a row, and what a score and its gradient become on the way back.
//
// pull_query.cu and pull_key.cu are specialised by ELEMENT, WIDTH and VALUE_WIDTH (E and Ev in whole steps of 16), KEYS (of
// a tile beside that of a block), WARPS (of 16 rows each), MATRICES (whether by matrix units), VECTOR, TURING, and the
// options of scores.h. P are the weights, dO and O gradient and output: dS = P (dO V^T - rowsum(dO O)).
#pragma once
constexpr int ROW_TILES = 1, ROWS = 16 * WARPS;

#if MATRICES
#include "products.h"
#else
#include "plain_products.h"
#endif
#include "flow.h"
#include "results.h"

typedef Number Scores[ROW_TILES][KEYS / 8][4];

// Turns s, the product of query and key, into the weight that the value had, and dp, that of dO and the value, into the
// gradient by `scale * s`. Returns the gradient by the bias. A key that the row drops has none, whatever lies there.
DEVICE Number pull(const Parameters& p, const Change& change, u32 b, const Row& row, const Flow& flow, int j, Number& s,
                   Number& dp) {
    Number score = adjusted(p, change, 0, row, j, s), slope = 1;
    if (flow.factor == 0 || score == -infinity()) return s = dp = 0;
    if (SOFTCAP) {
        Number t = hyperbolic_tangent(s * change.scale * change.shrink);
        slope -= t * t;
    }
    bool kept = keeps_weight(p, b, row, j);
    Number weight = power_of_2((score - flow.m) * (Number)LOG2_E) * flow.factor;
    Number inner = weight * ((kept ? dp * (Number)p.dropout_factor : 0) - flow.inner);
    s = kept ? weight : 0;
    dp = inner * slope;
    return inner;
}

// Halves numbers to be rounded to `half`, and all sums that they are added to, until they are within its range; `unit`
// is what was multiplied so far, the same for all lanes of a warp.
template <int N> DEVICE void fit(Scores& numbers, Number (&sums)[ROW_TILES][N][4], Number& unit) {
    if (ELEMENT != 0 || !MATRICES) return;
    Number top = 0, shrink = 1;
    UNROLL for (int x = 0; x < KEYS / 2; x++) {
        Number number = numbers[0][x / 4][x % 4];
        if (is_finite(number)) top = maximum(top, maximum(number, -number));
    }
    if (warp_any(top * unit > 32768)) {
        UNROLL for (int mask = 1; mask < 32; mask *= 2) top = maximum(top, shuffle_xor(top, mask));
        ROLLED while (top * unit * shrink > 32768) shrink *= 0.5f;
        unit *= shrink;
        UNROLL for (int x = 0; x < N * 4; x++) sums[0][x / 4][x % 4] *= shrink;
    }
    UNROLL for (int x = 0; x < KEYS / 2; x++) numbers[0][x / 4][x % 4] *= unit;
}

// Calls f(row of the warp's tile, column, number) for the sums of this lane.
template <int N, class F> DEVICE void for_each_sum(const Number (&sums)[ROW_TILES][N][4], F f) {
    int lane = thread_x() % 32;
    UNROLL for (int x = 0; x < N * 4; x++) {
        f(x % 4 / 2 * 8 + lane / 4, x / 4 * 8 + lane % 4 * 2 + x % 2, sums[0][x / 4][x % 4]);
    }
}

DEVICE Number& sum_at(const View& view, char* row, int column) { return *(Number*)(row + column * view.column); }
