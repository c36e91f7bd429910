// scores.h: what happens to one score between the two products. Specialised by SOFTCAP and DROPOUT (0 or 1) and BIAS (the
// type of a bias array as load_any has it, -1 where there is none), so that no score asks for them.
#pragma once
#include "philox.h"
#include "rows.h"
#include "score_mod.h"

struct Change {  // of a score, in the type of its sums
    Number scale, cap, shrink;
};
DEVICE Change change_of(const Parameters& p) {
    return {(Number)p.scale, (Number)p.softcap, SOFTCAP ? (Number)(1 / p.softcap) : 0};
}

DEVICE bool inside(const Row& row, int j) { return j < row.prefix || (row.start <= j && j < row.stop); }

DEVICE Number bias_at(const Parameters& p, const Row& row, int j) {
    return BIAS < 0 ? 0 : load_any(row.bias + j * p.bias.column, BIAS);
}

// Returns whether the row keeps the key.
DEVICE bool keeps(const Parameters& p, const Row& row, int j) {
    return inside(row, j) && (!row.dense || row.dense[j * p.dense.column]) && bias_at(p, row, j) != -infinity();
}

// Returns scale * s after softcap, bias, ALiBi and the user's function, or -inf where the row drops the key.
DEVICE Number adjusted(const Parameters& p, const Change& change, u32 b, const Row& row, int j, Number s) {
    if (!inside(row, j) || (row.dense && !row.dense[j * p.dense.column])) return -infinity();
    Number bias = bias_at(p, row, j);
    if (bias == -infinity()) return -infinity();
    s *= change.scale;
    if (SOFTCAP) {
        Number x = s * change.shrink, small = sizeof(Number) == 4 ? 1e-8 : 1e-17;
        s = x * x < small ? s : change.cap * hyperbolic_tangent(x);  // tanh x = x there, even if x is subnormal
    }
    s += bias;
    if (p.slopes.data) {
        i64 distance = row.position - j;
        s -= row.slope * (Number)(distance < 0 ? -distance : distance);
    }
    return modified(p, s, p.first_entry + b, p.first_head + row.h, p.first_row + row.i, p.first_key + j);
}

// Returns the random words of four keys, j / 4 of which is `quad`; dropout keeps those of the threshold and more.
DEVICE Words words_of(const Parameters& p, u32 b, const Row& row, u32 quad) {
    u32 i = (u32)(p.first_row + row.i), h = (u32)(p.first_head + row.h), entry = b + (u32)p.first_entry;
    return philox((u32)(p.first_key / 4) + quad, i, h, entry, (u32)p.seed_low, (u32)p.seed_high);
}
DEVICE bool keeps_weight(const Parameters& p, u32 b, const Row& row, int j) {
    return !DROPOUT || word(words_of(p, b, row, (u32)j / 4), j % 4) >= (u32)p.threshold;
}

// Returns for which of four calls, a bit each, dropout keeps the key of this lane, the lane % 4th of the call's. Four lanes
// make a call each, with the row and the quad given, and hand the others their words.
DEVICE u32 kept_of_calls(const Parameters& p, u32 b, const Row& row, u32 quad) {
    if (!DROPOUT) return ~0u;
    int lane = thread_x() % 32;
    Words words = words_of(p, b, row, quad);
    u32 kept = 0;
    UNROLL for (int mask = 0; mask < 4; mask++) {
        int other = (lane ^ mask) % 4;
        kept |= (u32)(shuffle_xor(word(words, other), mask) >= (u32)p.threshold) << other;
    }
    return kept;
}

// Returns the product of a query and key j, read where they lie.
DEVICE Number dot(const Parameters& p, const char* query, const Side& key, int j) {
    Number sum = 0;
    ROLLED for (int e = 0; e < (int)p.E; e++) {
        sum = multiply_add(load<Element>(query + e * p.query.column), key_number(p, key, j, e), sum);
    }
    return sum;
}
